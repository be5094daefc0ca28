"""Group testing: the few among many that matter, by questions about many at once."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class TooManyError(Exception):
    """More are needed than were to be looked for."""


def smallest(
    candidates: Sequence[T], enough: Callable[[tuple[T, ...]], bool], most: int | None = None
) -> list[T]:
    """The fewest of ``candidates`` that are enough, in the sense that none of them can be left out.

    QuickXplain (Junker, "QuickXplain: preferred explanations and relaxations for over-constrained
    problems", AAAI 2004): of ``n`` candidates, ``k`` are found with at most ``2k·log2(n/k) + 2k``
    questions. Among several answers it takes the one that holds the earlier candidates, and one
    that is early costs ``log2(n)``.

    Args:
        enough: whether these would do; more of them must do where fewer do. All candidates together
            do.
        most: give up where more than so many are needed.

    Raises:
        TooManyError: more than ``most`` are needed.
    """
    found = 0

    def search(held: tuple[T, ...], asked: bool, rest: tuple[T, ...]) -> tuple[T, ...]:
        """What is needed of ``rest`` beside ``held``; ``asked``: whether it is open that ``held``
        alone will do."""
        nonlocal found
        if asked and enough(held):
            return ()
        if len(rest) == 1:
            found += 1
            if most is not None and found > most:
                raise TooManyError
            return rest
        half = (len(rest) + 1) // 2
        early, late = rest[:half], rest[half:]
        of_late = search((*held, *early), True, late)
        of_early = search((*held, *of_late), bool(of_late), early)
        return (*of_early, *of_late)

    return list(search((), True, tuple(candidates))) if candidates else []
