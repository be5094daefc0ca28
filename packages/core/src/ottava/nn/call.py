"""The call: what one forward pass of a layer runs under, and how that is found out."""

import sys
from enum import Enum
from typing import NamedTuple

import torch

from ottava.collectives import Group
from ottava.errors import OptionError
from ottava.nn.layer import Layer
from ottava.recipes.base import Recipe
from ottava.recipes.execution import (
    NO_BACKWARD,
    forbids_steps,
    infers_shapes,
    repeats_forward,
)
from ottava.recipes.region import Region, regions
from ottava.recipes.state import RecipeState
from ottava.torch_private import (
    PIPELINES,
    dispatch_modes,
    graph_task_id,
    is_exporting,
)


class Recording(Enum):
    """What a state takes from the operands of a forward pass."""

    #: It records their amaxes, once in a step.
    NOW = "now"
    #: Nothing yet. The forward pass of a reentrant checkpoint runs without gradients, and the state
    #: records the operands when they are recomputed.
    LATER = "later"
    #: It may count the elements that it clamps: an evaluation, which changes no step.
    CLAMPS = "clamps"
    #: Nothing: an evaluation that is traced, or of a state that counts nothing; a recomputation of
    #: operands that have been recorded.
    NOTHING = "nothing"


class Call(NamedTuple):
    """What one forward pass of a layer, its backward pass and its recomputation run under.

    Attributes:
        recipe: None computes in high precision.
        state: the layer's quantizers; None without a recipe.
        group: process group over which amaxes are reduced.
        recording: what the state takes from the operands.
        of_step: whether this is a forward pass of a step, not an evaluation, a recomputation or a
            tracing.
        recomputed: whether activation checkpointing runs this forward pass again.
        calibrating: whether the state observes the operands while the layer computes in high
            precision.
        first: True quantizes the weight and keeps it, False uses the weight that was kept, None
            quantizes the weight for this call.
        of_block: what a microbatch block said of ``first``, where the call said nothing.
    """

    recipe: Recipe | None = None
    state: RecipeState | None = None
    group: Group = None
    recording: Recording = Recording.NOW
    of_step: bool = False
    recomputed: bool = False
    calibrating: bool = False
    first: bool | None = None
    of_block: bool | None = None

    @property
    def records(self) -> bool:
        """Whether the state records the operands now."""
        return self.recording is Recording.NOW


def resolve_call(
    layer: Layer, input: torch.Tensor, first: bool | None, observed: bool, compiling: bool
) -> Call:
    """What a forward pass of a layer runs under.

    No step begins here: the pass enters its step when the operands have been checked
    (:mod:`ottava.nn.entry`).

    Args:
        input: of the forward pass, ``[*, in_features]``.
        first: what its caller says of the microbatch.
        observed: whether dispatch is observed, by a mode, a profiler or a compiler.
        compiling: whether the observer is a compiler.

    Raises:
        OptionError: ``first`` is neither a bool nor None.
    """
    binding = layer._binding
    task = NO_BACKWARD if compiling else graph_task_id()
    region = regions.stack[-1] if regions.stack else None
    # Only a recomputation reads the last call: a compiler would guard on one that is read.
    last = None if task == NO_BACKWARD else binding.last
    first, of_block = resolve_microbatch(first, last, task)
    recipe, group, calibrating = resolve_recipe(binding.recipe, last, region, task)
    if calibrating and task != NO_BACKWARD:
        # A recomputed pass computes in high precision, as the calibrating one did, and leaves the
        # layer the state that it has now.
        recipe = None
    state = resolve_state(layer, recipe, group, compiling)
    if state is None:
        recipe = None
    recomputed = task != NO_BACKWARD
    of_step = False
    if recomputed:
        recording = recording_of_recomputation(state)
    else:
        # An exported program has no backward pass.
        grad_enabled = torch.is_grad_enabled() and not (compiling and is_exporting())
        of_step = is_of_step(layer, input, region, grad_enabled, observed, compiling)
        # Modes may trace, and what they trace is to change nothing.
        traced = compiling or (observed and bool(dispatch_modes()))
        recording = recording_of(state, grad_enabled, of_step, traced)
    call = Call(recipe, state, group, recording, of_step, recomputed, calibrating, first, of_block)
    if not (recomputed or compiling) and (call.records or layer.training):
        binding.last = call
        if calibrating:
            # What is recomputed of a calibrating pass computes in high precision, as that did.
            binding.last = call._replace(recipe=None)
    return call


def recording_of(
    state: RecipeState | None, grad_enabled: bool, of_step: bool, traced: bool
) -> Recording:
    """What a state takes from the operands of a forward pass that is no recomputation."""
    if grad_enabled:
        return Recording.NOW
    if state is None or not state.stateful:
        return Recording.NOTHING
    if of_step:
        return Recording.LATER
    if traced or not state.opens_evaluation():
        return Recording.NOTHING
    return Recording.CLAMPS


def recording_of_recomputation(state: RecipeState | None) -> Recording:
    """What a state takes from the operands of a recomputation.

    Of a reentrant checkpoint it records them now, because the forward pass ran without gradients.
    Other recomputations repeat what the state has seen.
    """
    if state is None or not state.stateful or not torch.is_grad_enabled():
        return Recording.NOTHING
    if repeats_forward():
        return Recording.NOTHING
    return Recording.NOW


def resolve_microbatch(
    first: bool | None, last: Call | None, task: int
) -> tuple[bool | None, bool | None]:
    """``first`` and ``of_block`` of a call.

    Args:
        first: what the caller says; None leaves it to the block around the call.
        last: the last call of a forward pass, which a recomputation repeats.
        task: the number of the backward pass that this runs in.

    Raises:
        OptionError: ``first`` is neither a bool nor None.
    """
    if first is not None:
        if not isinstance(first, bool):
            raise OptionError(
                f"is_first_microbatch is {first!r:.80}", expected="True, False or None"
            )
        return first, None
    if task != NO_BACKWARD:
        of_block = None if last is None else last.of_block
    else:
        blocks = regions.microbatches
        of_block = blocks[-1].first if blocks else None
    return of_block, of_block


def resolve_recipe(
    bound: Recipe | None, last: Call | None, region: Region | None, task: int
) -> tuple[Recipe | None, Group, bool]:
    """The recipe that a layer runs under, the process group, and whether it is calibrated.

    Args:
        bound: the layer's own recipe.
        last: the last call of a forward pass, which a recomputation repeats.
        region: the innermost region, which learns that a layer ran in it.
        task: the number of the backward pass that this runs in.
    """
    if region is not None:
        region.served = True
    if task != NO_BACKWARD and not _decides_recomputation(region, task):
        # A recomputation runs under the recipe of its forward pass, whatever region is around the
        # backward pass.
        if last is None:
            return bound, None, False
        return last.recipe, last.group, False
    if region is None:
        return bound, None, False
    if not (region.enabled or region.calibrating):
        return None, region.group, False
    recipe = bound if region.recipe is None else region.recipe
    return recipe, region.group, region.calibrating


def resolve_state(
    layer: Layer, recipe: Recipe | None, group: Group, compiling: bool
) -> RecipeState | None:
    """The layer's state for a recipe and a process group; None for high precision."""
    if recipe is None:
        return None
    state: RecipeState | None = layer._binding.state
    # Most calls are answered by a look at three fields.
    same = state is not None and state.recipe is recipe and state.factory is recipe._factory
    if state is None or not same or state.amax_reduction_group is not group:
        state = layer._binding.state_for(layer, recipe, group)
    return None if is_shape_inference(state, compiling) else state


def _decides_recomputation(region: Region | None, task: int) -> bool:
    """Whether a region was entered by the recomputation, and says what that runs under."""
    if region is None or region.graph_task != task:
        return False
    return region.recipe is not None or not region.enabled


def is_shape_inference(state: RecipeState, compiling: bool) -> bool:
    """Whether a pipeline finds out the shapes of its stage, so that no state is to see the
    operands."""
    # Compiled code must not ask which modules are imported: it would be compiled again with each
    # new one.
    if compiling or not state.stateful or PIPELINES not in sys.modules:
        return False
    return infers_shapes()


def is_of_step(
    layer: Layer,
    input: torch.Tensor,
    region: Region | None,
    grad_enabled: bool,
    observed: bool,
    compiling: bool,
) -> bool:
    """Whether a forward pass is one of a step, not an evaluation."""
    training = grad_enabled
    if not (compiling or grad_enabled):
        # Reentrant checkpointing runs the forward pass of a step without gradients, on inputs that
        # need them.
        began = region is not None and region.began
        needs = isinstance(input, torch.Tensor) and input.requires_grad
        training = layer.training and (needs or began)
    return training and not (observed and forbids_steps(compiling))
