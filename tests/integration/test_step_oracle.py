"""Scales and histories after each event of random programs are those of the rule, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests import ranks
from tests.integration import step_oracle
from tests.integration.step_oracle import World
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
CASES = {
    "empty": program("block", Step(0, (Use(0, 0, 0, blocks=("other",)), ONE)), Step(0, (Use(1, 0, 0),))),
    "evaluates": program(
        "converted", Step(0, (ONE,), between=Evaluate(0, (Use(0, 0, 0, blocks=("none",)),), mode="no_grad"))
    ),
    "inherits": program(
        "bound", Step(0, (ONE,)), Step(0, (Use(0, 0, 0, blocks=("none",)),), whole=False, around_backward="other")
    ),
    "joins": program("converted", Step(0, (ONE, Use(0, 0, 0, blocks=("none",))))),
    "kept": program("block", Step(0, (Use(0, 0, 0, recompute=True, first=True),))),
    "mixed": program("block", Step(0, (Use(0, 2, 0, recompute=True), ONE))),
    "records": program(
        "block",
        Step(0, (Use(0, 0, 0, recompute=False),), around_backward="same", between=Evaluate(0, (ONE,), "no_grad")),
    ),
}
NOT_YET_ON_RANKS = {
    "loads": "each layer that was loaded is reduced by itself when it first runs in a block",
}


def _expected_to_fail(reasons: dict[str, str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=why)) for name, why in reasons.items()]


@pytest.mark.parametrize("name", CASES)
def test_what_was_not_so_once(name: str) -> None:
    World(CASES[name]).run()


def test_a_rank_that_evaluates_a_layer_before_it_trains() -> None:
    assert ranks.failures("tests.integration.step_oracle", ["alone"])["alone"] is None


@pytest.mark.parametrize("name", _expected_to_fail(NOT_YET_ON_RANKS))
def test_what_is_not_yet_so_on_two_ranks(name: str) -> None:
    assert ranks.failures("tests.integration.step_oracle", [name])[name] is None


def test_models_that_were_loaded() -> None:
    for how in ("loaded", "bound", "copied"):
        for way in ("converted", "block", "bound"):
            World(program(way, Step(0, (ONE, LARGE)), Replace(0, how), Step(0, (ONE,)), Step(0, (LARGE,)))).run()
