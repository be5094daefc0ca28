"""The pytest plugin: marks, readable assertions in the checks, and the rule on overriding standard
tests.

pytest loads it in every run, so that it imports nothing but pytest; where no test module imported
the base class, there is nothing to do.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any, NoReturn

import pytest

pytest.register_assert_rewrite("ottava_testing.checks")


def _kit() -> Any:
    """The module of the base class, if anything imported it."""
    return sys.modules.get("ottava_testing.conformance")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of checks that compile or start processes."""
    config.addinivalue_line(
        "markers", "ottava_slow: a conformance check that compiles or starts processes"
    )


class _Refused(pytest.Class):
    """A class that leaves standard tests out: collecting it is an error, and none of its tests can
    pass."""

    def collect(self) -> NoReturn:
        raise self.CollectError(_kit().violation(self.obj, self.refusal))

    refusal: tuple[str, ...] = ()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> Generator[None, Any, Any]:
    """Refuse conformance classes that leave standard tests out, or that pytest would not collect
    for that."""
    made = yield
    kit = _kit()
    if kit is None or not isinstance(obj, type) or not issubclass(obj, kit.RecipeConformance):
        return made
    if not isinstance(made, pytest.Class) and not kit.hidden(obj):
        return made
    wrong = kit.class_violations(obj, collector.iter_markers())
    if not wrong:
        return made
    refused = _Refused.from_parent(collector, name=name, obj=obj)
    refused.refusal = tuple(wrong)
    return refused


def pytest_itemcollected(item: pytest.Item) -> None:
    """An override that is expected to fail has to: its mark is strict, whatever the configuration
    says."""
    kit = _kit()
    if kit is None or not kit.is_standard(item):
        return
    for mark in list(item.iter_markers("xfail")):
        # The first mark is the one that counts.
        item.add_marker(pytest.mark.xfail(**{**mark.kwargs, "strict": True}), append=False)
        return


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail standard tests that marks added after collection would leave out: before pytest looks at
    these marks."""
    kit = _kit()
    if kit is not None and kit.is_standard(item):
        wrong = kit.item_violations(item)
        if wrong:
            pytest.fail(kit.violation(item.cls, wrong), pytrace=False)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Fail standard tests that something skips, and expected failures that are none of the standard
    check."""
    report = yield
    kit = _kit()
    if kit is None or not kit.is_standard(item) or not report.skipped:
        return report
    why = kit.wrongly_left_out(item, report.when, call.excinfo)
    if why is None:
        return report
    report.outcome = "failed"
    report.longrepr = kit.violation(item.cls, [f"{item.name}: {why}"])  # type: ignore[attr-defined]
    if hasattr(report, "wasxfail"):
        # Such a report counts as an expected failure, or as one that passes, whatever its outcome
        # is.
        del report.wasxfail
    return report
