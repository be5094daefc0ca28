"""Regions, which override the recipes bound to layers, and the steps that begin with them.

A step is what stateful states begin together: those of a converted model, whose forward pass is a region, or those that
ran inside ``autocast`` blocks of one recipe and process group.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ottava.collectives import check_group
from ottava.errors import OptionError
from ottava.kernels.direct import in_dual_level, transform
from ottava.recipes import registry
from ottava.recipes.base import Recipe, as_recipe, get_recipe
from ottava.recipes.state import RecipeState, by_recipe
from ottava.tensors.slots import above
from ottava.torch_private import constant_to_compiler, graph_task_id


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
    return differentiates() and (torch.compiler.is_compiling() or graph_task_id() == -1)


def differentiates() -> bool:
    """Whether a backward pass may follow this forward pass."""
    return torch.is_grad_enabled() and not is_taken_apart()


def is_taken_apart() -> bool:
    """Whether this runs for an exported program, which has no backward pass, or in what layers refuse to run in."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return transform() is not None or in_dual_level()


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


@dataclass(frozen=True)
class Region:
    """What an ``autocast`` block says."""

    recipe: Recipe | None = None
    enabled: bool = True
    amax_reduction_group: Any = None
    calibrating: bool = False
    # The backward pass inside which the block was entered, by autograd's number; -1 outside any.
    graph_task: int = -1
    # The converted module whose forward pass is this region; None for a block.
    module: torch.nn.Module | None = None
    # The stateful states that have run in regions like this one; None in a module's, which knows its own.
    step: Step | None = None
    # Whether a step began at its entry, or had begun when it was entered.
    began: bool = False


class _Regions(threading.local):
    """The regions that a thread is in, innermost last: one autocast object can serve several threads."""

    def __init__(self) -> None:
        self.stack: list[Region] = []


_regions = _Regions()


def current_region() -> Region | None:
    """The innermost region of this thread, or None."""
    return _regions.stack[-1] if _regions.stack else None


class autocast(contextlib.ContextDecorator):
    """A region in which layers run under ``recipe``.

    Args:
        recipe: replaces the recipes bound to layers; a registered name builds it with its defaults; None keeps the
            enclosing region's, or those bound.
        enabled: False computes in high precision.
        amax_reduction_group: process group over which amaxes are reduced, for recipes that do.
        calibrating: compute in high precision and let quantizers observe what they would quantize.

    Entered with gradients enabled, outside a backward pass and not inside another region for the same recipe and group,
    it begins a step: recipes that remember (delayed scaling) update their scales then, in one collective.

    The object can be entered again, also by other threads, and serves as a decorator of functions. Activation
    checkpointing repeats the forward pass under the recipe that a layer last ran under; where that is not enough (one
    layer under two recipes in one step) each of the layer's checkpoints takes its region as
    ``context_fn=lambda: (contextlib.nullcontext(), autocast(recipe))``.

    Raises:
        OptionError: ``enabled`` or ``calibrating`` is not a bool, or the group no process group.
        DTypeError: ``recipe`` is neither a recipe nor a name.
        RecipeNotFoundError: no installed package provides the name.
    """

    def __init__(
        self,
        recipe: Recipe | str | os.PathLike[str] | None = None,
        enabled: bool = True,
        amax_reduction_group: Any = None,
        calibrating: bool = False,
    ) -> None:
        for name, value in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(value, bool):
                what = f"autocast({name}={value!r})"
                raise OptionError(what, expected="True or False", remedy="pass the recipe as the first argument")
        check_group(amax_reduction_group)
        if isinstance(recipe, (str, os.PathLike)):
            # The same object each time: layers keep the state that it gave them.
            name = os.fspath(recipe)
            _found(name)
            recipe = registry.defaults[name][0]
        self._recipe = None if recipe is None else as_recipe(recipe)
        self._enabled = enabled
        self._group = amax_reduction_group
        self._calibrating = calibrating

    def __enter__(self) -> autocast:
        outer = current_region()
        recipe, group = self._recipe, self._group
        if outer is not None:
            recipe = outer.recipe if recipe is None else recipe
            group = outer.amax_reduction_group if group is None else group
        step = step_for(recipe, group)
        began = self._has_begun(step)
        if self._enabled and not self._calibrating and not began and may_begin():
            begin_step(step.states(), group)
            began = True
        region = Region(recipe, self._enabled, group, self._calibrating, backward_task(), step=step, began=began)
        _regions.stack.append(region)
        return self

    def _has_begun(self, step: Step) -> bool:
        """Whether this is inside a region that has begun the step already."""
        same = self._recipe is None and self._group is None
        return any(r.began and (r.step is step or (same and r.module is not None)) for r in _regions.stack)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = _regions.stack.pop()
        if region.calibrating and error is None and region.step is not None and region.graph_task == -1:
            # What was observed serves the next step, and evaluation, which begins none.
            begin_step(region.step.states(), region.amax_reduction_group)


# Layer of a sharded model -> the converted module whose forward pass is its region.
_outermost: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()
# Converted modules whose step has begun before their forward pass.
_ahead: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def enters_first(layer: torch.nn.Module) -> torch.nn.Module | None:
    """See that the region of ``layer``, if any, is entered before any other hook of its module runs; gives the module.

    FSDP puts its hook, which gathers, before those that were there.
    """
    module = _module_of(layer)
    hooks: Any = {} if module is None else module._forward_pre_hooks
    own = [key for key, hook in hooks.items() if hook is enter_module]
    if own and own[0] != next(iter(hooks)):
        hooks.move_to_end(own[0], last=False)
    return module


def begin_ahead(layer: torch.nn.Module) -> None:
    """Begin the step of the converted module that ``layer`` is in, whose weights are gathered before its region begins.

    That happens once, at the first forward pass; see :func:`enters_first`. Nothing is done inside a region, which has
    begun its step, in a backward pass, and in evaluation. Whether gradients are enabled cannot be told: FSDP turns
    them off.
    """
    module = enters_first(layer)
    if module is None or _regions.stack or not module.training or module in _ahead:
        return
    if backward_task() == -1:
        begin_step(states_of(module), None)
        _ahead.add(module)


def _module_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost converted module of a sharded model that ``layer`` is in."""
    known = _outermost.get(layer)
    module = None if known is None else known()
    if module is not None:
        return module
    sharded: list[torch.nn.Module] = above("fsdp2").sharded_modules()
    for module in (inner for outer in sharded for inner in outer.modules()):
        hooked = enter_module in module._forward_pre_hooks.values()
        if hooked and any(inner is layer for inner in module.modules()):
            _outermost[layer] = weakref.ref(module)
            return module
    return None


def enter_module(module: torch.nn.Module, args: Any = ()) -> None:
    """A forward pre-hook of converted modules: the forward pass of the outermost one is a region."""
    if _regions.stack and not _is_apart(module):
        return
    # Reentrant checkpointing runs the forward of a step without gradients, on inputs that need them.
    checkpointed = module.training and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    task = backward_task()
    began = may_begin() or (checkpointed and task == -1 and not is_taken_apart())
    compiling = torch.compiler.is_compiling()
    if began and (compiling or module not in _ahead):
        begin_step(states_of(module), None)
    if began and not compiling:
        _ahead.discard(module)
    _regions.stack.append(Region(graph_task=task, module=module, began=began))


def _is_apart(module: torch.nn.Module) -> bool:
    """Whether the enclosing regions are forward passes of modules that do not contain this one."""
    return all(r.module is not None and all(m is not module for m in r.module.modules()) for r in _regions.stack)


def leave_module(module: torch.nn.Module, args: Any = None, output: Any = None) -> None:
    """A forward hook of converted modules, called after an error too."""
    if _regions.stack and _regions.stack[-1].module is module:
        _regions.stack.pop()


def _remember_default(name: str) -> bool:
    """See that the registry's ``defaults`` has the recipe ``name``, of a file as it is now; raises as get_recipe."""
    stamp = None
    if registry.is_path(name):
        with contextlib.suppress(OSError):
            found = os.stat(name)
            stamp = found.st_mtime_ns, found.st_size
    if name not in registry.defaults or registry.defaults[name][1] != stamp:
        registry.defaults[name] = get_recipe(name), stamp
    return True


# A compiled function may name its recipe: the registry is asked once, while the function is traced.
_found = constant_to_compiler(_remember_default)
