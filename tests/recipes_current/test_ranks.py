"""Two gloo processes: FP8-primary weights are gathered as bytes, training equals one process,
amaxes are shared."""

from __future__ import annotations

import pytest

from tests import ranks

CASES = ["train", "unequal", "one_scale"]


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    return ranks.failures("tests.recipes_current.rank_cases", CASES)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, failures: dict[str, str | None]) -> None:
    assert failures[case] is None, failures[case]
