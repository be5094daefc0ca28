"""Scales and histories after each event of random programs are those of the rule, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests import ranks
from tests.integration import step_oracle
from tests.integration.step_oracle import AVOIDED, World
from tests.integration.step_programs import Evaluate, Program, Replace, Step, Use, programs


@pytest.mark.parametrize("examples", [300, pytest.param(20000, marks=pytest.mark.slow)])
def test_one_rank(examples: int) -> None:
    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(programs)
    def check(program: Program) -> None:
        World(program).run()

    check()


@pytest.mark.parametrize("examples", [300, pytest.param(10000, marks=pytest.mark.slow)])
def test_two_ranks(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(step_oracle.EXAMPLES, str(examples))
    told = ranks.failures("tests.integration.step_oracle", ["of_ranks"])["of_ranks"]
    assert told is None, told


def program(way: str, *events: Any, reduce: bool = True) -> Program:
    return Program((way, way), ((2, "max", 0), (2, "max", 0)), reduce, events)


ONE, LARGE = Use(0, 0, 0), Use(0, 2, 0)
NOT_YET = {
    "empty": (
        "the layers that run after an inner block of another recipe are forgotten by the first block around them",
        program("block", Step(0, (Use(0, 0, 0, blocks=("other",)), ONE)), Step(0, (Use(1, 0, 0),))),
    ),
    "evaluates": (
        "an evaluation in training mode, in a block that its layer has not run in, begins a step",
        program("converted", Step(0, (ONE,), between=Evaluate(0, (Use(0, 0, 0, blocks=("none",)),), mode="no_grad"))),
    ),
    "inherits": (
        "an inner block without a recipe is recomputed under the recipe of the block around the backward pass",
        program(
            "bound", Step(0, (ONE,)), Step(0, (Use(0, 0, 0, blocks=("none",)),), whole=False, around_backward="other")
        ),
    ),
    "joins": (
        "a layer of a converted model begins a step when it first runs in a block inside the model",
        program("converted", Step(0, (ONE, Use(0, 0, 0, blocks=("none",))))),
    ),
    "kept": (
        "reentrant checkpointing with is_first_microbatch=True never sees the amax of the weight",
        program("block", Step(0, (Use(0, 0, 0, recompute=True, first=True),))),
    ),
    "mixed": (
        "the amax of a reentrantly recomputed call is lost where the layer runs once more before the backward pass",
        program("block", Step(0, (Use(0, 2, 0, recompute=True), ONE))),
    ),
    "records": (
        "a recomputation records once more after an evaluation in training mode",
        program(
            "block",
            Step(0, (Use(0, 0, 0, recompute=False),), around_backward="same", between=Evaluate(0, (ONE,), "no_grad")),
        ),
    ),
}
NOT_YET_ON_RANKS = {
    "alone": "a rank that evaluates a layer before it trains in a block reduces once more than the others",
    "loads": "each layer that was loaded is reduced by itself when it first runs in a block",
}


def _expected_to_fail(reasons: dict[str, str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=why)) for name, why in reasons.items()]


@pytest.mark.parametrize("name", _expected_to_fail({name: why for name, (why, _) in NOT_YET.items()}))
def test_what_is_not_yet_so(name: str) -> None:
    World(NOT_YET[name][1], avoids=AVOIDED - {name}).run()


@pytest.mark.parametrize("name", _expected_to_fail(NOT_YET_ON_RANKS))
def test_what_is_not_yet_so_on_two_ranks(name: str) -> None:
    assert ranks.failures("tests.integration.step_oracle", [name])[name] is None


def test_all_that_programs_avoid_has_a_test() -> None:
    assert {*NOT_YET, *NOT_YET_ON_RANKS} == AVOIDED
    for _, each in NOT_YET.values():
        World(each).run()


def test_models_that_were_loaded() -> None:
    for how in ("loaded", "bound", "copied"):
        for way in ("converted", "block", "bound"):
            World(program(way, Step(0, (ONE, LARGE)), Replace(0, how), Step(0, (ONE,)), Step(0, (LARGE,)))).run()
