"""The loss functions that a bundle can name, because a bundle holds no code."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ottava.errors import OptionError

#: ``loss(output, targets)`` gives a scalar.
Loss = Callable[[Any, Any], torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy over all positions, in float32.

    Args:
        logits: ``[*, classes]``, converted to float32.
        targets: the indices of the classes, ``[*]``.
    """
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def mse(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of the squared differences, in float32."""
    return F.mse_loss(output.float(), targets.float())


#: The names that bundles use -> the functions.
LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse}


def check_loss(loss: Any) -> Loss | None:
    """The loss function that ``loss`` is or names, or else OptionError; None for None."""
    if isinstance(loss, str) and loss not in LOSSES:
        raise OptionError(
            f"loss is {loss!r}", expected=f"one of {', '.join(LOSSES)}, or a function"
        )
    return LOSSES[loss] if isinstance(loss, str) else loss


def loss_in(output: Any) -> torch.Tensor | None:
    """The loss in a model's output: the entry ``loss`` of a mapping, or the output itself.

    None where that is not a scalar tensor that requires a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
        return loss
    return None
