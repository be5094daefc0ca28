"""Amax reduction over a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ottava.errors import UsageError


def reduce_amax(amax: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The largest amax over ``group`` (None: the default group), in one all-reduce(MAX).

    Args:
        amax: float32, any shape; not changed.

    Raises:
        UsageError: no process group is initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "amax reduction was asked for but no process group is initialized",
            expected="torch.distributed.init_process_group() before training",
            remedy="initialize it, or set with_amax_reduction=False",
        )
    if dist.get_world_size(group) == 1:
        return amax
    reduced = amax.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    return reduced
