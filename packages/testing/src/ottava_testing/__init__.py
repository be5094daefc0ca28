"""The conformance kit: checks that every recipe passes.

They run under pytest, on the command line, and from programs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ottava_testing.checks import list_checks
    from ottava_testing.compare import CheckFailed
    from ottava_testing.conformance import RecipeConformance
    from ottava_testing.runner import Report, Result, check_recipe
    from ottava_testing.subject import Subject
    from ottava_testing.table import Check, Needs

__version__ = "0.1.0"
__all__ = [
    "Check",
    "CheckFailed",
    "Needs",
    "RecipeConformance",
    "Report",
    "Result",
    "Subject",
    "__version__",
    "check_recipe",
    "list_checks",
]
_MODULES = ("table", "compare", "subject", "checks", "runner", "conformance")


def __getattr__(name: str) -> Any:
    # pytest loads this package's plugin in every run, so torch is imported only on first use.
    for module in _MODULES if name in __all__ else ():
        value = getattr(importlib.import_module(f"ottava_testing.{module}"), name, None)
        if value is not None:
            return value
    raise AttributeError(f"module 'ottava_testing' has no attribute {name!r}")
