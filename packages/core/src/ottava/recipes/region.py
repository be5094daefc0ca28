"""Regions: ``autocast`` blocks, which override the recipes bound to layers, and forward passes of converted models."""

import contextlib
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ottava.collectives import check_group
from ottava.errors import OptionError
from ottava.recipes import registry
from ottava.recipes.base import Recipe, as_recipe, get_recipe
from ottava.recipes.step import Step, backward_task, is_taken_apart, step_for
from ottava.tensors.declaration import check_flag
from ottava.torch_private import constant_to_compiler, graph_task_id


@dataclass(eq=False, slots=True)
class Region:
    """What an ``autocast`` block, or the forward pass of a converted model, says."""

    recipe: Recipe | None  # replaces the bound ones; None keeps them
    enabled: bool
    group: Any
    calibrating: bool
    step: Step  # what the states that run in it begin together
    began: bool  # whether the step has begun, at its entry or before
    graph_task: int  # the backward pass inside which it was entered, by autograd's number; -1 outside any
    owner: Any  # the block; None for a forward pass
    model: Any = None  # the converted model whose forward pass the region, or one that it continues, is


class _Regions(threading.local):
    """The regions that a thread is in, innermost last, and what ``microbatch`` blocks say."""

    def __init__(self) -> None:
        self.stack: list[Region] = []
        self.first: list[bool | None] = [None]


regions = _Regions()


def current_region() -> Region | None:
    """The innermost region of this thread, or None."""
    return regions.stack[-1] if regions.stack else None


class microbatch(contextlib.ContextDecorator):
    """A block in which every layer takes ``is_first_microbatch=first``, unless its call says otherwise.

    With ``first=True`` the layers quantize their weights and keep them; with False they use what they kept. What is no
    bool is refused with an OptionError.
    """

    def __init__(self, first: bool) -> None:
        if not isinstance(first, bool):
            raise OptionError(f"microbatch(first={first!r})", expected="True or False")
        self._first = first

    def __enter__(self) -> "microbatch":
        regions.first.append(self._first)
        return self

    def __exit__(self, *error: object) -> None:
        regions.first.pop()


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
    reentrant checkpoint, which turns gradients off, a layer begins it that takes one of the checkpoint's tensors.

    The object can be entered again, also by other threads, and serves as a decorator of functions. Activation
    checkpointing repeats the forward pass under the recipe that a layer last ran under; where that is not enough (one
    layer under two recipes in one step) each of the layer's checkpoints takes its region as
    ``context_fn=lambda: (contextlib.nullcontext(), autocast(recipe))``.

    Raises:
        OptionError: ``enabled`` or ``calibrating`` is not a bool, or the group no process group.
        DTypeError, RecipeNotFoundError: ``recipe`` is neither a recipe nor the name of an installed one.
        UsageError: at the entry, on all ranks, if these have other layers or other options of a recipe that reduces.
    """

    def __init__(
        self,
        recipe: Recipe | str | os.PathLike[str] | None = None,
        enabled: bool = True,
        amax_reduction_group: Any = None,
        calibrating: bool = False,
    ) -> None:
        check_flag("enabled", enabled)
        check_flag("calibrating", calibrating)
        check_group(amax_reduction_group)
        if isinstance(recipe, (str, os.PathLike)):
            # The same object each time: layers keep the state that it gave them.
            name = os.fspath(recipe)
            _remember_default(name)
            recipe = registry.defaults[name][0]
        self._recipe = None if recipe is None else as_recipe(recipe)
        self._enabled, self._group, self._calibrating = enabled, amax_reduction_group, calibrating

    def __enter__(self) -> "autocast":
        outer, task = current_region(), backward_task()
        recipe, group, step, model = self._recipe, self._group, None, None
        # What is recomputed in a backward pass knows what surrounded its forward pass.
        if outer is not None and outer.graph_task == task:
            if recipe is None and group is None:
                step, model = outer.step, outer.model
            recipe = outer.recipe if recipe is None else recipe
            group = outer.group if group is None else group
        step = step_for(recipe, group) if step is None else step
        # Inside a region that has begun the step nothing is left to begin.
        began = any(region.began and region.step is step for region in regions.stack)
        # Neither in evaluation nor in a recomputation.
        training = self._enabled and not self._calibrating and torch.is_grad_enabled() and task == -1
        if training and not began and not is_taken_apart(torch.compiler.is_compiling()):
            step.begin(group, model)
            began = True
        region = Region(recipe, self._enabled, group, self._calibrating, step, began, task, self, model)
        try:
            regions.stack.append(region)
            return self
        except BaseException:  # an interrupt, after which __exit__ is not called
            if region in regions.stack:
                regions.stack.remove(region)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        stack, place = regions.stack, -1
        try:
            # Found without a call, because an interrupt may come after each.
            while stack[place].owner is not self:
                place -= 1
        except IndexError:
            return
        region = stack.pop(place)
        if region.calibrating and error is None and region.graph_task == -1:
            # What was observed serves the next step, and evaluation, which begins none.
            region.step.begin(region.group, region.model, calibrated=True)


class ConvertedModel(torch.nn.Module):
    """What the class of a converted model derives from besides: its forward pass, hooks included, is a region, at whose
    entry all layers below it begin a step. A forward pass inside of another's that contains it is no region."""

    #: None of another object of the class, such as the slice of a ``Sequential``: it is as one that was not converted.
    _ottava_step: Step | None = None

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
        make, arguments, *rest = reduced
        # A pickle names classes, and the one that was converted has a name.
        own, named = type(self), type(self).__bases__[1]
        return _as_converted, tuple(named if one is own else one for one in (make, *arguments)), *rest


def begins_steps(model: Any) -> Step:
    """Have the forward pass of a model be a region, at whose entry all layers below it begin a step; gives the step."""
    step: Step = model.__dict__.setdefault("_ottava_step", Step())
    step.model = weakref.ref(_converted(model))
    return step


def _converted(model: Any) -> Any:
    """The model, of a class that derives from :class:`ConvertedModel` and looks like the one that it was of."""
    cls: Any = type(model)
    if not isinstance(model, ConvertedModel):
        known = [made for made in cls.__subclasses__() if made.__bases__ == (ConvertedModel, cls)]
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        model.__class__ = known[0] if known else type(cls)(cls.__name__, (ConvertedModel, cls), names)
    return model


def _as_converted(make: Any, *arguments: Any) -> Any:
    """A converted model as a pickle or a copy makes it."""
    return _converted(make(*arguments))


def _enter(module: Any, args: tuple[Any, ...]) -> None:
    """Enter the region of a converted model, unless it is inside of one."""
    stack = regions.stack
    inside = stack and any(r.owner is not None or any(m is module for m in r.model.modules()) for r in stack)
    if inside or module._ottava_step is None:
        return
    compiling = torch.compiler.is_compiling()
    step, task = module._ottava_step, -1 if compiling else graph_task_id()
    training = torch.is_grad_enabled()
    if not training and module.training:
        # Reentrant checkpointing runs the forward of a step without gradients, on inputs that need them.
        training = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    began = task == -1 and training and not is_taken_apart(compiling)
    if not compiling:
        step.model = step.model or weakref.ref(module)  # of a copy
    if began and (compiling or not step.ahead):
        step.begin(None, module)
    elif began:
        step.ahead = False
    stack.append(Region(None, True, None, False, step, began, task, None, module))


def begin_ahead(step: Any) -> None:
    """Begin the step of a converted model, a weight of which is gathered before its forward pass begins: not in a
    region, in a backward pass, or in evaluation. (FSDP turns gradients off, so that these cannot tell.)"""
    model = None if step is None or step.model is None else step.model()
    if not (model is None or regions.stack or step.ahead) and model.training and backward_task() == -1:
        step.begin(None, model)
        step.ahead = True


# A compiled function may name its recipe: the registry is asked once, while the function is traced.
@constant_to_compiler
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
