"""All-reduce (MAX, SUM) and all-gather for any caller, and checks in which all ranks fail alike."""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from ottava.errors import CheckpointError, OptionError, UsageError, listed, text_of
from ottava.torch_private import resolve_process_group

if TYPE_CHECKING:
    # A build of torch without distributed training lacks the class.
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")

#: A process group, the name of one (a name keeps no group alive), or None for the default group.
Group: TypeAlias = "ProcessGroup | str | None"

# Tensors whose ``grad``, a reference in C++, keeps the tensors of the last collectives alive.
# gloo's thread releases a tensor a moment after the collective has returned. If it had the last
# reference, it would need the interpreter, and a process that ends in this moment would abort.
_keepers: deque[torch.Tensor] = deque(maxlen=16)


#: Whether a process group is initialized, over which reductions are possible.
process_groups_ready: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool


def check_group(group: object) -> None:
    """Check that ``group`` is a :data:`Group`, and that this process is in it.

    Raises:
        OptionError: it is not.
    """
    if group is None or isinstance(group, str) or hasattr(group, "group_name"):
        return
    raise OptionError(
        f"the group is {group!r}",
        "a process group that this process is in, the name of one, or None",
        "pass what torch.distributed.new_group() returned on a member, or a mesh's get_group()",
    )


def find_group(group: Group) -> "ProcessGroup | None":
    """The process group for a group or its name; None stays None.

    Raises:
        UsageError: no process group is initialized, or none has this name.
        OptionError: ``group`` is something else, or a group that this process is not in.
    """
    check_group(group)
    if group is not None and not process_groups_ready():
        raise UsageError(
            f"the group {group!r} was given but no process group is initialized",
            expected="torch.distributed.init_process_group() before, or no group",
        )
    if not isinstance(group, str):
        return group
    try:
        return resolve_process_group(group)
    except (RuntimeError, LookupError) as error:
        raise UsageError(
            f"no process group has the name {group!r}", expected="a group's group_name"
        ) from error


def spans_ranks(group: Group) -> bool:
    """Whether a reduction over ``group`` involves other ranks."""
    return process_groups_ready() and dist.get_world_size(find_group(group)) > 1


# The name of the group that has this process alone; empty until the first call needs the group.
_own_group_names: list[str] = []


def group_of_this_rank() -> "ProcessGroup":
    """A group that has this process alone, so that a reduction over it changes nothing."""
    for name in _own_group_names:
        with contextlib.suppress(RuntimeError, LookupError):
            return resolve_process_group(name)
    # The group is made without the other ranks, which may be waiting for something else. The
    # backend is gloo, because NCCL would split a communicator of all ranks.
    backend = "gloo" if dist.is_gloo_available() else None
    group: ProcessGroup = dist.new_group(
        [dist.get_rank()], backend=backend, use_local_synchronization=True
    )
    _own_group_names[:] = [group.group_name]
    return group


def all_reduce_max(values: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The elementwise maximum of ``values`` over the ranks of ``group``.

    Args:
        values: float32 or float64, any shape; not changed. With one rank they are the result.
        group: a process group or its name (a name keeps no group alive); None is the default group.

    Raises:
        UsageError: no process group is initialized, or none has the name ``group``.
        OptionError: ``group`` is no process group, or one that this process is not in.
    """
    return _all_reduce(values, "MAX", group)


def all_reduce_sum(values: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The elementwise sum over the ranks; arguments and errors as of :func:`all_reduce_max`."""
    return _all_reduce(values, "SUM", group)


def _all_reduce(values: torch.Tensor, operation: str, group: Group) -> torch.Tensor:
    ranks = _initialized_group(group)
    if dist.get_world_size(ranks) == 1:
        return values
    result = values.clone()
    _keep_alive(result)
    dist.all_reduce(result, op=getattr(dist.ReduceOp, operation), group=ranks)
    return result


def all_gather(values: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The ``values`` of all ranks of ``group``, in the order of the ranks.

    Args:
        values: of the same shape and dtype on all ranks; 8-bit floats must be viewed as bytes.
        group: as of :func:`all_reduce_max`.

    Returns:
        ``[ranks, *values.shape]``.

    Raises:
        UsageError, OptionError: as of :func:`all_reduce_max`.
    """
    ranks = _initialized_group(group)
    world = dist.get_world_size(ranks)
    if world == 1:
        return values.unsqueeze(0)
    flat = values.contiguous().view(-1)
    result = flat.new_empty(world * flat.numel())
    _keep_alive(flat, result)
    dist.all_gather_into_tensor(result, flat, group=ranks)
    return result.view(world, *values.shape)


def _initialized_group(group: Group) -> "ProcessGroup | None":
    if not process_groups_ready():
        raise UsageError(
            "a reduction over processes was asked for but no process group is initialized",
            "torch.distributed.init_process_group() before",
            "or set with_amax_reduction=False",
        )
    return find_group(group)


def _keep_alive(*tensors: torch.Tensor) -> None:
    """Keep tensors of a collective alive until gloo's thread has released them."""
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        keeper = torch.empty_like(tensor)
        keeper.grad = tensor
        _keepers.append(keeper)


class Ranks:
    """The ranks of a group, which do things together: if one of them fails, all do.

    Without an initialized process group, this process is the only rank.

    Attributes:
        group: the process group; None is the default group.
        alone: whether no process group is initialized.
        rank: the number of this process in the group.
        world: the number of ranks in the group.

    Raises:
        UsageError: a group is given, and no process group is initialized.
        OptionError: this process is not in the group.
    """

    def __init__(self, group: Group) -> None:
        self.group = find_group(group)
        self.alone = not process_groups_ready()
        self.rank = 0
        self.world = 1
        if not self.alone:
            self.rank = dist.get_rank(self.group)
            self.world = dist.get_world_size(self.group)

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, in the order of the ranks. They are sent as pickles."""
        values = [value] * self.world
        if not self.alone:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def each(self, function: Callable[[], _T]) -> _T:
        """The result of ``function`` on this rank, once it has succeeded on every rank.

        Raises:
            CheckpointError: it failed on another rank. On the rank where it failed, its own
                exception is raised.
        """
        failure: BaseException | None = None
        text: str | None = None
        try:
            result = function()
        # An interrupt is caught too, because the other ranks would wait for this one.
        except BaseException as error:
            failure = error
            text = text_of(error)
        texts = self.gather(text)
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(
                    f"rank {rank} failed: {text}", expected="success on every rank"
                )
        return result


class Disagreement(NamedTuple):
    """The texts of the error that is raised if ranks are about to do different things."""

    fault: str
    expected: str
    remedy: str


def check_alike(
    lines: Sequence[str], group: Group, device: torch.device | None, error: Disagreement
) -> None:
    """Check that all ranks of a group are about to do the same, with one all-gather of 32 bytes.

    Args:
        lines: a description of what this rank is about to do; equal on all ranks that do the same.
        group: as of :func:`all_reduce_max`.
        device: where the group's collectives run; None is the default device.
        error: the texts of the error. All ranks use those of the first rank.

    Raises:
        UsageError: the lines differ. It is raised on every rank, with the same text.
    """
    hashed = hashlib.sha256("\n".join(lines).encode()).digest()
    digest = torch.tensor(list(hashed), dtype=torch.uint8, device=device)
    if bool((all_gather(digest, group) == digest).all()):
        return
    (error, first), *others = Ranks(group).gather((error, list(lines)))
    for rank, (_, other) in enumerate(others, 1):
        if other != first:
            difference = _difference(first, other, rank)
            raise UsageError(f"{error.fault}: {difference}", error.expected, error.remedy)


def _difference(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    """How the lines of the first rank and those of rank number ``rank`` differ, in words."""
    only_first = [line for line in first if line not in other]
    only_other = [line for line in other if line not in first]
    if not only_first and not only_other:
        return "they ran in another order"
    return (
        f"rank 0 has {listed(only_first) or 'nothing else'}, "
        f"rank {rank} {listed(only_other) or 'nothing else'}"
    )
