"""FSDP2 on two gloo processes: MXFP8 weights are gathered as bytes, and training equals one
process."""

from __future__ import annotations

import pytest

from tests import ranks

CASES = ["train", "alone", "master", "refused", "recomputed"]


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    return ranks.failures("tests.recipes_mxfp8.fsdp_cases", CASES)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, failures: dict[str, str | None]) -> None:
    assert failures[case] is None, failures[case]
