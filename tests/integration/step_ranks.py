"""Programs of steps on two ranks."""

from __future__ import annotations

import traceback
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from sampling import some
from torch.utils.checkpoint import checkpoint

import ottava
from ottava_delayed import DelayedScaling
from tests.integration.step_models import diagonal, values
from tests.integration.step_oracle import World
from tests.integration.step_programs import Evaluate, Program, Step, Use, programs


def of_ranks(mesh: Any) -> None:
    """Random programs, the same on all ranks; their data differ."""
    rank, ranks = mesh.get_rank(), mesh.size()

    @settings(
        max_examples=some(60, 10000),
        derandomize=True,
        database=None,
        deadline=None,
        # All ranks are to run the same programs: no shrinking, which follows what one of them saw.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def check(program: Program) -> None:
        try:
            World(program, rank, ranks).run()
        except Exception as error:
            raise _Failed(f"{program}\n{traceback.format_exc()}") from error

    try:
        check()
    except _Failed as failed:
        raise AssertionError(str(failed)) from None


class _Failed(BaseException):
    """No Exception: hypothesis would run the program once more, and the other rank goes on."""


def alone(mesh: Any) -> None:
    uses = (Use(0, 0, 0),)
    _on_rank(mesh, (Evaluate(0, uses, rank=0), Step(0, uses), Step(0, uses)))


def alone_in_another_block(mesh: Any) -> None:
    """Where no layer has run since the last step began."""
    uses = (Use(0, 0, 0),)
    failing = Step(2, uses, fail=("forward", 0))
    _on_rank(mesh, (Step(0, uses), failing, Evaluate(2, uses, rank=1), Step(2, uses)) * 2)


def in_evaluation_mode(mesh: Any) -> None:
    """Recomputed in the backward pass, and trained afterwards."""
    recipe, layer = DelayedScaling(amax_history_len=3), diagonal().eval()
    layer.bind(recipe)
    for step in range(3):
        with ottava.autocast(recipe):
            y = checkpoint(layer, values(2).requires_grad_(), use_reentrant=True)
        y.sum().backward()
        layer.train()
        assert (layer.recipe_state.scale[0] != 1) == (step > 0)


def _on_rank(mesh: Any, events: tuple[Any, ...]) -> None:
    program = Program(("block", "block"), ((2, "max", 0), (2, "max", 0)), True, events)
    World(program, mesh.get_rank(), mesh.size()).run()
