"""Losses that a bundle can name, since it holds no code."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

#: ``loss(output, targets)`` gives a scalar.
Loss = Callable[[Any, Any], torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all positions: logits ``[*, classes]``, taken as float32, and numbers of
    classes ``[*]``."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def mse(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of squared differences, in float32."""
    return F.mse_loss(output.float(), targets.float())


#: The names that bundles have.
LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse}


def loss_in(output: Any) -> torch.Tensor | None:
    """The loss that a model's output is, or has under that name; None where it has none."""
    found = output.get("loss") if isinstance(output, Mapping) else output
    return (
        found
        if isinstance(found, torch.Tensor) and found.dim() == 0 and found.requires_grad
        else None
    )
