"""Statistics from the state of a model: scales, amaxes, and numbers of clamped elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ottava_delayed.state import DelayedScalingState


@dataclass(frozen=True)
class SlotStatistics:
    """The statistics of one tensor of one layer.

    Attributes:
        scale: the scale of the next quantization.
        amax: the amax of the step before; with a history of one step, of the current step.
        largest_amax: the largest amax of the whole history, the current step included.
        saturated: the number of elements clamped in training since the layer was created or its
            state reset.
        saturated_in_evaluation: the number of elements clamped in evaluations that this process ran
            eagerly.
    """

    scale: float
    amax: float
    largest_amax: float
    saturated: int
    saturated_in_evaluation: int = 0


def scaling_statistics(model: torch.nn.Module) -> dict[str, dict[str, SlotStatistics]]:
    """Layer name -> tensor type -> statistics, for all layers that have a state of delayed
    scaling."""
    statistics = {}
    for name, module in model.named_modules():
        if not isinstance(module, DelayedScalingState):
            continue
        scale = module.scale.tolist()
        newest = module.amax_history[-1].tolist()
        largest = module.amax_history.amax(0).tolist()
        saturated = module.saturated.tolist()
        in_evaluation = module.evaluations.counts()
        statistics[name.removesuffix("recipe_state").removesuffix(".")] = {
            tensor: SlotStatistics(
                scale[slot], newest[slot], largest[slot], saturated[slot], in_evaluation[slot]
            )
            for tensor, slot in module.slots.items()
        }
    return statistics
