"""The recipe that is bound to a layer, asked when the weight of the layer is gathered."""

from typing import TYPE_CHECKING, TypeGuard

import torch

from ottava.errors import UsageError
from ottava.recipes.backward import QUANTIZED
from ottava.tensors import Quantizer

if TYPE_CHECKING:
    # Quantized tensors are gathered in programs that import no layers.
    from ottava.nn.layer import Layer


def is_converted(module: torch.nn.Module) -> "TypeGuard[Layer]":
    """Whether a module quantizes its operands, as those of ``ottava.convert`` do."""
    return hasattr(module, "_binding")


def quantizer_for_gather(module: torch.nn.Module) -> Quantizer:
    """The quantizer of the recipe that is bound to a layer, for a gather of its weight.

    Raises:
        UsageError: no recipe is bound.
    """
    quantizer: Quantizer | None = None
    if is_converted(module):
        quantizer = module._binding.gather_quantizer(module)
    if quantizer is None:
        raise UsageError(
            f"no recipe is bound to the {type(module).__name__} whose weight is gathered",
            "a layer of ottava.convert(model, recipe)",
            "convert it before gather_quantized(model)",
        )
    return quantizer


def read_by_dgrad(module: torch.nn.Module) -> str:
    """What dgrad reads of the weight of a module: a word of :mod:`ottava.recipes.backward`, of the
    recipe that is bound to it."""
    if not is_converted(module):
        return QUANTIZED
    word: str = module._binding.read_by_dgrad(module)
    return word


def gathers_values(module: torch.nn.Module) -> bool:
    """Whether the weight of a module, kept in high precision, is gathered as it is kept."""
    return is_converted(module) and bool(module._binding.gathers_values(module))
