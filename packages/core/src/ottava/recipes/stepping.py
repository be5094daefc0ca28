"""Which stateful states begin a step together, and when."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ottava.recipes.base import Recipe
from ottava.recipes.state import RecipeState, by_recipe
from ottava.torch_private import graph_task_id


def states_of(module: torch.nn.Module) -> list[RecipeState]:
    """The stateful states of a module's layers, in the order of the modules."""
    return [m for m in module.modules() if isinstance(m, RecipeState) and m.stateful]


def begin_step(states: Iterable[RecipeState], amax_reduction_group: Any) -> None:
    """Update the states, those of equal recipes in one call."""
    whole = list(states)
    # A state that consists of several may be found by itself and as a part.
    parts = {id(part): part for state in whole for part in state.parts()}
    for recipe, together in by_recipe([(state.recipe, state) for state in parts.values()]):
        recipe.update_states(together, amax_reduction_group)
    if not torch.compiler.is_compiling():
        for state in (*whole, *parts.values()):
            if state.backward_ran:  # setting attributes of a module takes long
                state.backward_ran = False


def backward_task() -> int:
    """The number of the backward pass that this runs in; -1 outside any, and in compiled code."""
    return -1 if torch.compiler.is_compiling() else graph_task_id()


def may_begin() -> bool:
    """Whether a region that is entered now begins a step: not in evaluation, not in a recomputation."""
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or graph_task_id() == -1)


class Step:
    """The states that begin a step together: those that ran in regions of one recipe and process group, oldest first.

    They belong to their layers, and leave when these go.
    """

    def __init__(self) -> None:
        self._members: list[weakref.ref[Any]] = []
        self._joined: list[RecipeState] = []

    def join(self, state: Any) -> bool:
        """Take a state in, once; True when it is new here."""
        if state.step is self:
            return False
        state.step = self
        if torch.compiler.is_compiling():
            self._joined.append(state)  # compiled code makes no weak references
        else:
            self._members.append(weakref.ref(state))
        return True

    def states(self) -> list[RecipeState]:
        """The members that are still in use."""
        if self._joined:
            self._members += [weakref.ref(state) for state in self._joined]
            self._joined.clear()
        alive = [(reference, reference()) for reference in self._members]
        present = [(reference, state) for reference, state in alive if state is not None and state.step is self]
        if len(present) != len(alive):
            self._members = [reference for reference, _ in present]
        return [state for _, state in present]


# Found again by what a region says: a new block for every step, with an equal recipe, continues the last one.
_steps: list[tuple[Recipe | None, Any, Step]] = []


def step_for(recipe: Recipe | None, amax_reduction_group: Any) -> Step:
    """The states that begin a step together in regions with this recipe (None: the bound ones) and group."""
    # A name can be held when the group is gone.
    key = getattr(amax_reduction_group, "group_name", amax_reduction_group)
    for known, known_key, step in _steps:
        same = known is recipe if known is None or recipe is None else known.same_as(recipe)
        if same and known_key == key:
            return step
    made = Step()
    # Those of recipes that nothing runs under any more go.
    _steps[:] = [*(entry for entry in _steps if entry[2].states()), (recipe, key, made)]
    return made
