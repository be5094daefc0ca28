"""Scales, histories, losses and all-reduces after each event of a set of programs are those that
were recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import golden, golden_recorder

KNOWN = golden_recorder.known()
Records = dict[str, dict[str, list[dict[str, Any]]]]


def compare(found: list[dict[str, Any]], known: list[dict[str, Any]]) -> None:
    for mine, recorded in zip(found, known, strict=True):
        loss, expected = ({**event}.pop("loss", 0.0) for event in (mine, recorded))
        assert loss == pytest.approx(expected, rel=1e-12, abs=1e-12), mine["event"]
        assert {**mine, "loss": 0.0} == {**recorded, "loss": 0.0}


def test_every_program_is_recorded() -> None:
    runs = {f"{recipe}: {program}" for recipe in golden.RECIPES for program in golden.PROGRAMS}
    names = [
        f"{recipe}, rank {rank}" for recipe in golden.RANK_RECIPES for rank in range(golden.WORLD)
    ]
    assert set(KNOWN) == runs | {
        f"{name}: {program}" for name in names for program in golden.ON_RANKS
    }


@pytest.mark.parametrize("recipe", golden.RECIPES)
@pytest.mark.parametrize("program", golden.PROGRAMS)
def test_one_process(program: str, recipe: str) -> None:
    compare(golden.record(program, golden.RECIPES[recipe]), KNOWN[f"{recipe}: {program}"])


@pytest.fixture(scope="module")
def of_ranks() -> Callable[[], Records]:
    return functools.cache(golden.of_ranks)


@pytest.mark.parametrize("rank", range(golden.WORLD))
@pytest.mark.parametrize("recipe", golden.RANK_RECIPES)
@pytest.mark.parametrize("program", golden.ON_RANKS)
def test_two_ranks(program: str, recipe: str, rank: int, of_ranks: Callable[[], Records]) -> None:
    name = f"{recipe}, rank {rank}"
    compare(of_ranks()[name][program], KNOWN[f"{name}: {program}"])
