"""All-reduces (MAX, SUM) and all-gather, which anyone may call; and ranks that fail together."""

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

# Hold the last tensors of collectives as their ``grad``, a reference in C++: gloo's thread lets go
# of a tensor a moment after the collective has returned. With the last reference it would need the
# interpreter, and a process that ends in this moment would abort.
_keepers: deque[torch.Tensor] = deque(maxlen=16)


#: Whether there is a process group to reduce over.
process_groups_ready: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool


def check_group(group: Any) -> None:
    """Refuse with an OptionError what is no process group that this process is in, no name of one,
    and not None."""
    if group is not None and not isinstance(group, str) and not hasattr(group, "group_name"):
        expected = "a process group that this process is in, the name of one, or None"
        remedy = (
            "pass what torch.distributed.new_group() returned on a member, or a mesh's get_group()"
        )
        raise OptionError(f"the group is {group!r}", expected, remedy)


def find_group(group: Any) -> Any:
    """The process group itself, of a group or its name; None stays None. UsageError, OptionError:
    there is none."""
    check_group(group)
    if group is not None and not process_groups_ready():
        what = f"the group {group!r} was given but no process group is initialized"
        raise UsageError(
            what, expected="torch.distributed.init_process_group() before, or no group"
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
    """Whether a reduction over a group, of which this may be the name, asks other ranks; False
    where there are none."""
    return process_groups_ready() and dist.get_world_size(find_group(group)) > 1


# The names of the groups that were made of this process alone.
_own: list[str] = []


def group_of_this_rank() -> Any:
    """A group of this process alone, made by no other process: nothing is reduced over it."""
    for name in _own:
        with contextlib.suppress(RuntimeError, LookupError):
            return resolve_process_group(name)
    # Without the others, which may be waiting for something else; NCCL would split a communicator
    # of all.
    backend = "gloo" if dist.is_gloo_available() else None
    made = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    _own[:] = [made.group_name]
    return made


def all_reduce_max(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The elementwise maximum of ``values`` over the ranks of ``group``, a new tensor.

    Args:
        values: float32 or float64, any shape; not changed.
        group: a process group or its name (a name keeps no group alive); None is the default group.

    Raises:
        UsageError, OptionError: no process group is initialized; ``group`` is none, or not this
            process's.
    """
    return _all_reduce(values, "MAX", group)


def all_reduce_sum(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The elementwise sum over the ranks, a new tensor; arguments and errors as of
    :func:`all_reduce_max`."""
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
    """The ``values`` of all ranks of ``group``, in the order of the ranks:
    ``[ranks, *values.shape]``.

    Args:
        values: of one shape and dtype on all ranks; bytes, for 8-bit float dtypes.
        group: as of :func:`all_reduce_max`.

    Raises:
        UsageError, OptionError: no process group is initialized; ``group`` is none, or not this
            process's.
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
        what = "a reduction over processes was asked for but no process group is initialized"
        raise UsageError(
            what,
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
    """The ranks of a group, or this process alone where there is none: what one of them fails in,
    fails on all. UsageError where a group is given and none is initialized, OptionError where this
    process is not in it."""

    def __init__(self, group: Any) -> None:
        self.group, self.alone = find_group(group), not process_groups_ready()
        self.rank, self.world = (
            (0, 1) if self.alone else (dist.get_rank(self.group), dist.get_world_size(self.group))
        )

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which are pickled on their way."""
        values = [value] * self.world
        if not self.alone:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def each(self, function: Callable[[], _T]) -> _T:
        """What ``function`` gives here, once it has succeeded on every rank; else an error on every
        rank."""
        failure: BaseException | None = None
        try:
            result = function()
        # An interrupt, too: the others would wait for this rank.
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
    """What an error says where ranks are about to do different things."""

    what: str
    expected: str
    remedy: str


def check_alike(
    lines: Sequence[str], group: Any, device: torch.device | None, error: Disagreement
) -> None:
    """Compare what the ranks of a group are about to do, in one all-gather of 32 bytes.

    Args:
        lines: what this rank is about to do, in words that other processes would use, too.
        group: as of :func:`all_reduce_max`.
        device: where the group's collectives run; None is the default device.
        error: what is said where the lines differ. The words of the first rank serve all of them.

    Raises:
        UsageError: the lines differ; on every rank, with one text.
    """
    hashed = hashlib.sha256("\n".join(lines).encode()).digest()
    digest = torch.tensor(list(hashed), dtype=torch.uint8, device=device)
    if bool((all_gather(digest, group) == digest).all()):
        return
    of_ranks = Ranks(find_group(group)).gather((error, list(lines)))
    (error, first), *others = of_ranks
    rank, other = next((at, told) for at, (_, told) in enumerate(others, 1) if told != first)
    mine = [line for line in first if line not in other]
    theirs = [line for line in other if line not in first]
    found = "they ran in another order"
    if mine or theirs:
        here, there = listed(mine) or "nothing else", listed(theirs) or "nothing else"
        found = f"rank 0 has {here}, rank {rank} {there}"
    raise UsageError(f"{error.what}: {found}", error.expected, error.remedy)
