"""Regions: ``autocast`` blocks, which override the recipes bound to layers, and forward passes of converted models."""

from __future__ import annotations

import contextlib
import copyreg
import os
import threading
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ottava.collectives import check_group
from ottava.errors import OptionError
from ottava.recipes import registry
from ottava.recipes.base import Recipe, as_recipe, get_recipe
from ottava.recipes.step import Step, is_taken_apart, may_begin, step_for
from ottava.torch_private import constant_to_compiler, graph_task_id


@dataclass(eq=False, slots=True)
class Region:
    """What an ``autocast`` block, or the forward pass of a converted model, says.

    Attributes:
        recipe: replaces the bound ones; None keeps them.
        step: what the states that run in it begin together.
        began: whether the step has begun, at its entry or before.
        graph_task: the backward pass inside which it was entered, by autograd's number; -1 outside any.
        owner: the block; None for a forward pass.
        model: the converted model whose forward pass the region, or one that it continues, is.
    """

    recipe: Recipe | None
    enabled: bool
    group: Any
    calibrating: bool
    step: Step
    began: bool
    graph_task: int
    owner: Any
    model: Any = None


class _Regions(threading.local):
    """The regions that a thread is in, innermost last, and what ``microbatch`` blocks say."""

    def __init__(self) -> None:
        self.stack: list[Region] = []
        self.first: bool | None = None


regions = _Regions()


def backward_task() -> int:
    """The number of the backward pass that this runs in; -1 outside any, and in compiled code."""
    return -1 if torch.compiler.is_compiling() else graph_task_id()


def current_region() -> Region | None:
    """The innermost region of this thread, or None."""
    return regions.stack[-1] if regions.stack else None


class microbatch(contextlib.ContextDecorator):
    """A block in which every layer takes ``is_first_microbatch=first``, unless its call says otherwise.

    With ``first=True`` the layers quantize their weights and keep them; with False they use what they kept.

    Raises:
        OptionError: ``first`` is not a bool.
    """

    def __init__(self, first: bool) -> None:
        if not isinstance(first, bool):
            raise OptionError(f"microbatch(first={first!r})", expected="True or False")
        self._first = first
        self._outer: list[bool | None] = []

    def __enter__(self) -> microbatch:
        self._outer.append(regions.first)
        regions.first = self._first
        return self

    def __exit__(self, *error: object) -> None:
        regions.first = self._outer.pop()


class autocast(contextlib.ContextDecorator):
    """A region in which layers run under ``recipe``.

    Args:
        recipe: replaces the recipes bound to layers; a registered name builds it with its defaults; None keeps the
            enclosing region's, or those bound.
        enabled: False computes in high precision.
        amax_reduction_group: process group over which amaxes are reduced, for recipes that do.
        calibrating: compute in high precision and let quantizers observe what they would quantize.

    Entered with gradients enabled, outside a backward pass and not inside another region for the same recipe and group,
    it begins a step: recipes that remember (delayed scaling) update their scales then, in one collective. Inside a
    reentrant checkpoint, which turns gradients off, its first layer begins it.

    The object can be entered again, also by other threads, and serves as a decorator of functions. Activation
    checkpointing repeats the forward pass under the recipe that a layer last ran under; where that is not enough (one
    layer under two recipes in one step) each of the layer's checkpoints takes its region as
    ``context_fn=lambda: (contextlib.nullcontext(), autocast(recipe))``.

    Raises:
        OptionError: ``enabled`` or ``calibrating`` is not a bool, or the group no process group.
        DTypeError: ``recipe`` is neither a recipe nor a name.
        RecipeNotFoundError: no installed package provides the name.
        UsageError: at the entry, on all ranks, if these have other layers or other options of a recipe that reduces.
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
            group = outer.group if group is None else group
        same = outer is not None and self._recipe is None and self._group is None
        step, model = (outer.step, outer.model) if outer is not None and same else (step_for(recipe, group), None)
        # Inside a region that has begun the step nothing is left to begin.
        began = any(region.began and region.step is step for region in regions.stack)
        if self._enabled and not self._calibrating and not began and may_begin():
            step.begin(group, model)
            began = True
        options = recipe, self._enabled, group, self._calibrating
        region = Region(*options, step, began, backward_task(), self, model)
        try:
            regions.stack.append(region)
            return self
        except BaseException:  # an interrupt, after which __exit__ is not called
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = self._leave()
        if region is not None and region.calibrating and error is None and region.graph_task == -1:
            # What was observed serves the next step, and evaluation, which begins none.
            region.step.begin(region.group, region.model, calibrated=True)

    def _leave(self) -> Region | None:
        stack = regions.stack
        for place in reversed(range(len(stack))):
            if stack[place].owner is self:
                return stack.pop(place)
        return None


class ConvertedModel(torch.nn.Module):
    """What the class of a converted model derives from besides: its forward pass, hooks included, is a region.

    At its entry all layers below it begin a step. A forward pass inside of another's that contains it is no region.
    """

    _ottava_step: Step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = regions.stack
        depth = len(stack)
        try:
            _enter(self, args)
            return super().__call__(*args, **kwargs)
        finally:
            # Not by a function, at whose beginning an interrupt could come first.
            del stack[depth:]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        made, arguments, *rest = reduced
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            # A pickle names classes, and the one that was converted has a name.
            own, *others = arguments
            made, arguments = _new, (own.__bases__[1], *others)
        return made, arguments, *rest


def begins_steps(model: Any) -> Step:
    """Have the forward pass of a model be a region, at whose entry all layers below it begin a step; gives the step."""
    if not isinstance(model, ConvertedModel):
        model.__dict__["_ottava_step"] = Step()
        model.__class__ = _converted(type(model))
        model.register_forward_pre_hook(_enter_of_other_class, prepend=True)
        model.register_forward_hook(_leave_of_other_class, always_call=True)
    step: Step = model._ottava_step
    step.model = weakref.ref(model)
    return step


def _enter_of_other_class(module: torch.nn.Module, args: Any) -> None:
    """For a model that was given another class afterwards."""
    if not isinstance(module, ConvertedModel):
        _enter(module, args)


def _leave_of_other_class(module: torch.nn.Module, args: Any, output: Any) -> None:
    own = regions.stack and regions.stack[-1].owner is None and regions.stack[-1].model is module
    if own and not isinstance(module, ConvertedModel):
        regions.stack.pop()


def _converted(cls: type[Any]) -> type[Any]:
    """The class of converted models of a class, which looks like that."""
    for known in cls.__subclasses__():
        if known.__bases__ == (ConvertedModel, cls):
            return known
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    made: type[Any] = metaclass(cls.__name__, (ConvertedModel, cls), names)
    return made


def _new(cls: type[Any], *arguments: Any) -> Any:
    return cls.__new__(_converted(cls), *arguments)


def _enter(module: Any, args: tuple[Any, ...]) -> None:
    """Enter the region of a converted model, unless it is inside of one."""
    if regions.stack and not _is_apart(module):
        return
    # Reentrant checkpointing runs the forward of a step without gradients, on inputs that need them.
    checkpointed = module.training and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    step, task = module._ottava_step, backward_task()
    began = may_begin() or (checkpointed and task == -1 and not is_taken_apart())
    if torch.compiler.is_compiling():
        if began:
            step.begin(None, module)
    else:
        step.model = step.model or weakref.ref(module)  # of a copy
        if began and not step.ahead:
            step.begin(None, module)
        step.ahead = step.ahead and not began
    regions.stack.append(Region(None, True, None, False, step, began, task, None, module))


def begin_ahead(step: Step | None) -> None:
    """Begin the step of a converted model, a weight of which is gathered before its forward pass begins.

    Nothing is done in a region, in a backward pass, and in evaluation. (Whether gradients are enabled cannot be told:
    FSDP turns them off.)
    """
    model = None if step is None or step.model is None else step.model()
    if step is None or model is None or regions.stack or step.ahead or not model.training:
        return
    if backward_task() == -1:
        step.begin(None, model)
        step.ahead = True


def _is_apart(module: torch.nn.Module) -> bool:
    """Whether the enclosing regions are forward passes of modules that do not contain this one."""
    return all(r.owner is None and all(m is not module for m in r.model.modules()) for r in regions.stack)


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
