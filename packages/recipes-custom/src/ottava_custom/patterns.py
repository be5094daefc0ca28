"""Patterns of layer names."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern (``fnmatch``) fits the qualified name of a layer, or of a module that the layer is in."""
    ends = [at for at, character in enumerate(name) if character == "."]
    return any(fnmatchcase(name[:end], pattern) for end in (*ends, len(name)))
