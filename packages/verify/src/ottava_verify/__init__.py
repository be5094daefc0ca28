"""Contracts of quantizers: an interpreter in plain Python, its array twin, and golden vectors.

Public names are resolved on first use, so torch is not imported before it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_MODULES = {
    "HASHES": "ottava_verify.hashes",
    "Bytes": "ottava_verify.scalar",
    "Interpreter": "ottava_verify.arrays",
    "Vectors": "ottava_verify.vectors",
    "decode": "ottava_verify.scalar",
    "make_vectors": "ottava_verify.vectors",
    "quantize": "ottava_verify.scalar",
    "stored_tensors": "ottava_verify.reading",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ottava_verify' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from ottava_verify.arrays import Interpreter as Interpreter
    from ottava_verify.hashes import HASHES as HASHES
    from ottava_verify.reading import stored_tensors as stored_tensors
    from ottava_verify.scalar import Bytes as Bytes
    from ottava_verify.scalar import decode as decode
    from ottava_verify.scalar import quantize as quantize
    from ottava_verify.vectors import Vectors as Vectors
    from ottava_verify.vectors import make_vectors as make_vectors
