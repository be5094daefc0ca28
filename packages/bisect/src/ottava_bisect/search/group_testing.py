"""Group testing: finds the few candidates that matter by questions about many at once."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class TooManyError(Exception):
    """More candidates are needed than the search may return."""


def smallest(
    candidates: Sequence[T], enough: Callable[[tuple[T, ...]], bool], most: int | None = None
) -> list[T]:
    """A set of ``candidates`` that is enough, and of which none can be left out.

    This is QuickXplain (Junker, "QuickXplain: preferred explanations and relaxations for
    over-constrained problems", AAAI 2004). It finds ``k`` of ``n`` candidates with at most
    ``2k·log2(n/k) + 2k`` questions. Among several answers it prefers earlier candidates, and a
    single early candidate costs ``log2(n)`` questions.

    Args:
        candidates: the candidates, which are enough all together.
        enough: whether some candidates are enough; it must stay true when candidates are added.
        most: give up if more candidates than this are needed.

    Raises:
        TooManyError: more than ``most`` are needed.
    """
    count = 0

    def search(base: tuple[T, ...], is_new: bool, rest: tuple[T, ...]) -> tuple[T, ...]:
        """The candidates of ``rest`` that are needed in addition to ``base``.

        ``is_new`` is whether ``base`` alone has to be tested.
        """
        nonlocal count
        if is_new and enough(base):
            return ()
        if len(rest) == 1:
            count += 1
            if most is not None and count > most:
                raise TooManyError
            return rest
        half = (len(rest) + 1) // 2
        early, late = rest[:half], rest[half:]
        of_late = search((*base, *early), True, late)
        of_early = search((*base, *of_late), bool(of_late), early)
        return (*of_early, *of_late)

    return list(search((), True, tuple(candidates))) if candidates else []
