"""The conformance kit: checks that every recipe passes.

They run under pytest, on the command line, and from programs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Check": "ottava_testing.table",
    "CheckFailed": "ottava_testing.compare",
    "Needs": "ottava_testing.table",
    "RecipeConformance": "ottava_testing.conformance",
    "Report": "ottava_testing.runner",
    "Result": "ottava_testing.runner",
    "Subject": "ottava_testing.subject",
    "check_recipe": "ottava_testing.runner",
    "list_checks": "ottava_testing.checks",
}
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


def __getattr__(name: str) -> Any:
    # pytest loads this package's plugin in every run, so torch is imported only on first use.
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_testing' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_testing.checks import list_checks as list_checks
    from ottava_testing.compare import CheckFailed as CheckFailed
    from ottava_testing.conformance import RecipeConformance as RecipeConformance
    from ottava_testing.runner import Report as Report
    from ottava_testing.runner import Result as Result
    from ottava_testing.runner import check_recipe as check_recipe
    from ottava_testing.subject import Subject as Subject
    from ottava_testing.table import Check as Check
    from ottava_testing.table import Needs as Needs
