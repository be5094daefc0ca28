"""Parameters of a test of which some are marked slow: those that repeat what others show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def slow(*parameters: Any) -> list[Any]:
    """The same parameters, a tuple for those of several names, marked slow."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for one in parameters
    ]


def each_value(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of a value of each axis; those beyond a few that have every value are
    slow."""
    longest = max(map(len, axes))
    few = {tuple(number % len(axis) for axis in axes) for number in range(longest)}
    combinations = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        marks = [] if places in few else [pytest.mark.slow]
        combinations.append(pytest.param(*values, marks=marks, id="-".join(map(_text, values))))
    return combinations


def _text(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", None) or repr(value)
