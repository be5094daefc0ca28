"""Delayed scaling for Ottava: a step quantizes with scales computed from past steps' amaxes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "DelayedScaling": "ottava_delayed.recipe",
    "DelayedScalingState": "ottava_delayed.state",
    "Float8Quantizer": "ottava_delayed.quantizer",
    "SlotStatistics": "ottava_delayed.statistics",
    "scaling_statistics": "ottava_delayed.statistics",
}
__all__ = [
    "DelayedScaling",
    "DelayedScalingState",
    "Float8Quantizer",
    "SlotStatistics",
    "__version__",
    "scaling_statistics",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_delayed' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_delayed.quantizer import Float8Quantizer as Float8Quantizer
    from ottava_delayed.recipe import DelayedScaling as DelayedScaling
    from ottava_delayed.state import DelayedScalingState as DelayedScalingState
    from ottava_delayed.statistics import SlotStatistics as SlotStatistics
    from ottava_delayed.statistics import scaling_statistics as scaling_statistics
