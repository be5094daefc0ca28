"""All-reduce (MAX, SUM) and all-gather for any caller, and checks in which all ranks fail alike."""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ottava.errors import CheckpointError, OptionError, UsageError, listed, text_of
from ottava.torch_private import resolve_process_group

_T = TypeVar("_T")

# Tensors whose ``grad``, a reference in C++, keeps the tensors of the last collectives alive.
# gloo's thread releases a tensor a moment after the collective has returned. If it had the last
# reference, it would need the interpreter, and a process that ends in this moment would abort.
_keepers: deque[torch.Tensor] = deque(maxlen=16)


#: Whether there is a process group to reduce over.
process_groups_ready: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool


def check_group(group: Any) -> None:
    """Check that ``group`` is a process group that this process is in, the name of one, or None.

    Raises:
        OptionError: it is neither.
    """
    if group is not None and not isinstance(group, str) and not hasattr(group, "group_name"):
        expected = "a process group that this process is in, the name of one, or None"
        remedy = (
            "pass what torch.distributed.new_group() returned on a member, or a mesh's get_group()"
        )
        raise OptionError(f"the group is {group!r}", expected, remedy)


def find_group(group: Any) -> Any:
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


def spans_ranks(group: Any) -> bool:
    """Whether a reduction over a group, or over the group of that name, involves other ranks."""
    return process_groups_ready() and dist.get_world_size(find_group(group)) > 1


# The name of the group that has this process alone, once it is made.
_own: list[str] = []


def group_of_this_rank() -> Any:
    """A group that has this process alone, so that a reduction over it changes nothing."""
    for name in _own:
        with contextlib.suppress(RuntimeError, LookupError):
            return resolve_process_group(name)
    # The group is made without the other ranks, which may be waiting for something else. The
    # backend is gloo, because NCCL would split a communicator of all ranks.
    backend = "gloo" if dist.is_gloo_available() else None
    group = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    _own[:] = [group.group_name]
    return group


def all_reduce_max(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The elementwise maximum of ``values`` over the ranks of ``group``.

    Args:
        values: float32 or float64, any shape; not changed. With one rank they are the result.
        group: a process group or its name (a name keeps no group alive); None is the default group.

    Raises:
        UsageError: no process group is initialized, or none has the name ``group``.
        OptionError: ``group`` is no process group, or one that this process is not in.
    """
    return _all_reduce(values, "MAX", group)


def all_reduce_sum(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The elementwise sum over the ranks; arguments and errors as of :func:`all_reduce_max`."""
    return _all_reduce(values, "SUM", group)


def _all_reduce(values: torch.Tensor, operation: str, group: Any) -> torch.Tensor:
    group = _ready(group)
    if dist.get_world_size(group) == 1:
        return values
    reduced = values.clone()
    _keep(reduced)
    dist.all_reduce(reduced, op=getattr(dist.ReduceOp, operation), group=group)
    return reduced


def all_gather(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The ``values`` of all ranks of ``group``, in the order of the ranks.

    Args:
        values: of the same shape and dtype on all ranks; 8-bit floats must be viewed as bytes.
        group: as of :func:`all_reduce_max`.

    Returns:
        ``[ranks, *values.shape]``.

    Raises:
        UsageError, OptionError: as of :func:`all_reduce_max`.
    """
    group = _ready(group)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return values.unsqueeze(0)
    sent = values.contiguous().view(-1)
    gathered = sent.new_empty(ranks * sent.numel())
    _keep(sent, gathered)
    dist.all_gather_into_tensor(gathered, sent, group=group)
    return gathered.view(ranks, *values.shape)


def _ready(group: Any) -> Any:
    if not process_groups_ready():
        raise UsageError(
            "a reduction over processes was asked for but no process group is initialized",
            "torch.distributed.init_process_group() before",
            "or set with_amax_reduction=False",
        )
    return find_group(group)


def _keep(*tensors: torch.Tensor) -> None:
    for tensor in tensors if not torch.compiler.is_compiling() else ():
        keeper = torch.empty_like(tensor)
        keeper.grad = tensor
        _keepers.append(keeper)


class Ranks:
    """The ranks of a group, which do things together: if one of them fails, all do.

    It is this process alone if no process group is initialized.

    Raises:
        UsageError: a group is given, and no process group is initialized.
        OptionError: this process is not in the group.
    """

    def __init__(self, group: Any) -> None:
        self.group = find_group(group)
        self.alone = not process_groups_ready()
        self.rank, self.world = 0, 1
        if not self.alone:
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which are pickled to be sent."""
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
        try:
            result = function()
        # An interrupt is caught too, because the other ranks would wait for this one.
        except BaseException as error:
            failure = error
        messages = self.gather(None if failure is None else text_of(failure))
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise CheckpointError(
                    f"rank {rank} failed: {message}", expected="success on every rank"
                )
        return result


class Disagreement(NamedTuple):
    """The texts of the error that is raised if ranks are about to do different things."""

    what: str
    expected: str
    remedy: str


def check_alike(
    lines: Sequence[str], group: Any, device: torch.device | None, error: Disagreement
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
    (error, first), *others = Ranks(find_group(group)).gather((error, list(lines)))
    rank, other = next(
        (number, theirs) for number, (_, theirs) in enumerate(others, 1) if theirs != first
    )
    only_first = [line for line in first if line not in other]
    only_other = [line for line in other if line not in first]
    difference = "they ran in another order"
    if only_first or only_other:
        difference = (
            f"rank 0 has {listed(only_first) or 'nothing else'}, "
            f"rank {rank} {listed(only_other) or 'nothing else'}"
        )
    raise UsageError(f"{error.what}: {difference}", error.expected, error.remedy)
