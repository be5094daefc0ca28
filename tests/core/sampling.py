"""How many combinations are run: all of them in the long run, else as few as have every pair of
values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
#: Set by tests that are marked slow.
VARIABLE = "OTTAVA_TESTS_EVERY"


def some(few: T, every: T) -> T:
    """``every`` in the long run."""
    return every if os.environ.get(VARIABLE) else few


def _places(axes: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(axis)) for axis in axes)))


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of values, one of each axis, in which any two values of two axes meet at least once."""
    rows = _places(axes)
    wanted = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*wanted.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(wanted[row] & missing)))
        missing -= wanted[chosen[-1]]
    return _values(axes, some(chosen, rows))


def each(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of values, one of each axis, in which every value is at least once."""
    few = [tuple(number % len(axis) for axis in axes) for number in range(max(map(len, axes)))]
    return _values(axes, some(few, _places(axes)))


def _values(
    axes: Sequence[Sequence[Any]], rows: Sequence[tuple[int, ...]]
) -> list[tuple[Any, ...]]:
    return [tuple(axis[place] for axis, place in zip(axes, row, strict=True)) for row in rows]
