"""What the state of a model says: scales, amaxes, and how much was clamped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ottava_delayed.state import DelayedScalingState


@dataclass(frozen=True)
class SlotStatistics:
    """One tensor of one layer.

    Attributes:
        scale: what multiplies in the next quantization.
        amax: of the step before; with a history of one, of the current step.
        largest_amax: of the whole history, the current step included.
        saturated: elements clamped in training since the layer was made or its state reset.
        saturated_in_evaluation: elements clamped in evaluations that this process ran eagerly.
    """

    scale: float
    amax: float
    largest_amax: float
    saturated: int
    saturated_in_evaluation: int = 0


def scaling_statistics(model: torch.nn.Module) -> dict[str, dict[str, SlotStatistics]]:
    """Layer name -> tensor type -> statistics, of all layers that delayed scaling keeps state
    for."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, DelayedScalingState):
            continue
        scale, history = module.scale.tolist(), module.amax_history
        newest, largest = history[-1].tolist(), history.amax(0).tolist()
        saturated, in_evaluation = module.saturated.tolist(), module.evaluations.counts()
        found[name.removesuffix("recipe_state").removesuffix(".")] = {
            tensor: SlotStatistics(
                scale[slot], newest[slot], largest[slot], saturated[slot], in_evaluation[slot]
            )
            for tensor, slot in module.slots.items()
        }
    return found
