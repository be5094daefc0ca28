"""Blockwise FP8 for Ottava: one scale for each block of 1 × 128 or 128 × 128 elements."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Float8BlockQuantizer": "ottava_blockwise.quantizer",
    "Float8BlockScaling": "ottava_blockwise.recipe",
    "Float8BlockwiseQTensor": "ottava_blockwise.tensors",
    "Float8BlockwiseQTensorStorage": "ottava_blockwise.tensors",
}
__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_blockwise' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_blockwise.quantizer import Float8BlockQuantizer as Float8BlockQuantizer
    from ottava_blockwise.recipe import Float8BlockScaling as Float8BlockScaling
    from ottava_blockwise.tensors import Float8BlockwiseQTensor as Float8BlockwiseQTensor
    from ottava_blockwise.tensors import (
        Float8BlockwiseQTensorStorage as Float8BlockwiseQTensorStorage,
    )
