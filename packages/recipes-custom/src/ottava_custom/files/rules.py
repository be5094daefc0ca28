"""Rules: which expression serves which roles of which layers, and in which order they are asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ottava.recipes.patterns import fits, fits_some, modules_of, suggestion
from ottava.recipes.role import OF_LINEAR, QuantizerRole, RecipeRule
from ottava_custom.factories import TENSOR_TYPES
from ottava_custom.files.expressions import Expression, Served
from ottava_custom.files.nodes import shown
from ottava_custom.files.source import Place, Source

#: The keys of a rule that say what serves, and in words for which roles.
SERVING = ("all", "forward", "backward", *TENSOR_TYPES)
# How many patterns with wildcards are looked at, to tell whether they take all layers of a later
# one.
_COMPARED = 64


def keys_of(role: QuantizerRole) -> tuple[str, ...]:
    """The keys of a rule that speak of a role, the one that counts most first."""
    direction = "backward" if role.is_gradient else "forward"
    return (*([role.tensor_type] if role.tensor_type in TENSOR_TYPES else []), direction, "all")


def roles_of(key: str) -> list[QuantizerRole]:
    """The roles that a key of a rule speaks of, of a layer without a name."""
    roles = [QuantizerRole("linear", name) for name in TENSOR_TYPES]
    return [role for role in roles if key in keys_of(role)]


@lru_cache(maxsize=4096)
def _literal_start(pattern: str) -> str:
    """What every name that the pattern fits begins with; all of it for one without wildcards."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0]


def covers(wide: str, narrow: str) -> bool:
    """Whether ``wide`` certainly fits every name that ``narrow`` fits. What cannot be told is not
    covered."""
    if wide == narrow or not wide.strip("*"):
        return True
    start = _literal_start(wide)
    if not narrow.startswith(start):
        return False
    if start == wide:
        return narrow[len(start)] == "."
    # Only a * of ``wide`` can take in a * or a ? of ``narrow``, as if these were letters. Brackets
    # are not looked into.
    return not set(wide) & set("?[]") and not set(narrow) & set("[]") and fits(narrow, wide)


@dataclass(frozen=True)
class Entry:
    """One key of a rule, or the default: where the key stands, and what serves."""

    key: str
    place: Place
    expression: Expression


@dataclass(frozen=True)
class Rule:
    """One rule: patterns of layers, and what serves them by key."""

    patterns: tuple[str, ...]
    entries: Mapping[str, Entry]
    place: Place
    #: Where each pattern stands.
    pattern_places: tuple[Place, ...]

    def entries_for(self, role: QuantizerRole) -> Iterator[Entry]:
        """What it has for a role, the one that counts most first."""
        return (self.entries[key] for key in keys_of(role) if key in self.entries)

    def server(self, role: QuantizerRole) -> Entry | None:
        """The first entry that certainly gives something for a role; None where nothing does."""
        return next((entry for entry in self.entries_for(role) if entry.expression.total), None)

    def described(self) -> RecipeRule:
        """For listings."""
        return RecipeRule(", ".join(self.patterns), self.place.short)


class _Taken:
    """Patterns whose layers are taken, for one role, each with the number of the first rule that
    has it."""

    def __init__(self) -> None:
        self._all: dict[str, int] = {}
        # To compare every pattern with all of these would take time that grows with the square of
        # their number.
        self._wild: list[str] = []

    def add(self, patterns: Sequence[str], number: int) -> None:
        """Take the layers of a rule."""
        for pattern in patterns:
            if pattern not in self._all:
                self._all[pattern] = number
                if _literal_start(pattern) != pattern and len(self._wild) < _COMPARED:
                    self._wild.append(pattern)

    def taker(self, pattern: str) -> int | None:
        """The number of the first rule that takes all layers of a pattern, as far as that can be
        told."""
        modules = [pattern[:at] for at, character in enumerate(pattern) if character == "."]
        # A module's name takes what is in it; patterns with wildcards are compared.
        found = [name for name in modules if name in self._all and _literal_start(name) == name]
        found += [pattern] if pattern in self._all else []
        found += [wide for wide in self._wild if covers(wide, pattern)]
        return min((self._all[name] for name in found), default=None)


@dataclass(frozen=True)
class Rules:
    """All rules of a file, in their order."""

    source: Source
    rules: Sequence[Rule]
    default: Entry | None

    def chosen(self, role: QuantizerRole) -> tuple[Rule | None, Entry, Served]:
        """The rule and the entry that serve a role, and what the entry gives; an OptionError where
        nothing does."""
        last: Entry | None = None
        for rule, entry in self._asked(role):
            served = entry.expression.serve(role)
            if served is not None:
                return rule, entry, served
            last = entry
        what = f"nothing serves {role.tensor_type!r} of layer {role.name!r}"
        place, remedy = Place(""), "add a default"
        if last is not None:
            place, remedy = (
                last.place,
                "use a default that is no factory, or one that gives a quantizer",
            )
        raise self.source.error(
            place, what, expected="a default that serves every role", remedy=remedy
        )

    def _asked(self, role: QuantizerRole) -> Iterator[tuple[Rule | None, Entry]]:
        for rule in self.rules:
            if any(fits(role.name, pattern) for pattern in rule.patterns):
                yield from ((rule, entry) for entry in rule.entries_for(role))
        if self.default is not None:
            yield None, self.default

    def check(self) -> None:
        """Refuse a rule that is never asked, and roles that nothing serves."""
        earlier = {name: _Taken() for name in TENSOR_TYPES}
        for number, rule in enumerate(self.rules):
            for entry in rule.entries.values():
                self._check_entry(rule, entry, earlier)
            for name, taken in earlier.items():
                if rule.server(QuantizerRole("linear", name)) is not None:
                    taken.add(rule.patterns, number)
        everywhere = [
            rule for rule in self.rules if any(not pattern.strip("*") for pattern in rule.patterns)
        ]
        left = [
            n
            for n in OF_LINEAR
            if not any(rule.server(QuantizerRole("linear", n)) for rule in everywhere)
        ]
        if left and self.default is None:
            raise self.source.error(
                Place(""),
                f"there is no default, and nothing serves {', '.join(left)} of layers that no "
                f"rule names",
                expected="the key default",
                remedy="add one; identity keeps high precision",
            )

    def check_layers(self, names: Sequence[str]) -> None:
        """Refuse a pattern that fits none of the names of a model's layers, in this file or in one
        that it names."""
        modules = modules_of(names)
        for rule in self.rules:
            for pattern, place in zip(rule.patterns, rule.pattern_places, strict=True):
                if not fits_some(pattern, modules):
                    raise self.source.error(
                        place,
                        f"pattern {shown(pattern)} matches no layer of the model",
                        expected=suggestion(
                            pattern,
                            names,
                            "the name of a linear layer, or of a module that it is in",
                        ),
                        remedy="names are those of model.named_modules(); * matches any characters",
                    )
        entries = [entry for rule in self.rules for entry in rule.entries.values()]
        for entry in [*entries, *([] if self.default is None else [self.default])]:
            entry.expression.check_layers(names)

    def _check_entry(self, rule: Rule, entry: Entry, earlier: Mapping[str, _Taken]) -> None:
        """See that something is left for an entry: by other keys of its rule, and by earlier
        rules."""
        own = [role for role in roles_of(entry.key) if not _is_served_before(rule, entry, role)]
        if not own:
            raise self.source.error(
                entry.place,
                f"{entry.key!r} never serves: other keys of the rule take all its roles",
                expected="a role that is left",
                remedy="take one of the keys out",
            )
        takers: set[int] = set()
        for role in own:
            for pattern in rule.patterns:
                taker = earlier[role.tensor_type].taker(pattern)
                if taker is None:
                    return
                takers.add(taker)
        places = " and ".join(
            dict.fromkeys(self.rules[number].place.short for number in sorted(takers))
        )
        raise self.source.error(
            entry.place,
            f"{entry.key!r} never serves: what begins in {places} takes these layers and roles "
            f"before",
            expected="rules for few layers before those for many",
            remedy="move this rule up, or take it out",
        )


def _is_served_before(rule: Rule, entry: Entry, role: QuantizerRole) -> bool:
    """Whether another key of the rule serves the role before ``entry`` is asked."""
    keys = keys_of(role)
    server = rule.server(role)
    return server is not None and keys.index(server.key) < keys.index(entry.key)
