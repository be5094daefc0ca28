"""Cases of a test that are looped over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def told(*words: object) -> Iterator[None]:
    """Says of which case an error is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(str, words))}")
        raise
