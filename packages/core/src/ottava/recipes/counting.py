"""Steps in high precision at the beginning and at the end of training, for any recipe.

A recipe says by ``high_precision_until_step`` and ``high_precision_after_step`` in which steps the
layers that it serves compute in high precision. Their state counts the steps
(:class:`ScheduledState`). A step is one of :class:`ottava.recipes.step.Step`: evaluation and
recomputation begin none, and compute as the last step did.
"""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ottava.collectives import Group
from ottava.errors import UsageError
from ottava.kernels.table import define
from ottava.recipes.mixed import MixedState
from ottava.recipes.role import QuantizerRole
from ottava.recipes.schedule import Schedule
from ottava.recipes.state import RecipeState
from ottava.torch_private import graph_task_id

# Compiled code names a state by its key.
_keys = itertools.count()
_by_key: weakref.WeakValueDictionary[int, "ScheduledState"] = weakref.WeakValueDictionary()


class ScheduledState(MixedState):
    """The state of a recipe with a schedule: that of the recipe, and the number of steps.

    The decision for a step is a bool, not a tensor, because the passes of the two kinds have
    different graphs: compiled code is compiled once for each kind. Compiled code that begins a step
    cannot read the number, so the decision for the next step is made when a step begins.

    Attributes:
        steps: buffer, int64 ``[]``: the number of steps that have begun.
        schedule: which of them compute in high precision.
        counted_in: the :class:`~ottava.recipes.step.Step` that counted the last one; None for a
            layer's own.
    """

    steps: torch.Tensor
    counted_in: object = None

    def __init__(
        self,
        recipe: Any,
        roles: Sequence[QuantizerRole],
        part: RecipeState,
        schedule: Schedule,
        amax_reduction_group: Group = None,
    ) -> None:
        super().__init__(recipe, [(roles, part)], amax_reduction_group)
        self.schedule = schedule
        self.has_schedule = True
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device="cpu"))
        self.take_number(0)
        self._take_key()

    def is_high_precision_step(self) -> bool:
        return self._is_high_precision or super().is_high_precision_step()

    def take_number(self, steps: int) -> None:
        """Make the decisions after this number of steps.

        Before the first step, an evaluation computes as that will.
        """
        self._is_high_precision = self.schedule.in_high_precision(max(steps, 1))
        self._next_is_high_precision = self.schedule.in_high_precision(steps + 1)

    def reset(self) -> None:
        super().reset()
        self.steps.zero_()
        self.take_number(0)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if not self.steps.is_meta:
            self.take_number(int(self.steps))

    def _take_key(self) -> None:
        self._key = next(_keys)
        _by_key[self._key] = self

    def __deepcopy__(self, memo: dict[int, object]) -> "RecipeState":
        duplicate = super().__deepcopy__(memo)
        assert isinstance(duplicate, ScheduledState)
        duplicate._take_key()
        return duplicate

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"counted_in": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._take_key()


def count_step(states: Iterable[RecipeState], step: object, compiling: bool) -> None:
    """Count the step that begins with these states, and decide in which precision it computes.

    Args:
        step: the :class:`~ottava.recipes.step.Step` that begins; None for a layer's own.
        compiling: whether this is being compiled.
    """
    _count_for(list(_scheduled(states)), step, compiling)


def count_joined_step(state: RecipeState, step: object, compiling: bool) -> None:
    """Count a step that has begun without a state, whose layer runs in it now.

    Arguments are those of :func:`count_step`.
    """
    missed = [part for part in _scheduled([state]) if part.counted_in is not step]
    _count_for(missed, step, compiling)


def _scheduled(states: Iterable[RecipeState]) -> Iterator[ScheduledState]:
    """The scheduled states among states and their parts, each once."""
    seen: set[int] = set()
    for state in states:
        if not state.has_schedule or not isinstance(state, torch.nn.Module):
            continue
        for module in state.modules():
            if isinstance(module, ScheduledState) and id(module) not in seen:
                seen.add(id(module))
                yield module


def _count_for(states: list[ScheduledState], step: object, compiling: bool) -> None:
    if not states:
        return
    numbers = [state.steps for state in states]
    keys = [state._key for state in states]
    for state in states:
        state.__dict__["counted_in"] = step
    if not compiling:
        _count(numbers, keys)
        return
    for state in states:
        # A constant: compiled code writes attributes when the graph has run, which moves the other.
        state._is_high_precision = True if state._next_is_high_precision else False  # noqa: SIM210
    _count_in_graph(numbers, keys, [state._is_high_precision for state in states])


def _count(numbers: list[torch.Tensor], keys: list[int]) -> None:
    # One transfer, if the numbers are on a GPU.
    steps = (torch.stack(numbers) + 1).tolist()
    for number, key, count in zip(numbers, keys, steps, strict=True):
        number.fill_(count)
        state = _by_key.get(key)
        if state is not None:
            state.take_number(count)


def _count_in_a_step(numbers: list[torch.Tensor], keys: list[int], decisions: list[bool]) -> None:
    if graph_task_id() == -1:
        _count(numbers, keys)
        return
    # No step begins in a backward pass, where activation checkpointing runs compiled code again.
    # That code is the graph of the next step's kind, because guards cannot see the backward pass.
    for number, key, decision in zip(numbers, keys, decisions, strict=True):
        state = _by_key.get(key)
        if state is not None and state.schedule.in_high_precision(int(number)) is not decision:
            raise UsageError(
                f"compiled code is recomputed in step {int(number)}, and the next step computes "
                f"in another precision",
                expected="no checkpoint around compiled code where steps change their precision",
                remedy="checkpoint parts of the model inside of the compiled code",
            )


_count_in_graph = define(
    "count_step(Tensor(a!)[] numbers, int[] keys, bool[] decisions) -> ()",
    _count_in_a_step,
    lambda *_: None,
)
