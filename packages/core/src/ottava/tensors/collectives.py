"""The one collective of scaling: all-reduce(MAX)."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from ottava.errors import UsageError
from ottava.torch_private import resolve_process_group

# Hold the last reduced tensors as their ``grad``. gloo's thread lets go of a tensor a moment after the collective has
# returned; if Python's is the only reference left then, the thread needs the interpreter, and a process that ends in
# this moment aborts. A reference held in C++ spares it that.
_keepers: deque[torch.Tensor] = deque(maxlen=16)


def process_groups_ready() -> bool:
    """Whether there is a process group to reduce over."""
    return dist.is_available() and dist.is_initialized()


def find_group(group: Any) -> Any:
    """The process group itself, of a group or the name of one; None stays None.

    Raises:
        UsageError: no process group is initialized, or none has the name.
    """
    if group is None:
        return None
    if not process_groups_ready():
        raise UsageError(
            f"the group {group!r} was given but no process group is initialized",
            expected="torch.distributed.init_process_group() before, or no group",
        )
    if not isinstance(group, str):
        return group
    try:
        return resolve_process_group(group)
    except (RuntimeError, LookupError) as error:
        raise UsageError(f"no process group has the name {group!r}", expected="a group's group_name") from error


def all_reduce_max(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The elementwise maximum of ``values`` over the ranks of ``group``, a new tensor.

    Args:
        values: float32, any shape; not changed.
        group: a process group or its name (a name keeps no group alive); None is the default group.

    Raises:
        UsageError: no process group is initialized.
    """
    if not process_groups_ready():
        raise UsageError(
            "a reduction over processes was asked for but no process group is initialized",
            expected="torch.distributed.init_process_group() before training",
            remedy="initialize it, or set with_amax_reduction=False",
        )
    group = find_group(group)
    if dist.get_world_size(group) == 1:
        return values
    reduced = values.clone()
    if not torch.compiler.is_compiling():
        keeper = torch.empty_like(reduced)
        keeper.grad = reduced
        _keepers.append(keeper)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    return reduced
