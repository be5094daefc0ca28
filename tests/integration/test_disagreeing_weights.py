"""FSDP2 ranks whose recipes differ raise one typed error, all of them, within seconds."""

from __future__ import annotations

import pytest

from ottava_testing import launch
from tests.integration import disagreeing_weights_cases

CASES = [*disagreeing_weights_cases.TABLE, "other_dtypes", "compared_once"]


@pytest.fixture(scope="module")
def told() -> dict[str, str | None]:
    """What went wrong in each case, or None; ranks that wait for each other are killed."""
    names = [f"tests.integration.disagreeing_weights_cases.{case}" for case in CASES]
    return launch.run_on_ranks("tests.ranks:run", names, seconds=90)


@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str, told: dict[str, str | None]) -> None:
    failure = told[f"tests.integration.disagreeing_weights_cases.{case}"]
    assert failure is None, failure
