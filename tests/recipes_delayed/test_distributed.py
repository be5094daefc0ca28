"""Two and four gloo processes: the scales of one process that saw all the data, in one all-reduce a
step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests import ranks

CASES = {
    2: [
        "in_default_group",
        "in_block",
        "in_block_of_a_named_group",
        "without_a_group",
        "nested",
        "functions",
        "one_recipe_two_groups",
        "under_ddp",
        "loaded_after_evaluation",
        "given_up",
        "compiled",
    ],
    # Halves of two would be groups of one, which have nobody to reduce with.
    4: ["in_default_group", "in_halves"],
}
SLOW = ["in_block", "nested", "functions", "one_recipe_two_groups", "under_ddp", "compiled"]


@pytest.fixture(scope="module")
def failures() -> Callable[[int], dict[str, str | None]]:
    """By case, for a number of ranks."""
    return functools.cache(
        lambda world: ranks.failures("tests.recipes_delayed.reduce_cases", CASES[world], world)
    )


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases]
)
def test_ranks(world: int, case: str, failures: Callable[[int], dict[str, str | None]]) -> None:
    assert failures(world)[case] is None, failures(world)[case]


@pytest.mark.slow
def test_four_ranks() -> None:
    failures = ranks.failures("tests.recipes_delayed.reduce_cases", SLOW, 4)
    assert failures == dict.fromkeys(SLOW)
