"""The ranks that save or load together: what one of them fails in, fails on all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ottava.errors import CheckpointError, UsageError

_T = TypeVar("_T")


class Ranks:
    """The ranks of a group, or this process alone: they fail together, each with what it knows.

    Raises:
        UsageError: this process is not in the group.
    """

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
        self._raise(failure, self.gather(None if failure is None else str(failure)))
        return result[0]

    def _raise(self, own: BaseException | None, messages: list[str | None]) -> None:
        if own is not None:
            raise own
        for rank, message in enumerate(messages):
            if message is not None:
                raise CheckpointError(f"rank {rank} failed: {message}", expected="success on every rank")

    def run(self, function: Callable[[], object]) -> None:
        """A function of DCP, whose failures are reported as in :meth:`each`."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with warnings.catch_warnings():
                # One process alone is what is meant.
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                function()
        except CheckpointException as error:
            messages: list[str | None] = [None] * self.world
            for rank, (cause, _) in error.failures.items():
                messages[rank] = str(cause)
            own = error.failures.get(self.rank)
            self._raise(None if own is None else own[0], messages)
            raise CheckpointError(f"a rank failed: {error}", expected="success on every rank") from error
