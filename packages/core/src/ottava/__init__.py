"""Ottava: FP8 training for PyTorch, a small core and recipes that install one by one.

Public names are resolved on first use, so that listing recipes never imports torch;
``__init__.pyi`` has their types.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Module -> the public names that it defines.
_NAMES = {
    "contract": "Contract",
    "formats": "E4M3 E5M2 E8M0 HYBRID Format",
    "layout": "Layout",
    "nn": "HEADS ConversionReport conversion_report convert microbatch quantized_model_init "
    "register_converter revert",
    "recipes.base": "QuantizerRequest Recipe get_recipe",
    "recipes.hookspecs": "hookimpl",
    "recipes.region": "autocast",
    "recipes.registry": "get_quantizer_factory list_quantizer_factories list_recipes",
    "recipes.role": "QuantizerRole",
    "recipes.spec": "FactorySpec RecipeSpec",
    "tensors": "Float8Tensor Float8TensorStorage GridQuantizer GridTensor GridTensorStorage "
    "QuantizedTensor "
    "QuantizedTensorStorage Quantizer prepare_for_saving restore_from_saved",
}
_EXPORTS = {name: f"ottava.{module}" for module, names in _NAMES.items() for name in names.split()}
_ROOMS = "checkpoint cli debug distributed errors formats gemm kernels nn recipes tensors"

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS.split():
        return importlib.import_module(f"ottava.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ottava' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS.split()})
