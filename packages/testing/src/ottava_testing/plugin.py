"""The pytest plugin: marks, readable assertions in checks, and the rule on standard tests.

pytest loads the plugin in every run, so it imports nothing but pytest, and does nothing where no
test module has imported the base class.
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
    """A class that leaves out standard tests.

    Collecting it is an error, so that none of its tests can pass.
    """

    def collect(self) -> NoReturn:
        raise self.CollectError(_kit().violation(self.obj, self.refusal))

    refusal: tuple[str, ...] = ()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> Generator[None, Any, Any]:
    """Refuse conformance classes that leave out standard tests, or tell pytest not to collect."""
    collected = yield
    kit = _kit()
    if kit is None or not isinstance(obj, type) or not issubclass(obj, kit.RecipeConformance):
        return collected
    if not isinstance(collected, pytest.Class) and not kit.hidden(obj):
        return collected
    wrong = kit.class_violations(obj, collector.iter_markers())
    if not wrong:
        return collected
    refused = _Refused.from_parent(collector, name=name, obj=obj)
    refused.refusal = tuple(wrong)
    return refused


def pytest_itemcollected(item: pytest.Item) -> None:
    """Make the xfail mark of an override strict, whatever pytest's configuration says.

    An override that is expected to fail then has to fail.
    """
    kit = _kit()
    if kit is None or not kit.is_standard(item):
        return
    for mark in list(item.iter_markers("xfail")):
        # Of several marks pytest obeys the first.
        item.add_marker(pytest.mark.xfail(**{**mark.kwargs, "strict": True}), append=False)
        return


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail standard tests that marks added after collection would leave out.

    This runs before pytest itself obeys these marks.
    """
    kit = _kit()
    if kit is not None and kit.is_standard(item):
        wrong = kit.item_violations(item)
        if wrong:
            pytest.fail(kit.violation(item.cls, wrong), pytrace=False)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Fail standard tests that are skipped, and expected failures that the check did not cause."""
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
        # A report with this attribute counts as an expected failure or as an unexpected pass,
        # whatever its outcome is.
        del report.wasxfail
    return report
