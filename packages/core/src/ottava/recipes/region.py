"""Regions: ``autocast`` blocks, which override the recipes bound to layers, and forward passes of
converted models."""

import contextlib
import os
import threading
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from ottava.collectives import Group, check_group
from ottava.recipes import registry
from ottava.recipes.base import Recipe, as_recipe, get_recipe
from ottava.recipes.execution import NO_BACKWARD, backward_task, forbids_steps
from ottava.recipes.step import Step, step_for
from ottava.tensors.declaration import check_flag
from ottava.torch_private import constant_to_compiler


@dataclass(eq=False, slots=True)
class Region:
    """An ``autocast`` block that is entered, or a forward pass of a converted model.

    Attributes:
        recipe: replaces the recipes bound to layers; None keeps them.
        enabled: whether layers quantize.
        group: process group over which amaxes are reduced; None is the default group.
        calibrating: whether layers compute in high precision, and quantizers observe.
        step: the step that the states that run in the region begin together.
        began: whether that step has begun, at the entry of the region or before.
        graph_task: the number of the backward pass inside which it was entered; -1 outside any.
        owner: the block; None for a forward pass.
        model: the converted model whose forward pass the region, or one around it, is.
        served: whether a layer ran in the region.
    """

    recipe: Recipe | None
    enabled: bool
    group: Group
    calibrating: bool
    step: Step
    began: bool
    graph_task: int
    owner: "autocast | None"
    model: torch.nn.Module | None = None
    served: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether layers compute with quantized operands in the region. Those that train belong
        to its step then."""
        return self.enabled and not self.calibrating

    def begin_step(self) -> None:
        """Begin the step, unless it has begun."""
        if self.began:
            return
        if self.model is None:
            self.step.begin(self.group)
        else:
            self.step.begin_at_forward(self.model)
        self.began = True


class MicrobatchBlock(Protocol):
    """A block of :class:`ottava.microbatch`."""

    first: bool


class _Regions(threading.local):
    """The regions, and the blocks of microbatches, that a thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Region] = []
        self.microbatches: list[MicrobatchBlock] = []


regions = _Regions()


def current_region() -> Region | None:
    """The innermost region of this thread, or None."""
    if not regions.stack:
        return None
    return regions.stack[-1]


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
        amax_reduction_group: Group = None,
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
        region = self._region()
        training = (
            region.is_quantized and torch.is_grad_enabled() and region.graph_task == NO_BACKWARD
        )
        if training and not region.began and not forbids_steps(torch.compiler.is_compiling()):
            region.begin_step()
        try:
            regions.stack.append(region)
            return self
        except BaseException:  # an interrupt, after which __exit__ is not called
            if region in regions.stack:
                regions.stack.remove(region)
            raise

    def _region(self) -> Region:
        """The region that is entered: as the block says, and for the rest as the region around it
        says."""
        outer, task = current_region(), backward_task()
        recipe, group, step, model = self._recipe, self._group, None, None
        # A recomputation knows the region around its forward pass. The region around its backward
        # pass does not count.
        if outer is not None and outer.graph_task == task:
            if recipe is None and group is None:
                step, model = outer.step, outer.model
            if recipe is None:
                recipe = outer.recipe
            if group is None:
                group = outer.group
        if step is None:
            step = step_for(recipe, group)
        # Inside a region that has begun the step nothing is left to begin.
        began = any(region.began and region.step is step for region in regions.stack)
        return Region(
            recipe, self._enabled, group, self._calibrating, step, began, task, self, model
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        if error is not None or region.graph_task != NO_BACKWARD:
            # A recomputation may end before it reaches a layer, and calibrates nothing.
            return
        if region.calibrating:
            # The observed values serve the next step, and evaluation, which begins none.
            region.step.begin(region.group, region.model, calibrated=True)
        if region.enabled and not region.served and not torch.compiler.is_compiling():
            _warn_of_no_layer()


def _warn_of_no_layer() -> None:
    """Warn of an ``autocast`` block in which no layer ran; Python shows that once for each place in
    the code."""
    text = (
        "no layer of Ottava ran inside of ottava.autocast, which changes nothing for the layers of "
        "torch: convert the model first, by ottava.convert(model, recipe), or build it of "
        "ottava.nn.Linear"
    )
    warnings.warn(text, UserWarning, stacklevel=3)


# Recipes that were built with their defaults, each with a stamp, which tells the packages and the
# state of its file from later ones.
_DEFAULTS: dict[str, tuple[Recipe, list[object]]] = {}


# A compiled function may name its recipe: the registry is asked once, while the function is traced.
@constant_to_compiler
def _remember_default(name: str) -> bool:
    """See that ``_DEFAULTS`` has the recipe ``name``, of a file as it is now; raises as
    get_recipe."""
    stamp: list[object] = [*registry.plugin_statuses()]
    if registry.is_path(name):
        with contextlib.suppress(OSError):
            file = os.stat(name)
            stamp += [file.st_mtime_ns, file.st_size]
    if name not in _DEFAULTS or _DEFAULTS[name][1] != stamp:
        _DEFAULTS[name] = get_recipe(name), stamp
    return True
