"""Scales and histories after each event of random programs are those of the rule.

``step_ranks.py`` has the programs of two ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.integration.step_oracle import World
from tests.integration.step_programs import Evaluate, Program, Replace, Step, Use, programs


@pytest.mark.parametrize("examples", [100, pytest.param(20000, marks=pytest.mark.slow)])
def test_one_rank(examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        # A smaller program says what is wrong; more than one takes minutes.
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def check(program: Program) -> None:
        World(program).run()

    check()


def program(way: str, *events: Any, reduce: bool = True) -> Program:
    return Program((way, way), ((2, "max", 0), (2, "max", 0)), reduce, events)


ONE, LARGE = Use(0, 0, 0), Use(0, 2, 0)
IN_BLOCK = Use(0, 0, 0, blocks=("none",))
RECOMPUTED, REENTRANT = Use(0, 0, 0, recompute=False), Use(0, 2, 0, recompute=True)
PROGRAMS = {
    "a backward pass after a step has begun": program(
        "block", Step(2, (ONE,), around_backward="other"), Step(2, (ONE,))
    ),
    "a block of another recipe before a layer has run": program(
        "block", Step(0, (Use(0, 0, 0, blocks=("other",)), ONE)), Step(0, (Use(1, 0, 0),))
    ),
    "an evaluation in training mode in another block": program(
        "converted", Step(0, (ONE,), between=Evaluate(0, (IN_BLOCK,), mode="no_grad"))
    ),
    "flags of microbatches, and none, before a recomputation": program(
        "block",
        Step(0, (Use(0, 0, 0, first=True),)),
        Step(0, (ONE, ONE, Use(0, 0, 0, first=False)), whole=True, weights=1),
    ),
    "a block without a recipe recomputed in another one": program(
        "bound", Step(0, (ONE,)), Step(0, (IN_BLOCK,), whole=False, around_backward="other")
    ),
    "a block without a recipe in a converted model": program("converted", Step(0, (ONE, IN_BLOCK))),
    "the first microbatch in a reentrant checkpoint": program(
        "block", Step(0, (Use(0, 0, 0, recompute=True, first=True),))
    ),
    "a reentrant checkpoint, and a call without": program("block", Step(0, (REENTRANT, ONE))),
    "an evaluation in training mode before a recomputation": program(
        "block",
        Step(0, (RECOMPUTED,), around_backward="same", between=Evaluate(0, (ONE,), "no_grad")),
    ),
    "a step with a reentrant checkpoint before a recomputation": program(
        "converted",
        Step(0, (LARGE,), whole=False, between=Step(0, (Use(0, 0, 0, recompute=True),))),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    World(PROGRAMS[name]).run()


def test_models_that_were_loaded() -> None:
    for how in ("loaded", "bound", "copied"):
        for way in ("converted", "block", "bound"):
            World(
                program(
                    way, Step(0, (ONE, LARGE)), Replace(0, how), Step(0, (ONE,)), Step(0, (LARGE,))
                )
            ).run()
