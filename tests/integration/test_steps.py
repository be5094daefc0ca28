"""Scales, histories and counts after each event of random programs are those of the rule."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from ottava_delayed import DelayedScaling
from tests import oracle
from tests.integration.steps import ELEMENTS, Steps
from tests.recipes_delayed.slot_oracle import Slot


class Delayed(Slot):
    def calibrate(self, amax: float) -> None:
        self.history[0] = amax


class DelayedSteps(Steps):
    options: ClassVar[Any] = st.tuples(
        st.integers(1, 3), st.sampled_from(("max", "most_recent")), st.integers(-1, 1)
    )

    def recipe(self, options: Any, reduces: bool) -> DelayedScaling:
        length, algorithm, margin = options
        return DelayedScaling(margin, amax_history_len=length, amax_compute_algo=algorithm,
            reduce_amax=reduces)

    def slot(self, options: Any, tensor_type: str) -> Slot:
        length, algorithm, margin = options
        slot = Delayed(length, oracle.MAX[ELEMENTS[tensor_type]], margin)
        if algorithm == "most_recent":
            slot.amax_of = lambda history: history[0]
        return slot

    def contents(self, slot: Slot) -> list[Any]:
        return [slot.scale, slot.history, slot.saturated]

    def found(self, state: Any, place: int) -> list[Any]:
        history = state.amax_history[:, place].tolist()
        return [state.scale[place].item(), history, state.saturated[place].item()]


@pytest.mark.parametrize("examples", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_delayed_scaling(examples: int) -> None:
    run_state_machine_as_test(
        DelayedSteps,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
