"""Group testing finds what matters, with few questions."""

import math
import random

import pytest

from ottava_bisect.search.group_testing import TooManyError, smallest


def asked(number, enough, most=None):
    """What is found among so many, and how many different questions that took."""
    questions = set()

    def ask(some):
        questions.add(frozenset(some))
        return enough(frozenset(some))

    return set(smallest(range(number), ask, most)), len(questions)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 64, 600, 4200])
def test_one_among_many(number: int) -> None:
    for wanted in {0, number // 3, number - 1}:
        found, questions = asked(number, lambda some, wanted=wanted: wanted in some)
        assert found == {wanted}
        assert questions <= 2 * math.ceil(math.log2(number)) + 2


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("number", [12, 600])
def test_several_that_are_all_needed(count: int, number: int) -> None:
    for seed in range(10):
        wanted = frozenset(random.Random(seed).sample(range(number), count))
        found, questions = asked(number, lambda some, wanted=wanted: wanted <= some)
        assert found == wanted
        assert questions <= 2 * count * math.log2(number / count) + 2 * count + 2


def test_of_several_that_would_each_do_the_first_is_found() -> None:
    found, questions = asked(600, lambda some: bool(some & {31, 400}))
    assert found == {31}
    assert questions <= 2 * math.log2(600) + 2


def test_one_or_two_others() -> None:
    found, _ = asked(100, lambda some: 90 in some or {3, 50} <= some)
    assert found in ({90}, {3, 50})


def test_what_is_first_costs_half() -> None:
    _, questions = asked(1024, lambda some: 0 in some)
    assert questions <= 12


def test_too_many() -> None:
    asked_of = []

    def ask(some):
        asked_of.append(some)
        return len(some) >= 300

    with pytest.raises(TooManyError):
        smallest(range(600), ask, 8)
    assert len(asked_of) < 100


def test_nothing_is_needed() -> None:
    assert asked(10, lambda some: True) == (set(), 1)
    assert smallest([], lambda some: True) == []
