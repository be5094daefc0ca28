"""FSDP2 with layouts that no recipe of this project has."""

from __future__ import annotations

import pytest

from tests import ranks

CASES = ["one_scale_in_two_buffers", "columns_of_whole_blocks", "columns_of_blocks_that_are_cut"]


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    return ranks.failures("tests.integration.layout_cases", CASES)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, failures: dict[str, str | None]) -> None:
    assert failures[case] is None, failures[case]
