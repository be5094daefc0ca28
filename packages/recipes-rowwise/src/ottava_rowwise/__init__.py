"""Rowwise FP8 for Ottava: one scale for each row that a GEMM sums over."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Float8RowwiseQuantizer": "ottava_rowwise.quantizer",
    "Float8RowwiseScaling": "ottava_rowwise.recipe",
    "Float8RowwiseTensor": "ottava_rowwise.quantizer",
}
__all__ = ["Float8RowwiseQuantizer", "Float8RowwiseScaling", "Float8RowwiseTensor", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_rowwise' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_rowwise.quantizer import Float8RowwiseQuantizer as Float8RowwiseQuantizer
    from ottava_rowwise.quantizer import Float8RowwiseTensor as Float8RowwiseTensor
    from ottava_rowwise.recipe import Float8RowwiseScaling as Float8RowwiseScaling
