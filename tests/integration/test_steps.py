"""Scales, histories and counts after each event of random programs are those of the rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from ottava_delayed import DelayedScaling
from tests import oracle
from tests.integration.stateful_package.acme_average_recipe import MovingAverage
from tests.integration.steps import ELEMENTS, Steps
from tests.recipes_delayed.slot_oracle import Slot


class DelayedSteps(Steps):
    """Options are the length of the history, the algorithm and the margin."""

    options: ClassVar[Any] = st.tuples(
        st.integers(1, 3), st.sampled_from(("max", "most_recent")), st.integers(-1, 1)
    )

    def recipe(self, options: Any, reduces: bool) -> DelayedScaling:
        length, algorithm, margin = options
        return DelayedScaling(
            margin,
            amax_history_len=length,
            amax_compute_algo=algorithm,
            reduce_amax=reduces,
        )

    def slot(self, options: Any, tensor_type: str) -> Slot:
        length, algorithm, margin = options
        slot = Slot(length, oracle.MAX[ELEMENTS[tensor_type]], margin)
        if algorithm == "most_recent":
            slot.amax_of = lambda history: history[0]
        return slot

    def contents(self, slot: Slot) -> list[Any]:
        return [slot.scale, slot.history, slot.saturated]

    def found(self, state: Any, place: int) -> list[Any]:
        history = state.amax_history[:, place].tolist()
        return [state.scale[place].item(), history, state.saturated[place].item()]


@dataclass
class Average:
    """A slot of a recipe from outside: the amax of the step, and the average of those before."""

    decay: float
    fp8_max: float
    scale: float = 1.0
    amax: float = 0.0
    average: float = 0.0
    saturated: int = 0

    def observe(self, amax: float) -> None:
        self.amax = max(self.amax, amax)

    def calibrate(self, amax: float) -> None:
        self.amax = amax

    def update(self) -> None:
        if self.amax > 0:
            parts = np.float32([self.decay, 1 - self.decay]) * np.float32([self.average, self.amax])
            self.average = float(parts.sum()) if self.average > 0 else self.amax
        self.scale = oracle.scale_from_amax(self.average, self.fp8_max)[0]
        self.amax = 0.0


class AverageSteps(Steps):
    options: ClassVar[Any] = st.sampled_from((0.5, 0.25))

    def recipe(self, options: float, reduces: bool) -> MovingAverage:
        return MovingAverage(options, reduces)

    def slot(self, options: float, tensor_type: str) -> Average:
        return Average(options, oracle.MAX[ELEMENTS[tensor_type]])

    def contents(self, slot: Average) -> list[Any]:
        return [slot.scale, slot.average, slot.amax]

    def found(self, state: Any, place: int) -> list[Any]:
        return [buffer[place].item() for buffer in (state.scale, state.average, state.amax)]


@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        (DelayedSteps, 50),
        (AverageSteps, 20),
        *(pytest.param(one, 4000, marks=pytest.mark.slow) for one in (DelayedSteps, AverageSteps)),
    ],
)
def test_random_programs(machine: Any, examples: int, one_thread: None) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            # A smaller program says what is wrong; more than one takes minutes.
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
