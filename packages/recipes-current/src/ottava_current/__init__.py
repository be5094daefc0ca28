"""Current scaling for Ottava: the scale of a tensor comes from its amax when it is quantized."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Float8CurrentScaling": "ottava_current.recipe",
    "Float8CurrentScalingQuantizer": "ottava_current.quantizer",
}
__all__ = ["Float8CurrentScaling", "Float8CurrentScalingQuantizer", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_current' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_current.quantizer import (
        Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer,
    )
    from ottava_current.recipe import Float8CurrentScaling as Float8CurrentScaling
