"""Tensor parallel plans are refused by layers that quantize, until they are supported."""

from __future__ import annotations

import pytest

from ottava_testing import launch

CASES = [
    "after_conversion",
    "before_conversion",
    "by_hand",
    "with_fully_shard",
    "without_recipe",
    "sharded_by_fully_shard",
]


@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str) -> None:
    name = f"tests.integration.tensor_parallel_cases.{case}"
    (failure,) = launch.run_on_ranks("tests.ranks:run", [name], seconds=60).values()
    assert failure is None, failure
