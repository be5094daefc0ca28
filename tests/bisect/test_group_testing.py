"""Group testing finds what is needed, with few questions."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottava_bisect.search.group_testing import TooManyError, smallest

Enough = Callable[[frozenset[int]], bool]


def search(number: int, enough: Enough, most: int | None = None) -> tuple[set[int], int]:
    """The candidates that are found among ``number``, and the number of different questions."""
    questions: set[frozenset[int]] = set()

    def ask(some: tuple[int, ...]) -> bool:
        questions.add(frozenset(some))
        return enough(frozenset(some))

    return set(smallest(range(number), ask, most)), len(questions)


@given(st.lists(st.frozensets(st.integers(0, 6), max_size=4), min_size=1, max_size=5))
def test_an_answer_is_enough_and_nothing_can_be_left_out(answers: list[frozenset[int]]) -> None:
    def enough(some: frozenset[int]) -> bool:
        return any(answer <= some for answer in answers)

    found, _ = search(7, enough)
    every = [frozenset(some) for n in range(8) for some in combinations(range(7), n)]
    minimal = [s for s in every if enough(s) and not any(enough(s - {one}) for one in s)]
    assert found in minimal
    # Among single candidates it is the first one.
    singles = [s for s in minimal if len(s) == 1]
    assert len(found) != 1 or found == min(singles, key=min)


@given(st.data(), st.sampled_from([1, 2, 3, 12, 64, 600, 4200]))
def test_the_number_of_questions(data: st.DataObject, number: int) -> None:
    indices = st.integers(0, number - 1)
    wanted = data.draw(st.frozensets(indices, min_size=1, max_size=min(5, number)))
    found, questions = search(number, wanted.__le__)
    assert found == wanted
    count = len(wanted)
    assert questions <= 2 * count * math.ceil(math.log2(number / count)) + 2 * count + 2
    first, questions = search(number, lambda some: 0 in some)
    assert first == {0}
    assert questions <= math.ceil(math.log2(number)) + 2


def test_too_many_are_given_up_early() -> None:
    asked = []

    def enough(some: frozenset[int]) -> bool:
        asked.append(some)
        return len(some) >= 300

    with pytest.raises(TooManyError):
        search(600, enough, 8)
    assert len(asked) < 100
    assert search(600, lambda some: len(some) >= 8, 8)[0] == set(range(8))
    assert smallest([], lambda some: True) == []
