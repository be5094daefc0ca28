"""Finds the operand whose quantization breaks a training step.

:class:`capture` writes a step to a file, and :func:`bisect` replays it with some operands quantized
and the others in high precision.

Public names are resolved on first use, so torch is not imported before it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_MODULES = {
    "Bundle": "ottava_bisect.bundle",
    "Finding": "ottava_bisect.search.report",
    "Report": "ottava_bisect.search.report",
    "bisect": "ottava_bisect.search.bisect",
    "capture": "ottava_bisect.capturing",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ottava_bisect' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from ottava_bisect.bundle import Bundle as Bundle
    from ottava_bisect.capturing import capture as capture
    from ottava_bisect.search.bisect import bisect as bisect
    from ottava_bisect.search.report import Finding as Finding
    from ottava_bisect.search.report import Report as Report
