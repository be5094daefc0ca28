"""Scales, histories and counts after each event of random programs are those of the rule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.distributed.device_mesh import DeviceMesh

from tests.integration.steps import Steps, Use
from tests.ranks import on_ranks


def check(machine: Any, examples: int, *phases: Phase) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("examples", [10, pytest.param(4000, marks=pytest.mark.slow)])
def test_random_programs(examples: int, one_thread: None) -> None:
    # A smaller program says what is wrong; more than one takes minutes.
    check(Steps, examples, Phase.generate, Phase.shrink)


@pytest.mark.parametrize("examples", [8, pytest.param(1000, marks=pytest.mark.slow)])
@on_ranks(2, seconds=600)
def test_random_programs_on_ranks_whose_data_differ(mesh: DeviceMesh, examples: int) -> None:
    class OnRanks(Steps):
        rank, ranks = mesh.get_rank(), mesh.size()

    # The ranks run the same programs: no shrinking, which follows what one of them saw.
    check(OnRanks, examples, Phase.generate)


def runs(number: int, *uses: Use, mode: str = "train", whole: bool | None = None) -> Any:
    return "run", (number, list(uses), False, mode, whole)


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
    "a block of another recipe inside of one, twice": [
        *(ENTER_A, ENTER_B, runs(1, ONE), LEAVE, ENTER_B, runs(1, LARGE), LEAVE),
        *(ENTER_B, runs(1, ONE), LEAVE, LEAVE),
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
    "a calibrating block around a layer that once ran in another step": [
        *(runs(0, Use(1, 0, 0, blocks=("A",))), runs(0, ONE)),
        runs(0, Use(0, 0, 0, blocks=("calibrating", "A"))),
        ("run", (0, [Use(1, 0, 0, blocks=("calibrating A",))], True, "train", None)),
    ],
    "a calibrating block that is recomputed after one of another recipe": [
        runs(
            0,
            Use(1, 0, 0, blocks=("B", "calibrating"), recompute=True),
            Use(1, 0, 0, blocks=("calibrating A",)),
        )
    ],
    "a calibrating block that fails": [
        *(("enter", ("calibrating A", True)), runs(1, ONE), ("leave", (True,)), ENTER_A, LEAVE)
    ],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    machine = Steps()
    machine.prepare(dict.fromkeys("AB", (2, "max", 0)), True)
    try:
        for step, arguments in PROGRAMS[name]:
            getattr(machine, step)(*arguments)
            machine.states_are_those_of_the_rule()
    finally:
        machine.teardown()
