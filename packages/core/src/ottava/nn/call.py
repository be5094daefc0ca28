"""The call: what one forward pass of a layer runs under, and the steps that find that out."""

import sys
import warnings
from typing import NamedTuple

import torch

from ottava.collectives import Group
from ottava.errors import OptionError
from ottava.nn.layer import Layer, label_of
from ottava.recipes.base import Recipe
from ottava.recipes.execution import (
    NO_BACKWARD,
    forbids_steps,
    infers_shapes,
    repeats_forward,
)
from ottava.recipes.region import Region, regions
from ottava.recipes.state import Phase, RecipeState
from ottava.recipes.step import begin_alone
from ottava.torch_private import (
    KNOWS_BACKWARD,
    PIPELINES,
    dispatch_modes,
    graph_task_id,
    is_exporting,
)


class Call(NamedTuple):
    """What one forward pass of a layer, its backward pass and its recomputation run under.

    Attributes:
        recipe: None computes in high precision.
        state: the layer's quantizers; None without a recipe.
        group: process group over which amaxes are reduced.
        recording: whether the state records the operands: once in a step, never in an evaluation.
        calibrating: whether the state observes them while the layer computes in high precision.
        first: True quantizes the weight and keeps it, False uses the weight that was kept, None
            quantizes the weight for this call.
        recomputed: whether activation checkpointing runs this forward pass again.
        of_block: what a microbatch block said of ``first``, where the call said nothing.
        training: whether this is a forward pass of a step. Inside a reentrant checkpoint it runs
            without gradients.
        evaluating: whether a stateful state may count what it clamps, because no step sees this
            pass.
    """

    recipe: Recipe | None = None
    state: RecipeState | None = None
    group: Group = None
    recording: bool = True
    calibrating: bool = False
    first: bool | None = None
    recomputed: bool = False
    of_block: bool | None = None
    training: bool = False
    evaluating: bool = False


def resolve_call(
    layer: Layer, input: torch.Tensor, first: bool | None, observed: bool, compiling: bool
) -> Call:
    """What a forward pass of a layer runs under, which takes part in the step of its region.

    Args:
        input: of the forward pass, ``[*, in_features]``.
        first: what its caller says of the microbatch.
        observed: whether dispatch is observed, by a mode, a profiler or a compiler.
        compiling: whether the observer is a compiler.
    """
    binding = layer._binding
    task = NO_BACKWARD if compiling else graph_task_id()
    region = regions.stack[-1] if regions.stack else None
    # Only a recomputation reads the last call: a compiler would guard on one that is read.
    last = None if task == NO_BACKWARD else binding.last
    first, of_block = resolve_microbatch(first, last, task)
    recipe, group, calibrating = resolve_recipe(binding.recipe, last, region, task)
    state = resolve_state(layer, recipe, group, compiling)
    if state is None:
        recipe = None
    call = Call(recipe, state, group, calibrating=calibrating, first=first, of_block=of_block)
    if task != NO_BACKWARD:
        return call._replace(recording=records_recomputation(state), recomputed=True)
    call = _in_step(layer, call, input, region, observed, compiling)
    if not compiling and (call.recording or layer.training):
        binding.last = call
        if calibrating:
            # What is recomputed of a calibrating pass computes in high precision, as that did.
            binding.last = call._replace(recipe=None)
    return call


def _in_step(
    layer: Layer,
    call: Call,
    input: torch.Tensor,
    region: Region | None,
    observed: bool,
    compiling: bool,
) -> Call:
    """The call as one of a step or as an evaluation. A stateful state takes part in the step."""
    state = call.state
    # An exported program has no backward pass.
    recording = torch.is_grad_enabled() and not (compiling and is_exporting())
    if state is None or not state.stateful:
        return call._replace(recording=recording, training=recording)
    training = is_of_step(layer, input, region, recording, observed, compiling)
    enter_step(layer, state, region, training, compiling)
    if training and recording and not (compiling or call.calibrating):
        warn_of_another_pass(layer, state)
    # Modes may trace, and what they trace is to change nothing.
    traced = compiling or (observed and bool(dispatch_modes()))
    evaluating = not (recording or training or traced) and state.opens_evaluation()
    return call._replace(recording=recording, training=training, evaluating=evaluating)


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


def records_recomputation(state: RecipeState | None) -> bool:
    """Whether a state is to see the operands of a recomputation.

    The forward pass of a reentrant checkpoint ran without gradients, and its state sees the
    operands now. Other recomputations repeat what their state has seen.
    """
    if state is None or not state.stateful or not torch.is_grad_enabled():
        return False
    return not repeats_forward()


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


def enter_step(
    layer: Layer, state: RecipeState, region: Region | None, training: bool, compiling: bool
) -> None:
    """Have a stateful state take part in the step of its region. Outside of any region a pass in
    training begins a step of its own, and an evaluation changes nothing."""
    if region is not None:
        take_part(layer, state, region, training, compiling)
        return
    if not training:
        return
    begin_alone(state, in_pipeline=not compiling and PIPELINES in sys.modules)
    if not compiling:
        state.__dict__.update(step=None, _phase=Phase.RAN)


def take_part(
    layer: Layer, state: RecipeState, region: Region, training: bool, compiling: bool
) -> None:
    """See that a stateful state begins its steps with a region."""
    if compiling and region.model is not None:
        # The model begins a step with all its layers, and compiled code had better change nothing.
        return
    if training and region.begins_steps:
        region.begin_step()
    if training or region.calibrating:
        region.step.join(layer, state, region.group, region.calibrating, compiling)
    elif not compiling and state._phase is Phase.SETTLED:
        # A checkpoint that is loaded next has the state begin the next step of this region.
        state.step = region.step


def warn_of_another_pass(layer: Layer, state: RecipeState) -> None:
    """Warn, once for each backward pass, of a forward pass that follows it in the same step.

    Microbatches of a pipeline do that, and are not warned of. Where torch does not tell what runs
    in a backward pass, a recomputation would look the same.
    """
    if state._phase is not Phase.WENT_BACK or not KNOWS_BACKWARD:
        return
    if state.step is not None and state.step.pipeline_ranks:
        return
    state._set_phase(Phase.RAN)
    text = (
        f"{label_of(layer)} runs another forward pass after a backward pass, in one region: scales "
        f"are updated at the entry of a region only; enter it anew for every step"
    )
    warnings.warn(text, UserWarning, stacklevel=7)
