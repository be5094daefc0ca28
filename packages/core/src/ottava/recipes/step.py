"""The step: what owns the states that begin it together, and says when it begins.

The layers below a converted model begin one step, at its forward pass; layers that run in
``autocast`` blocks of one recipe and process group begin another, at the entry of a block; a layer
outside of both begins its own. What ran, in the order in which it ran, decides all of it: that is
the same on all ranks, as the garbage collector is not.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ottava.collectives import (
    Disagreement,
    check_alike,
    group_of_this_rank,
    process_groups_ready,
    spans_ranks,
)
from ottava.errors import UsageError, stable_repr
from ottava.kernels.direct import in_dual_level, transform
from ottava.recipes.base import Recipe
from ottava.recipes.state import RecipeState, by_recipe
from ottava.torch_private import (
    PipelinePass,
    current_node,
    graph_task_id,
    is_exporting,
    pipeline_pass,
    top_hooks,
)


def is_taken_apart(compiling: bool) -> bool:
    """Whether this runs for an exported program, which has no backward pass, or in what layers
    refuse to run in."""
    return transform() is not None or (is_exporting() if compiling else in_dual_level())


def backward_task() -> int:
    """The number of the backward pass that this runs in; -1 outside any, and in compiled code."""
    return -1 if torch.compiler.is_compiling() else graph_task_id()


def repeats_forward() -> bool:
    """Whether a checkpoint that is not reentrant runs this again, for a node that asks for what it
    saved. A reentrant one is itself a node, of a function in Python, and ran this without gradients
    before."""
    hooks, node = top_hooks(False), current_node()
    if hooks and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook."):
        return True
    function = getattr(type(node), "_forward_cls", None)
    return node is not None and (function is None or function.__module__.startswith("ottava."))


def begin(
    states: Sequence[RecipeState], group: Any, compiling: bool = False, pending: bool = False
) -> None:
    """Update the states, those of equal recipes in one call. They hold nothing of the step before
    afterwards, and begin the next one, too, if they are ``pending``."""
    # A state that consists of several may be found by itself and as a part.
    parts = {id(part): part for state in states for part in state.parts()}.values()
    for recipe, together in by_recipe([(part.recipe, part) for part in parts]):
        recipe.update_states(together, group)
    if not compiling:
        for state in states:
            # Not by assignments, which modules make slow.
            state.__dict__.update(_pending=pending, _backward_ran=False)


def _line(state: RecipeState) -> str:
    """What a state belongs to, what it serves, and its recipe. (Functions are at another address in
    each process.)"""
    name = state._roles[0].name or "a layer"
    served = ", ".join(role.tensor_type for role in state._roles)
    return f"{name} ({served}): {stable_repr(state.recipe)}"


_OTHER_LAYERS = Disagreement(
    "the ranks of the group reduce amaxes of other layers",
    "the same layers and the same options of their recipe on all ranks",
    "give layers that only some ranks have a group of these ranks, by "
    "autocast(amax_reduction_group=...)",
)


def _check_alike(states: Sequence[RecipeState], group: Any) -> None:
    """Compare the layers and the options of recipes that reduce amaxes, in one small all-gather.
    Ranks that differ would take the amaxes of other layers for theirs, or wait for ever: a
    UsageError on all of them."""
    if not spans_ranks(group):
        return
    parts: list[Any] = [part for state in states for part in state.parts()]
    # A rank that reduces nothing takes part: others may.
    lines = [_line(part) for part in parts if part.recipe.reduces_amaxes]
    device = next((buffer.device for part in parts for buffer in part.buffers()), None)
    check_alike(lines, group, device, _OTHER_LAYERS)


def begin_alone(state: RecipeState) -> None:
    """Begin the step of a layer that runs in no region, unless a microbatch before began it."""
    passing, group = pipeline_pass(), None
    if passing is not None:
        if passing.microbatch:
            return
        group = group_in_pipeline([state], passing.ranks)
    for part in state.parts():
        part.recipe.update_states([part], group)


def group_in_pipeline(states: Sequence[RecipeState], ranks: int) -> Any:
    """The group of a stage's amaxes where none was given: ranks of other stages have other layers.

    Args:
        ranks: of the pipeline.

    Raises:
        UsageError: several ranks may have the same stage, and which these are is not known.
    """
    reduces = any(part.recipe.reduces_amaxes for state in states for part in state.parts())
    if ranks < 2 or not (reduces and spans_ranks(None)):
        return None
    if ranks == dist.get_world_size():
        return group_of_this_rank()
    what = (
        f"the layers are in a pipeline of {ranks} of {dist.get_world_size()} ranks, and reduce "
        f"amaxes over all"
    )
    expected = "the group of the ranks that have the same stage"
    remedy = "call schedule.step(...) in a block of ottava.autocast(amax_reduction_group=group)"
    raise UsageError(what, expected, remedy)


_collecting = [False]
# What other ranks may be about to begin is not for the garbage collector of this one.
_awaited: set["Step"] = set()
# Where there are ranks: of which layer a state was taken.
_layers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _note_collection(phase: str, info: dict[str, int]) -> None:
    _collecting[0] = phase == "start"


def _member(state: Any, layer: Any) -> Callable[[], Any]:
    """Gives the state as long as its layer lives. One that the garbage collector takes away counts
    as alive until the next step begins, because it does so at another time on each rank."""
    if _note_collection not in gc.callbacks:
        gc.callbacks.append(_note_collection)
    held = [state]
    alive = weakref.ref(layer, lambda _: None if _collecting[0] else held.clear())
    return lambda: (
        held[0] if held and alive is not None else None
    )  # which keeps the reference, and so what it calls


def _modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """``model.modules()``, in a third of the time."""
    found: dict[int, torch.nn.Module] = {}
    waiting: list[Any] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += reversed(module._modules.values())
    return list(found.values())


class Step:
    """The states that begin a step together: each that ran, until a step has begun with it."""

    #: Gives the converted model that begins it, if one does.
    model: Any = None
    #: Whether it began before the forward pass of its model, which then goes on with it.
    ahead: bool = False
    #: The ranks of the pipeline whose stages run in it; 0 outside of any.
    pipeline_ranks: int = 0
    _compared: bool = False

    def __init__(self) -> None:
        self._ran: list[
            tuple[Any, Any]
        ] = []  # a reference to a state, or the state: compiled code cannot ask which

    def _states(self, model: torch.nn.Module | None, compiling: bool) -> list[RecipeState]:
        """Those that begin the next step: all of a model, in the order of its modules, others as
        they ran."""
        found: dict[int, Any] = {}
        modules: Any = () if model is None else model.modules() if compiling else _modules_of(model)
        for module in modules:
            if isinstance(module, RecipeState) and module.stateful:
                found[id(module)] = module
        for reference, kept in self._ran:
            state = reference() if kept is None else kept
            if state is not None and state.step is self and state._pending:
                found.setdefault(id(state), state)
        return list(found.values())

    def begin(
        self, group: Any, model: torch.nn.Module | None = None, *, calibrated: bool = False
    ) -> None:
        """Begin a step, of ``model`` if its layers begin it. Those that were ``calibrated`` begin
        the next one, too."""
        compiling = torch.compiler.is_compiling()
        states = self._states(model, compiling)
        if group is None and self.pipeline_ranks and not compiling:
            group = group_in_pipeline(states, self.pipeline_ranks)
        if states and not (compiling or self._compared):
            _check_alike(states, group)
            self._compared = True
        begin(states, group, compiling, calibrated)
        if not (calibrated or compiling):
            # After an interrupt on the way here, the next step begins with them.
            self._ran, self.pipeline_ranks = [], 0
            _awaited.discard(self)

    def enter_pipeline(self, passing: PipelinePass | None) -> bool:
        """Note the pipeline that runs now. Whether the step may begin: the first microbatch of a
        schedule begins it for all of them."""
        if passing is None:
            return True
        self.pipeline_ranks = passing.ranks
        return not (passing.microbatch or passing.infers)

    def join(self, layer: Any, state: Any, group: Any, calibrating: bool, compiling: bool) -> None:
        """Take in the state of a layer that runs now."""
        if state._pending and state.step is self:
            return
        if state._pending and not calibrating:
            # It still holds amaxes of a step that others began, or that a checkpoint was saved in.
            begin([state], group, compiling)
        self.take(layer, state, compiling)

    def take(self, layer: Any, state: Any, compiling: bool = False) -> None:
        """Have the state of a layer, or of the one that it was taken of before, begin the next step
        with the others."""
        if compiling:
            # Compiled code makes no weak references.
            self._ran.append((None, state))
            state.step, state._pending = self, True
            return
        self.enter_pipeline(pipeline_pass())
        entry: Any = weakref.ref(state)
        if process_groups_ready():
            of = _layers.get(state) if layer is None else weakref.ref(layer)
            if of is None or of() is None:
                # One that has run in evaluation mode only begins by itself when it runs in
                # training.
                state.step = None
                return
            _layers[state], entry = of, _member(state, of())
            _awaited.add(self)
        # In this order, an interrupt in between loses nobody.
        self._ran.append((entry, None))
        state.__dict__.update(step=self, _pending=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ran": [], "model": None, "_compared": False, "pipeline_ranks": 0}


# Found again by what a region says: a new block for every step, with an equal recipe, continues the
# last one. Open regions and the states that ran in them keep a step; nothing else does.
_steps: list[tuple[Recipe | None, Any, Any, Step | None]] = []


def step_for(recipe: Recipe | None, amax_reduction_group: Any) -> Step:
    """The step of regions with this recipe (None: the bound ones) and group."""
    # A name can be held when the group is gone.
    key = getattr(amax_reduction_group, "group_name", amax_reduction_group)
    for known, known_key, entry, kept in _steps:
        same = known is recipe if known is None or recipe is None else known.same_as(recipe)
        found: Step | None = entry() if kept is None else kept
        if same and known_key == key and found is not None:
            return found
    made = Step()
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _steps[:] = [entry for entry in _steps if entry[3] is not None or entry[2]() is not None]
    _steps.append(
        (recipe, key, None, made) if compiling else (recipe, key, weakref.ref(made), None)
    )
    return made
