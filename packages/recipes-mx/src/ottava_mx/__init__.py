"""The MX formats of four and six bits, and of integers, for Ottava."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "MXBlockScaling": "ottava_mx.recipe",
    "MXQuantizer": "ottava_mx.quantizer",
    "MXTensor": "ottava_mx.quantizer",
}
__all__ = ["MXBlockScaling", "MXQuantizer", "MXTensor", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_mx' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_mx.quantizer import MXQuantizer as MXQuantizer
    from ottava_mx.quantizer import MXTensor as MXTensor
    from ottava_mx.recipe import MXBlockScaling as MXBlockScaling
