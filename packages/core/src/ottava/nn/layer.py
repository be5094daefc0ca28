"""What the rooms below :class:`ottava.nn.Linear` read of a layer."""

from typing import Any, Protocol

import torch


class Layer(Protocol):
    """A layer whose products run on quantized operands.

    Attributes:
        name: given to quantizer factories; empty for a layer that nobody named.
        weight: ``[out_features, in_features]``, or the transpose of that.
        weight_is_transposed: whether the weight is stored ``[in_features, out_features]``.
        fuse_wgrad_accumulation: whether the gradient of the weight is added to its ``main_grad``.
        training: the mode that ``train()`` and ``eval()`` set.
    """

    name: str
    weight: torch.Tensor
    in_features: int
    weight_is_transposed: bool
    fuse_wgrad_accumulation: bool
    training: bool
    _binding: Any
    _parameters: dict[str, torch.nn.Parameter | None]
    _modules: dict[str, torch.nn.Module | None]


def label_of(layer: Layer) -> str:
    """What errors call a layer."""
    kind = type(layer).__name__
    return f"{kind} {layer.name!r}" if layer.name else kind
