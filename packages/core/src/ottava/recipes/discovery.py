"""Finds the entry points of a group. What lies wrongly on ``sys.path`` is reported, never raised."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions

from ottava.errors import OptionError
from ottava.recipes.hookspecs import ENTRY_POINT_GROUP

_YES, _NO = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


@dataclass(frozen=True)
class Found:
    """An entry point of a distribution, or, with no entry point, what is wrong with the distribution."""

    distribution: str
    version: str
    entry_point: str
    entry: EntryPoint | None
    error: str = ""


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def disabled() -> set[str]:
    """The distributions that ``OTTAVA_DISABLE_PLUGINS`` names."""
    return {canonical(name) for name in os.environ.get("OTTAVA_DISABLE_PLUGINS", "").split(",") if name.strip()}


def strict() -> bool:
    """Whether ``OTTAVA_STRICT_PLUGINS`` turns a broken plugin into an error.

    Raises:
        OptionError: the variable has another value than yes or no.
    """
    value = os.environ.get("OTTAVA_STRICT_PLUGINS", "").strip().lower()
    if value not in _YES | _NO:
        raise OptionError(f"OTTAVA_STRICT_PLUGINS={value}", expected="1 or 0, true or false, yes or no, on or off")
    return value in _YES


def _text(dist: Distribution, key: str) -> str:
    try:
        return str(dist.metadata[key] or "")
    except Exception:  # no METADATA at all: which error it is differs from one Python to the next
        return ""


def _examine(dist: Distribution, group: str) -> list[Found]:
    try:
        # Only files with our group are parsed: a malformed one of a stranger to Ottava is not Ottava's business.
        if not re.search(rf"^\s*\[{re.escape(group)}\]\s*$", dist.read_text("entry_points.txt") or "", re.M):
            return []
    except Exception:
        return []
    name, version = _text(dist, "Name"), _text(dist, "Version")
    if not name or not version:
        folder = getattr(getattr(dist, "_path", None), "name", "") or "a distribution without a name"
        wrong = "its metadata has no name or no version, as an interrupted installation leaves it: reinstall or delete"
        return [Found(name or folder, version or "?", "?", None, wrong)]
    try:
        entries = [entry for entry in dist.entry_points if entry.group == group]
    except Exception as error:
        return [Found(name, version, "?", None, f"its entry_points.txt cannot be read: {error}")]
    return [Found(name, version, entry.name, entry) for entry in entries]


def discover(group: str = ENTRY_POINT_GROUP) -> list[Found]:
    """All entry points of the group, by distribution and name."""
    every: dict[tuple[str, str], Found] = {}
    for dist in distributions():
        for found in _examine(dist, group):
            # The first on sys.path is the one that an import finds.
            every.setdefault((canonical(found.distribution), found.entry_point), found)
    return [every[key] for key in sorted(every)]
