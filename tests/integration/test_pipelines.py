"""Delayed scaling in the stages of a pipeline."""

from __future__ import annotations

import pytest

from ottava_testing import launch

CASES = {
    2: [
        "converted",
        "layers_alone",
        "of_known_shapes",
        "several_recipes",
        "in_blocks",
        "interleaved",
    ],
    4: ["refused_among_replicas"],
}


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases]
)
def test_ranks(world: int, case: str) -> None:
    name = f"tests.integration.pipeline_cases.{case}"
    (failure,) = launch.run_on_ranks("tests.ranks:run", [name], world, seconds=60).values()
    assert failure is None, failure
