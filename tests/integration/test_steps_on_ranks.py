"""Random programs of steps on two ranks, whose data differ: scales, histories and counts after each
event are those of the rule."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.distributed.device_mesh import DeviceMesh

from tests.integration.test_steps import DelayedSteps
from tests.ranks import on_ranks


@pytest.mark.parametrize("examples", [30, pytest.param(1000, marks=pytest.mark.slow)])
@on_ranks(2, seconds=600)
def test_delayed_scaling(mesh: DeviceMesh, examples: int) -> None:
    class OnRanks(DelayedSteps):
        rank, ranks = mesh.get_rank(), mesh.size()

    run_state_machine_as_test(
        OnRanks,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            # The ranks run the same programs: no shrinking, which follows what one of them saw.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
