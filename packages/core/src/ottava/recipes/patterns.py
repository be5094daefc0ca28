"""Patterns (``fnmatch``) of the names of layers: the names that one fits, and the pattern that one
that fits nothing may be a misspelling of."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

_WILDCARDS = "*?["


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits the qualified name of a layer, or of a module that the layer is in."""
    ends = [at for at, character in enumerate(name) if character == "."]
    return any(fnmatchcase(name[:end], pattern) for end in (*ends, len(name)))


def modules_of(names: Iterable[str]) -> frozenset[str]:
    """The names of layers, and of the modules that these are in."""
    return frozenset(path for name in names for path in accumulate(name.split("."), "{}.{}".format))


def fits_some(pattern: str, modules: frozenset[str]) -> bool:
    """Whether a pattern fits one of the names that :func:`modules_of` gives."""
    return pattern in modules or any(fnmatchcase(name, pattern) for name in modules)


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """At most three patterns or names that fit some of ``names`` and are written nearly as
    ``pattern``.

    A part between two dots may be misspelled: ``*.q_prj`` gives ``*.q_proj``. Where no such part is
    found, names that look like the whole pattern are given.
    """
    distinct_names = list(dict.fromkeys(names))
    parts = sorted({part for name in distinct_names for part in name.split(".")})
    words = pattern.split(".")
    corrections: list[str] = []
    for place, part in enumerate(words):
        bare = part.strip("*?")
        if not bare or any(sign in bare for sign in _WILDCARDS):
            continue
        for near in difflib.get_close_matches(bare, parts, n=3):
            candidate = ".".join([*words[:place], part.replace(bare, near), *words[place + 1 :]])
            if candidate != pattern and any(fits(name, candidate) for name in distinct_names):
                corrections.append(candidate)
    return corrections[:3] or difflib.get_close_matches(pattern, distinct_names, n=3, cutoff=0.5)


def suggestion(pattern: str, names: Sequence[str], otherwise: str) -> str:
    """The expectation, for an error, in the place of a pattern that fits none of ``names``:
    ``a name such as …``, or ``otherwise`` where no name is near."""
    near = nearest(pattern, names)
    if not near:
        return otherwise
    return f"a name such as {', '.join(near)}"
