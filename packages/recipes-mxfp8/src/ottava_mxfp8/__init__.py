"""MXFP8 for Ottava: FP8 in blocks of 32 elements that share a power of two."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "MXFP8BlockScaling": "ottava_mxfp8.recipe",
    "MXFP8Quantizer": "ottava_mxfp8.quantizer",
    "MXFP8Tensor": "ottava_mxfp8.tensors",
    "MXFP8TensorStorage": "ottava_mxfp8.tensors",
}
__all__ = [
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_mxfp8' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_mxfp8.quantizer import MXFP8Quantizer as MXFP8Quantizer
    from ottava_mxfp8.recipe import MXFP8BlockScaling as MXFP8BlockScaling
    from ottava_mxfp8.tensors import MXFP8Tensor as MXFP8Tensor
    from ottava_mxfp8.tensors import MXFP8TensorStorage as MXFP8TensorStorage
