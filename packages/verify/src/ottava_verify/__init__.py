"""Contracts of quantizers: golden vectors, and what given bytes were made with.

Public names are resolved on first use, so torch is not imported before it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Module -> the public names that it defines.
_NAMES = {
    "finding": "Finding Report",
    "turns": "TURNS Turn",
    "vectors": "HASHES Vectors make_vectors",
    "verifying": "assert_contract verify verify_checkpoint verify_checkpoints verify_function",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ottava_verify' has no attribute {name!r}")
    module = importlib.import_module(f"ottava_verify.{_MODULES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from ottava_verify.finding import Finding as Finding
    from ottava_verify.finding import Report as Report
    from ottava_verify.turns import TURNS as TURNS
    from ottava_verify.turns import Turn as Turn
    from ottava_verify.vectors import HASHES as HASHES
    from ottava_verify.vectors import Vectors as Vectors
    from ottava_verify.vectors import make_vectors as make_vectors
    from ottava_verify.verifying import assert_contract as assert_contract
    from ottava_verify.verifying import verify as verify
    from ottava_verify.verifying import verify_checkpoint as verify_checkpoint
    from ottava_verify.verifying import verify_checkpoints as verify_checkpoints
    from ottava_verify.verifying import verify_function as verify_function
