"""The ranks that save or load together: what one of them fails in, fails on all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from ottava.errors import CheckpointError, UsageError

_T = TypeVar("_T")


class Ranks:
    """The ranks of a group, or this process alone; raises UsageError where this process is not in the group."""

    def __init__(self, group: Any) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        if self.alone and group is not None:
            raise UsageError("a group is given but no process group is initialized", expected="group=None")
        self.group = group
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.world = 1 if self.alone else dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError("this process is not in the group", expected="a group with all that save or load")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values = [value] * self.world
        if not self.alone:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def each(self, function: Callable[[], _T]) -> _T:
        """What ``function`` gives here, once it has succeeded on every rank; else an error on every rank."""
        result: list[_T] = []
        failure: Exception | None = None
        try:
            result.append(function())
        except Exception as error:
            failure = error
        messages = self.gather(None if failure is None else str(failure))
        _fail(failure, {rank: message for rank, message in enumerate(messages) if message is not None})
        return result[0]

    def run(self, function: Callable[..., object], *args: Any, **options: Any) -> None:
        """A function of DCP, whose failures are reported as in :meth:`each`."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with warnings.catch_warnings():
                # One process alone is what is meant.
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                function(*args, process_group=self.group, no_dist=self.alone, **options)
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            _fail(causes.get(self.rank), causes)


def _fail(own: BaseException | None, failures: Mapping[int, Any]) -> None:
    if own is not None:
        raise own
    for rank, message in failures.items():
        raise CheckpointError(f"rank {rank} failed: {message}", expected="success on every rank")
