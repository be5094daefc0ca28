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
from tests.integration.steps import ELEMENTS, Steps, Use
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


def runs(number: int, *uses: Use, mode: str = "train", whole: bool | None = None) -> Any:
    return "run", (number, list(uses), False, mode, whole, None)


ONE, LARGE = Use(0, 0, 0), Use(0, 2, 0)
ENTER_A, ENTER_B, LEAVE = ("enter", ("A", True)), ("enter", ("B", True)), ("leave", (False,))
BACKWARD, SAVE, LOAD = ("backward_of_all", ([],)), ("save", (1, 0)), ("load", (1, 0))
IN_NONE = Use(0, 0, 0, blocks=("none",))
#: Programs that once went wrong.
PROGRAMS: dict[str, list[Any]] = {
    "a backward pass after its step has begun again": [
        *(ENTER_A, runs(1, ONE), LEAVE, ENTER_A, BACKWARD, LEAVE, ENTER_A, runs(1, ONE), LEAVE)
    ],
    "a load after an evaluation in a block": [
        *(ENTER_A, runs(1, ONE), BACKWARD, LEAVE, SAVE, ("load", (1, 1))),
        *(ENTER_A, runs(1, ONE, mode="eval"), LEAVE, LOAD, ENTER_A, runs(1, LARGE), LEAVE),
    ],
    "a block without a recipe recomputed in another one": [
        *(runs(0, IN_NONE, whole=False), ENTER_B, BACKWARD, LEAVE, runs(0, ONE))
    ],
    "a block that has not begun around one that has": [
        *(("enter", ("A", False)), ENTER_A, runs(1, ONE), LEAVE, runs(1, LARGE), BACKWARD, LEAVE)
    ],
    "a layer that ran in another step since": [
        *(ENTER_A, runs(0, ONE), LEAVE, ("enter", ("none", True)), runs(0, LARGE), LEAVE),
        *(ENTER_A, runs(1, ONE), LEAVE, ("enter", ("none", True)), BACKWARD, LEAVE),
    ],
    "a block of another recipe before a layer has run": [
        *(ENTER_A, runs(1, Use(0, 0, 0, blocks=("B",)), Use(1, 0, 0)), BACKWARD, LEAVE),
        *(ENTER_A, runs(1, Use(1, 0, 0)), LEAVE),
    ],
    "an evaluation in training mode in another block": [
        *(runs(0, ONE), runs(0, IN_NONE, mode="no_grad"), BACKWARD, runs(0, ONE))
    ],
    "flags of microbatches, and none, before a recomputation": [
        *(ENTER_A, runs(1, Use(0, 0, 0, first=True)), BACKWARD, LEAVE, ("change_weight", (1, 2))),
        *(ENTER_A, runs(1, ONE, Use(0, 0, 0, first=False), whole=True), LEAVE),
    ],
    "the first microbatch in a reentrant checkpoint": [
        *(ENTER_A, runs(1, Use(0, 0, 0, recompute=True, first=True)), LEAVE, ENTER_A, LEAVE)
    ],
    "a reentrant checkpoint, and a call without": [
        *(ENTER_A, runs(1, Use(0, 2, 0, recompute=True), ONE), LEAVE, ENTER_A, LEAVE)
    ],
    "a reentrant checkpoint of a step before a recomputation": [
        *(runs(0, LARGE, whole=False), runs(0, Use(1, 0, 0, recompute=True)), BACKWARD)
    ],
    "a block inside a reentrant checkpoint begins steps": [
        *(runs(1, Use(0, 0, 0, blocks=("A",), recompute=True)), BACKWARD),
        *(runs(1, Use(0, 1, 0, blocks=("A",), recompute=True)), BACKWARD),
    ],
    "calibration inside of a recomputation": [
        *(runs(0, Use(0, 0, 0, blocks=("A", "calibrating"), recompute=True)), runs(0, LARGE))
    ],
    "a calibrating block that fails": [
        *(("enter", ("calibrating A", True)), runs(1, ONE), ("leave", (True,)), ENTER_A, LEAVE)
    ],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    machine = DelayedSteps()
    machine.prepare(dict.fromkeys("AB", (2, "max", 0)), True)
    try:
        for step, arguments in PROGRAMS[name]:
            getattr(machine, step)(*arguments)
            machine.states_are_those_of_the_rule()
    finally:
        machine.teardown()
