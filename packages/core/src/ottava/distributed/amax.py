"""Amax reduction over a process group."""

from __future__ import annotations

from typing import Any

import torch

from ottava.tensors.collectives import all_reduce_max


def reduce_amax(amax: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The largest amax over ``group`` (None: the default group; a group's name will do), in one all-reduce(MAX).

    Args:
        amax: float32, any shape; not changed.

    Raises:
        UsageError: no process group is initialized.
    """
    return all_reduce_max(amax, group)
