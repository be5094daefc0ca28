"""``quantized_model_init``: layers made inside it have FP8-primary weights."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from ottava.errors import DTypeError
from ottava.recipes.base import Recipe, as_recipe
from ottava.recipes.role import QuantizerRole
from ottava.tensors import QuantizedTensor


class _Block:
    """What is known of a block: its recipe, how many weights it quantized, and how many layers of torch it saw made."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.quantized, self.plain = recipe, 0, 0

    def count(self, module: Any, name: str, parameter: Any) -> None:
        """Called for each parameter that any module is given, in any thread."""
        self.plain += _innermost.get() is self and name == "weight" and isinstance(module, torch.nn.Linear)


# The innermost block of this thread; None outside any, and in one that is disabled.
_innermost: ContextVar[_Block | None] = ContextVar("quantized_model_init", default=None)


@contextmanager
def quantized_model_init(recipe: Recipe | str | os.PathLike[str], *, enabled: bool = True) -> Iterator[None]:
    """Inside, every :class:`~ottava.nn.Linear` that is made keeps its weight quantized by ``recipe`` only.

    The values before quantization stay available on the CPU as ``weight.get_high_precision_init_val()``, for an
    optimizer's master weights, until ``weight.clear_high_precision_init_val()``. Code that makes ``torch.nn.Linear``
    layers is not affected, and a ``UserWarning`` says so where it makes no others. A ``recipe`` that is none is refused
    as by :func:`~ottava.get_recipe`.
    """
    block = _Block(as_recipe(recipe)) if enabled else None
    outer = _innermost.set(block)
    try:
        with register_module_parameter_registration_hook(block.count) if block else nullcontext():
            yield
    finally:
        _innermost.reset(outer)
    if block and block.plain and not block.quantized:
        what = f"quantized_model_init quantized nothing: the code inside made {block.plain} torch.nn.Linear"
        remedy = "make them ottava.nn.Linear, or call ottava.convert(model, recipe, primary=True) afterwards"
        warnings.warn(f"{what} and no ottava.nn.Linear; {remedy}", UserWarning, stacklevel=3)


def quantize_new_weight(layer: Any) -> None:
    """Replace the weight of a layer that was just made by a quantized one, inside ``quantized_model_init``."""
    block = _innermost.get()
    if block is not None and not layer.weight_is_transposed:
        layer.weight = quantized_parameter(layer.weight, block.recipe, layer.name, keep_initial_values=True)
        block.quantized += 1


def quantized_parameter(weight: Any, recipe: Recipe, name: str, keep_initial_values: bool) -> Any:
    """A parameter in place of the weight of the layer ``name``, quantized by ``recipe``, with the same attributes."""
    quantizer = recipe.quantizer(QuantizerRole("linear", "weight", name)).copy()
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
    parameter.__dict__.update(weight.__dict__)
    if keep_initial_values and not weight.is_meta:
        parameter._high_precision_init_val = weight.detach().cpu().clone()
    return parameter
