"""NVFP4 for Ottava: elements of four bits in blocks of 16, with two levels of scales."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "NVFP4BlockScaling": "ottava_nvfp4.recipe",
    "NVFP4Quantizer": "ottava_nvfp4.quantizer",
    "NVFP4Tensor": "ottava_nvfp4.quantizer",
}
__all__ = ["NVFP4BlockScaling", "NVFP4Quantizer", "NVFP4Tensor", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_nvfp4' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_nvfp4.quantizer import NVFP4Quantizer as NVFP4Quantizer
    from ottava_nvfp4.quantizer import NVFP4Tensor as NVFP4Tensor
    from ottava_nvfp4.recipe import NVFP4BlockScaling as NVFP4BlockScaling
