"""The update of all slots at the beginning of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ottava import kernels
from ottava.collectives import process_groups_ready, spans_ranks
from ottava.distributed import reduce_amax
from ottava.errors import DTypeError, ShapeError
from ottava.formats import fp8_format
from ottava.kernels import for_layers
from ottava_delayed.state import DelayedScalingState, Settings


def update(
    recipe: Settings, states: Sequence[DelayedScalingState], amax_reduction_group: Any
) -> None:
    """Begin a step for the layers of ``states``.

    This takes one all-reduce if the group spans ranks, then one operation for each device.

    Raises:
        ShapeError, DTypeError: a function of the recipe did not return one float32 for each slot.
    """
    reduces = recipe.reduce_amax and process_groups_ready() and spans_ranks(amax_reduction_group)
    if len(states) == 1 and not (reduces or recipe.by_functions):
        # A step with one layer begins in each forward pass of the layer, so this path is short.
        (state,) = states
        buffers: dict[str, Any] = state._buffers
        most_recent = recipe.amax_compute_algo == "most_recent"
        if for_layers.update_slots(
            (buffers["scale"],), (buffers["amax_history"],), state.maxima, most_recent, True
        ):
            return
    last = None
    if reduces and states:
        # The amaxes of all devices are moved to one, so that one collective serves all layers.
        device = states[0].scale.device
        amaxes = torch.cat([state.amax_history[0].to(device) for state in states])
        last = reduce_amax(amaxes, amax_reduction_group)
    by_device: dict[torch.device, list[int]] = {}
    for position, state in enumerate(states):
        by_device.setdefault(state.scale_and_history()[0].device, []).append(position)
    for device, positions in by_device.items():
        states_here = [states[position] for position in positions]
        last_here = last
        if last is not None and len(by_device) > 1:
            by_state = last.split([state.scale.numel() for state in states])
            last_here = torch.cat([by_state[position] for position in positions]).to(device)
        _update_on_device(recipe, states_here, last_here)


def _update_on_device(
    recipe: Settings, states: Sequence[DelayedScalingState], last: torch.Tensor | None
) -> None:
    if recipe.by_functions:
        _update_by_functions(recipe, states, last)
        return
    scales, histories = zip(*(state.scale_and_history() for state in states), strict=True)
    maxima = [maximum for state in states for maximum in state.maxima]
    kernels.update_scales(
        scales, histories, maxima, most_recent=recipe.amax_compute_algo == "most_recent", last=last
    )


@torch.no_grad()
def _update_by_functions(
    recipe: Settings, states: Sequence[DelayedScalingState], last: torch.Tensor | None
) -> None:
    """Update the states with the recipe's functions.

    The scale function is called once for all slots of a format, the amax function once for all
    slots.
    """
    history = torch.cat([state.amax_history for state in states], 1)
    scale = torch.cat([state.scale for state in states])
    maximum = torch.tensor(
        [m for state in states for m in state.maxima], dtype=torch.float32, device=scale.device
    )
    if last is not None:
        history = torch.cat([last.unsqueeze(0), history[1:]])
    amax = _amaxes(recipe, history)
    new_scale = scale.clone()
    formats = [dtype for state in states for dtype in state.formats]
    for dtype in dict.fromkeys(formats):
        of_dtype = torch.tensor([other == dtype for other in formats], device=scale.device)
        # A mask makes copies, to which the function of a user may write.
        new_scale[of_dtype] = _scales(
            recipe, amax[of_dtype], scale[of_dtype], maximum[of_dtype], fp8_format(dtype).max
        )
    moves = history[0] != 0
    rolled = torch.cat([history[1:], history[:1]])
    rolled[0] = 0.0
    slot = 0
    for state in states:
        end = slot + state.scale.numel()
        state.scale.copy_(torch.where(moves[slot:end], new_scale[slot:end], state.scale))
        state.amax_history.copy_(
            torch.where(moves[slot:end], rolled[:, slot:end], state.amax_history)
        )
        slot = end


def _amaxes(recipe: Settings, history: torch.Tensor) -> torch.Tensor:
    algorithm = recipe.amax_compute_algo
    if callable(algorithm):
        return _checked(algorithm(history.clone()), history[0], "amax_compute_algo")
    if algorithm == "most_recent" or len(history) == 1:
        return history[0]
    older = torch.where(history.isnan(), torch.zeros_like(history), history)[1:]
    return torch.maximum(history[0], older.amax(0))


def _scales(
    recipe: Settings, amax: torch.Tensor, scale: torch.Tensor, maximum: torch.Tensor, fp8_max: float
) -> torch.Tensor:
    algorithm = recipe.scaling_factor_compute_algo
    if algorithm is not None:
        result = algorithm(amax, scale, fp8_max, recipe)
        computed = _checked(result, scale, "scaling_factor_compute_algo")
        return computed.clamp(max=torch.finfo(torch.float32).max)
    usable = amax.isfinite() & (amax > 0)
    quotient = torch.div(maximum, torch.where(usable, amax, torch.ones_like(amax)))
    quotient = quotient.clamp(max=torch.finfo(torch.float32).max)
    return torch.where(usable, quotient, scale)


def _checked(result: Any, like: torch.Tensor, function: str) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise DTypeError(
            f"{function} returned {type(result).__name__}", expected="a torch.float32 tensor"
        )
    if result.dtype != torch.float32:
        raise DTypeError(f"{function} returned {result.dtype}", expected="a torch.float32 tensor")
    if result.shape != like.shape:
        raise ShapeError(
            f"{function} returned shape {tuple(result.shape)}",
            expected=f"{tuple(like.shape)}, one a slot",
        )
    return result
