"""Ottava: FP8 training for PyTorch, a small core and recipes that install one by one.

Public names are resolved on first use, so that listing recipes never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Module -> the public names that it defines.
_NAMES = {
    "formats": "E4M3 E5M2 E8M0 HYBRID Format",
    "layout": "Layout",
    "nn": "HEADS ConversionReport conversion_report convert quantized_model_init register_converter",
    "recipes.base": "QuantizerRequest Recipe get_recipe",
    "recipes.hookspecs": "hookimpl",
    "recipes.region": "autocast microbatch",
    "recipes.registry": "get_quantizer_factory list_quantizer_factories list_recipes",
    "recipes.role": "QuantizerRole",
    "recipes.spec": "FactorySpec RecipeSpec",
    "tensors": "Float8Tensor Float8TensorStorage GridQuantizer GridTensor GridTensorStorage QuantizedTensor "
    "QuantizedTensorStorage Quantizer prepare_for_saving restore_from_saved",
}
_EXPORTS = {name: f"ottava.{module}" for module, names in _NAMES.items() for name in names.split()}
_SUBMODULES = (
    "checkpoint",
    "cli",
    "debug",
    "distributed",
    "errors",
    "formats",
    "gemm",
    "kernels",
    "nn",
    "recipes",
    "tensors",
)

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"ottava.{name}")
    raise AttributeError(f"module 'ottava' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})


if TYPE_CHECKING:
    from ottava.formats import E4M3 as E4M3
    from ottava.formats import E5M2 as E5M2
    from ottava.formats import E8M0 as E8M0
    from ottava.formats import HYBRID as HYBRID
    from ottava.formats import Format as Format
    from ottava.layout import Layout as Layout
    from ottava.nn import ConversionReport as ConversionReport
    from ottava.nn import conversion_report as conversion_report
    from ottava.nn import convert as convert
    from ottava.nn import quantized_model_init as quantized_model_init
    from ottava.nn import register_converter as register_converter
    from ottava.nn.conversion import HEADS as HEADS
    from ottava.recipes.base import QuantizerRequest as QuantizerRequest
    from ottava.recipes.base import Recipe as Recipe
    from ottava.recipes.base import get_recipe as get_recipe
    from ottava.recipes.hookspecs import hookimpl as hookimpl
    from ottava.recipes.region import autocast as autocast
    from ottava.recipes.region import microbatch as microbatch
    from ottava.recipes.registry import get_quantizer_factory as get_quantizer_factory
    from ottava.recipes.registry import list_quantizer_factories as list_quantizer_factories
    from ottava.recipes.registry import list_recipes as list_recipes
    from ottava.recipes.role import QuantizerRole as QuantizerRole
    from ottava.recipes.spec import FactorySpec as FactorySpec
    from ottava.recipes.spec import RecipeSpec as RecipeSpec
    from ottava.tensors import Float8Tensor as Float8Tensor
    from ottava.tensors import Float8TensorStorage as Float8TensorStorage
    from ottava.tensors import GridQuantizer as GridQuantizer
    from ottava.tensors import GridTensor as GridTensor
    from ottava.tensors import GridTensorStorage as GridTensorStorage
    from ottava.tensors import QuantizedTensor as QuantizedTensor
    from ottava.tensors import QuantizedTensorStorage as QuantizedTensorStorage
    from ottava.tensors import Quantizer as Quantizer
    from ottava.tensors import prepare_for_saving as prepare_for_saving
    from ottava.tensors import restore_from_saved as restore_from_saved
