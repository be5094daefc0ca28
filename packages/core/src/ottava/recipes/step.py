"""The step: what owns the states that begin it together, and says when it begins.

The layers below a converted model begin one step, at its forward pass; layers that run in ``autocast`` blocks of one
recipe and process group begin another, at the entry of a block; a layer outside of both begins its own. All of it
follows from what ran, in the order in which it ran, which is the same on all ranks: nothing waits for the garbage
collector, which is not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ottava.collectives import process_groups_ready
from ottava.kernels.direct import in_dual_level, transform
from ottava.recipes.base import Recipe
from ottava.recipes.ranks import check_alike
from ottava.recipes.state import RecipeState, by_recipe
from ottava.torch_private import graph_task_id

# Blocks of so many recipes and groups are known at a time. One that comes back later begins with what it still has.
_MOST_STEPS = 16


def is_taken_apart() -> bool:
    """Whether this runs for an exported program, which has no backward pass, or in what layers refuse to run in."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return transform() is not None or in_dual_level()


def may_begin() -> bool:
    """Whether a region that is entered now begins a step: not in evaluation, not in a recomputation."""
    outside = torch.compiler.is_compiling() or graph_task_id() == -1
    return torch.is_grad_enabled() and outside and not is_taken_apart()


def begin(states: Sequence[RecipeState], amax_reduction_group: Any) -> None:
    """Update the states, those of equal recipes in one call. They hold nothing of the step before afterwards."""
    # A state that consists of several may be found by itself and as a part.
    parts = {id(part): part for state in states for part in state.parts()}
    for recipe, together in by_recipe([(state.recipe, state) for state in parts.values()]):
        recipe.update_states(together, amax_reduction_group)
    if not torch.compiler.is_compiling():
        for state in (*states, *parts.values()):
            # Not by assignments, which modules make slow.
            state.__dict__.update(_pending=False, _backward_ran=False)


_collecting = [False]


def _note_collection(phase: str, info: dict[str, int]) -> None:
    _collecting[0] = phase == "start"


def _member(state: Any, layer: Any) -> Callable[[], Any]:
    """Gives the state as long as its layer lives.

    Where there are ranks, a layer that the garbage collector takes away counts as alive until the next step begins: it
    does so at another time on each, and they would wait for each other. A layer that is given up without it is gone.
    """
    if not process_groups_ready():
        return weakref.ref(state)
    if _note_collection not in gc.callbacks:
        gc.callbacks.append(_note_collection)
    held = [state]
    alive = weakref.ref(layer, lambda _: None if _collecting[0] else held.clear())
    return lambda: held[0] if held and alive is not None else None  # which keeps the reference, and so what it calls


class Step:
    """The states that begin a step together.

    A state that ran takes part from then on until a step has begun with it.
    """

    #: Gives the converted model that begins it, if one does.
    model: Any = None
    #: Whether it began before the forward pass of its model, which then goes on with it.
    ahead: bool = False
    _compared: bool = False

    def __init__(self) -> None:
        self._ran: list[Any] = []

    def states(self, model: torch.nn.Module | None = None) -> list[RecipeState]:
        """Those that begin the next step: all of a model, in the order of its modules, others as they ran."""
        found: dict[int, Any] = {}
        for module in () if model is None else model.modules():
            if isinstance(module, RecipeState) and module.stateful:
                found[id(module)] = module
        for entry in self._ran:
            state = entry if isinstance(entry, RecipeState) else entry()
            if state is not None and state.step is self and state._pending:
                found.setdefault(id(state), state)
        return list(found.values())

    def begin(
        self, amax_reduction_group: Any, model: torch.nn.Module | None = None, *, calibrated: bool = False
    ) -> None:
        """Begin a step, of ``model`` if its layers begin it. Those that were ``calibrated`` begin the next one, too.

        Raises:
            UsageError: at the first one, on all ranks, if they have other layers, or other options of a recipe.
        """
        states = self.states(model)
        if not torch.compiler.is_compiling():
            if states and not self._compared:
                check_alike(states, amax_reduction_group)
                self._compared = True
        begin(states, amax_reduction_group)
        if not (calibrated or torch.compiler.is_compiling()):
            # After an interrupt on the way here, the next step begins with them.
            self._ran = []
        for state in states if calibrated else ():
            state._pending = True

    def join(self, layer: Any, state: Any, amax_reduction_group: Any, *, calibrating: bool = False) -> None:
        """Take in the state of a layer that runs now."""
        if state._pending:
            if state.step is self:
                return
            if not calibrating:
                # It still holds amaxes of a step that others began, or that a checkpoint was saved in.
                begin([state], amax_reduction_group)
        self.take(layer, state)

    def take(self, layer: Any, state: Any) -> None:
        """Have the state of a layer begin the next step with the others."""
        # Compiled code makes no weak references. (In this order, an interrupt in between loses nobody.)
        self._ran.append(state if torch.compiler.is_compiling() else _member(state, layer))
        state.step, state._pending = self, True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ran": [], "model": None}


# Found again by what a region says: a new block for every step, with an equal recipe, continues the last one.
_steps: list[tuple[Recipe | None, Any, Step]] = []


def step_for(recipe: Recipe | None, amax_reduction_group: Any) -> Step:
    """The step of regions with this recipe (None: the bound ones) and group."""
    # A name can be held when the group is gone.
    key = getattr(amax_reduction_group, "group_name", amax_reduction_group)
    for known, known_key, step in _steps:
        same = known is recipe if known is None or recipe is None else known.same_as(recipe)
        if same and known_key == key:
            return step
    made = Step()
    # Those of recipes that nothing runs under any more go.
    _steps[:] = [*[entry for entry in _steps if entry[2].states()][1 - _MOST_STEPS :], (recipe, key, made)]
    return made
