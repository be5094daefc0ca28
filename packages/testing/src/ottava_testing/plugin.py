"""The pytest plugin: a mark, the selection of checks, and the rule on standard tests.

pytest loads the plugin in every run, so it imports nothing but pytest, and does nothing where no
test module has imported the base class.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of checks that compile or start processes."""
    config.addinivalue_line(
        "markers", "ottava_slow: a conformance check that compiles or starts processes"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell the base class which checks are going to run; some share an expensive preparation."""
    kit = sys.modules.get("ottava_testing.conformance")
    if kit is not None:
        kit.select(session.items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Fail standard tests that something leaves out, or that fail without their check."""
    report = yield
    kit = sys.modules.get("ottava_testing.conformance")
    why = None if kit is None else kit.violation(item, report)
    if why is not None:
        report.outcome = "failed"
        report.longrepr = why
        # A report with this attribute counts as an expected failure or as an unexpected pass,
        # whatever its outcome is.
        vars(report).pop("wasxfail", None)
    return report
