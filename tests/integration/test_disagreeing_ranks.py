"""Ranks with other layers or other options of a recipe that keeps state are told so, all of them,
at the first step."""

from __future__ import annotations

import pytest

from ottava_testing import launch

CASES = [
    "agreeing",
    "other_margin",
    "other_history",
    "other_algorithm",
    "other_format",
    "other_options_in_a_block",
    "fewer_layers",
    "other_layers",
    "fewer_layers_in_a_block",
    "other_roles",
    "other_reduction",
    "converted_again",
    "copied",
    "other_order_in_a_block",
    "functions_at_other_addresses",
]


@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str) -> None:
    name = f"tests.integration.disagreeing_cases.{case}"
    (failure,) = launch.run_on_ranks("tests.ranks:run", [name], seconds=30).values()
    assert failure is None, failure
