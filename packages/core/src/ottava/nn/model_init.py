"""``quantized_model_init``: layers made inside it have FP8-primary weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ottava.errors import DTypeError
from ottava.recipes.base import Recipe, as_recipe
from ottava.recipes.role import QuantizerRole
from ottava.tensors import QuantizedTensor


class _Recipes(threading.local):
    """The recipes of the enclosing blocks of a thread, innermost last; None where one is disabled."""

    def __init__(self) -> None:
        self.stack: list[Recipe | None] = []


_recipes = _Recipes()


@contextmanager
def quantized_model_init(recipe: Recipe | str | os.PathLike[str], *, enabled: bool = True) -> Iterator[None]:
    """Inside, every :class:`~ottava.nn.Linear` that is made keeps its weight quantized by ``recipe`` only.

    The values before quantization stay available on the CPU as ``weight.get_high_precision_init_val()``, for an
    optimizer's master weights, until ``weight.clear_high_precision_init_val()``.

    Raises:
        DTypeError, RecipeNotFoundError: ``recipe`` is no recipe.
    """
    _recipes.stack.append(as_recipe(recipe) if enabled else None)
    try:
        yield
    finally:
        _recipes.stack.pop()


def quantize_new_weight(layer: Any) -> None:
    """Replace the weight of a layer that was just made by a quantized one, inside ``quantized_model_init``."""
    recipe = _recipes.stack[-1] if _recipes.stack else None
    if recipe is None:
        return
    weight = layer.weight
    quantizer = recipe.quantizer(QuantizerRole("linear", "weight", layer.name)).copy()
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    with torch.no_grad():
        quantizer.initialize(weight.detach())
        quantized = quantizer.quantize(weight.detach())
    if not isinstance(quantized, QuantizedTensor):
        raise DTypeError(
            f"the quantizer of recipe {recipe.name!r} returned a {type(quantized).__name__} for a weight",
            expected="a QuantizedTensor",
            remedy="FP8-primary weights need a quantizer whose results are tensors when internal is False",
        )
    parameter: Any = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    if not weight.is_meta:
        parameter._high_precision_init_val = weight.detach().cpu().clone()
    layer.weight = parameter
