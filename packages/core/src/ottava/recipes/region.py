"""Regions: ``autocast`` blocks, which override the recipes bound to layers, and forward passes of
converted models."""

import contextlib
import os
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ottava.collectives import check_group
from ottava.recipes import registry
from ottava.recipes.base import Recipe, as_recipe, get_recipe
from ottava.recipes.step import Step, backward_task, is_taken_apart, step_for
from ottava.tensors.declaration import check_flag
from ottava.torch_private import constant_to_compiler


@dataclass(eq=False, slots=True)
class Region:
    """What an ``autocast`` block, or the forward pass of a converted model, says."""

    recipe: Recipe | None  # replaces the bound ones; None keeps them
    enabled: bool
    group: Any
    calibrating: bool
    step: Step  # what the states that run in it begin together
    began: bool  # whether the step has begun, at its entry or before
    graph_task: (
        int  # the backward pass inside which it was entered, by autograd's number; -1 outside any
    )
    owner: Any  # the block; None for a forward pass
    # the converted model whose forward pass the region, or one that it continues, is
    model: Any = None
    served: bool = False  # whether a layer ran in it


class _Regions(threading.local):
    """The regions, and the blocks of microbatches, that a thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Region] = []
        self.microbatches: list[Any] = []


regions = _Regions()


def current_region() -> Region | None:
    """The innermost region of this thread, or None."""
    return regions.stack[-1] if regions.stack else None


class autocast(contextlib.ContextDecorator):
    """A region in which layers run under ``recipe``.

    Args:
        recipe: replaces the recipes bound to layers; a registered name builds it with its defaults;
            None keeps the enclosing region's, or those bound.
        enabled: False computes in high precision.
        amax_reduction_group: process group over which amaxes are reduced, for recipes that do.
        calibrating: compute in high precision and let quantizers observe what they would quantize.

    Entered with gradients enabled, outside a backward pass and not inside another region for the
    same recipe and group, it begins a step: recipes that remember (delayed scaling) update their
    scales then, in one collective. Inside a reentrant checkpoint, which turns gradients off, a
    layer begins it that takes one of the checkpoint's tensors.

    The object can be entered again, also by other threads, and serves as a decorator of functions.
    Activation checkpointing repeats the forward pass under the recipe that a layer last ran under;
    where that is not enough (one layer under two recipes in one step) each of the layer's
    checkpoints takes its region as
    ``context_fn=lambda: (contextlib.nullcontext(), autocast(recipe))``.

    A block in which no layer of Ottava runs has no effect, and a ``UserWarning`` says so.

    Raises:
        OptionError: ``enabled`` or ``calibrating`` is not a bool, or the group no process group.
        DTypeError, RecipeNotFoundError: ``recipe`` is neither a recipe nor the name of an installed
            one.
        UsageError: at the entry, on all ranks, if these have other layers or other options of a
            recipe that reduces.
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
            recipe = _DEFAULTS[name][0]
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
        training = (
            self._enabled and not self._calibrating and torch.is_grad_enabled() and task == -1
        )
        if training and not began and not is_taken_apart(torch.compiler.is_compiling()):
            step.begin(group, model)
            began = True
        region = Region(
            recipe, self._enabled, group, self._calibrating, step, began, task, self, model
        )
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
        if region.served and stack:
            stack[-1].served = True
        if region.calibrating and error is None and region.graph_task == -1:
            # What was observed serves the next step, and evaluation, which begins none.
            region.step.begin(region.group, region.model, calibrated=True)
        # A recomputation may end before it reaches a layer.
        outside_backward = region.graph_task == -1 and not torch.compiler.is_compiling()
        if region.enabled and not region.served and error is None and outside_backward:
            _warn_of_no_layer()


def _warn_of_no_layer() -> None:
    """Warn of an ``autocast`` block in which no layer ran; Python shows that once for each place in
    the code."""
    what = (
        "no layer of Ottava ran inside of ottava.autocast, which changes nothing for the "
        "layers of torch"
    )
    remedy = (
        "convert the model first, by ottava.convert(model, recipe), or build it of ottava.nn.Linear"
    )
    warnings.warn(f"{what}: {remedy}", UserWarning, stacklevel=3)


# Recipes that were built with their defaults, each with what tells its file, and the packages, from
# later ones.
_DEFAULTS: dict[str, tuple[Recipe, Any]] = {}


# A compiled function may name its recipe: the registry is asked once, while the function is traced.
@constant_to_compiler
def _remember_default(name: str) -> bool:
    """See that ``_DEFAULTS`` has the recipe ``name``, of a file as it is now; raises as
    get_recipe."""
    stamp: list[Any] = registry.plugin_statuses()
    if registry.is_path(name):
        with contextlib.suppress(OSError):
            found = os.stat(name)
            stamp += [found.st_mtime_ns, found.st_size]
    if name not in _DEFAULTS or _DEFAULTS[name][1] != stamp:
        _DEFAULTS[name] = get_recipe(name), stamp
    return True
