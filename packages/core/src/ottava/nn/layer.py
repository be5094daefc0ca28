"""A layer as the rooms below :class:`ottava.nn.Linear` read it."""

from typing import Any, Protocol

import torch

from ottava.recipes.state import RecipeState


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
    # Any, because its room imports this one.
    _binding: Any
    _parameters: dict[str, torch.nn.Parameter | None]
    _modules: dict[str, torch.nn.Module | None]


def label_of(layer: Layer) -> str:
    """The name of a layer in errors."""
    kind = type(layer).__name__
    return f"{kind} {layer.name!r}" if layer.name else kind


def owned_state(layer: Layer) -> RecipeState | None:
    """The stateful state that is a submodule of the layer; None if it has none."""
    state = layer._modules.get("recipe_state")
    return state if isinstance(state, RecipeState) else None
