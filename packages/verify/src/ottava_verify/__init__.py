"""Contracts of quantizers: interpreters, golden vectors, and what given bytes were made with.

Public names are resolved on first use, so torch is not imported before it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_MODULES = {
    "HASHES": "ottava_verify.hashes",
    "TURNS": "ottava_verify.turns",
    "Bytes": "ottava_verify.scalar",
    "Finding": "ottava_verify.report",
    "Interpreter": "ottava_verify.arrays",
    "Report": "ottava_verify.report",
    "Turn": "ottava_verify.turns",
    "Vectors": "ottava_verify.vectors",
    "assert_contract": "ottava_verify.verifying",
    "decode": "ottava_verify.scalar",
    "make_vectors": "ottava_verify.vectors",
    "quantize": "ottava_verify.scalar",
    "stored_tensors": "ottava_verify.reading",
    "verify": "ottava_verify.verifying",
    "verify_checkpoint": "ottava_verify.verifying",
    "verify_checkpoints": "ottava_verify.verifying",
    "verify_function": "ottava_verify.verifying",
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
    from ottava_verify.report import Finding as Finding
    from ottava_verify.report import Report as Report
    from ottava_verify.scalar import Bytes as Bytes
    from ottava_verify.scalar import decode as decode
    from ottava_verify.scalar import quantize as quantize
    from ottava_verify.turns import TURNS as TURNS
    from ottava_verify.turns import Turn as Turn
    from ottava_verify.vectors import Vectors as Vectors
    from ottava_verify.vectors import make_vectors as make_vectors
    from ottava_verify.verifying import assert_contract as assert_contract
    from ottava_verify.verifying import verify as verify
    from ottava_verify.verifying import verify_checkpoint as verify_checkpoint
    from ottava_verify.verifying import verify_checkpoints as verify_checkpoints
    from ottava_verify.verifying import verify_function as verify_function
