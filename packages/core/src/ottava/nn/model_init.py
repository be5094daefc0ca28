"""``quantized_model_init``: layers made inside it have FP8-primary weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ottava.errors import DTypeError
from ottava.recipes.base import Recipe, as_recipe
from ottava.recipes.role import QuantizerRole
from ottava.tensors import QuantizedTensor

# The recipe of the innermost block of this thread; None outside any, and in one that is disabled.
_innermost: ContextVar[Recipe | None] = ContextVar("quantized_model_init", default=None)


@contextmanager
def quantized_model_init(recipe: Recipe | str | os.PathLike[str], *, enabled: bool = True) -> Iterator[None]:
    """Inside, every :class:`~ottava.nn.Linear` that is made keeps its weight quantized by ``recipe`` only.

    The values before quantization stay available on the CPU as ``weight.get_high_precision_init_val()``, for an
    optimizer's master weights, until ``weight.clear_high_precision_init_val()``.

    Raises:
        DTypeError, RecipeNotFoundError: ``recipe`` is no recipe.
    """
    outer = _innermost.set(as_recipe(recipe) if enabled else None)
    try:
        yield
    finally:
        _innermost.reset(outer)


def quantize_new_weight(layer: Any) -> None:
    """Replace the weight of a layer that was just made by a quantized one, inside ``quantized_model_init``."""
    recipe = _innermost.get()
    if recipe is None:
        return
    weight = layer.weight
    quantizer = recipe.quantizer(QuantizerRole("linear", "weight", layer.name)).copy()
    quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled() or not quantizer.columns_when_asked)
    quantizer.internal = False
    with torch.no_grad():
        quantizer.initialize(weight.detach())
        quantized = quantizer.quantize(weight.detach())
    if not isinstance(quantized, QuantizedTensor):
        what = f"the quantizer of recipe {recipe.name!r} returned a {type(quantized).__name__} for a weight"
        remedy = "FP8-primary weights need a quantizer whose results are tensors when internal is False"
        raise DTypeError(what, expected="a QuantizedTensor", remedy=remedy)
    parameter: Any = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    if not weight.is_meta:
        parameter._high_precision_init_val = weight.detach().cpu().clone()
    layer.weight = parameter
