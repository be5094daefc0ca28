"""Rules: which expression serves which roles of which layers, and in which order they are asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ottava.errors import OptionError
from ottava.recipes.explanation import RecipeRule
from ottava.recipes.role import QuantizerRole
from ottava_custom.files.expressions import Expression
from ottava_custom.files.source import Source
from ottava_custom.patterns import matches

#: The roles that a rule can name.
ROLES = ("input", "weight", "output", "grad_output", "grad_input")
#: The keys of a rule that say what serves, and in words for which roles.
SERVING = ("all", "forward", "backward", *ROLES)
# What layers ask for.
_ASKED = ("input", "weight", "grad_output")


def keys_of(role: QuantizerRole) -> tuple[str, ...]:
    """The keys of a rule that speak of a role, the one that counts most first."""
    direction = "backward" if role.is_gradient else "forward"
    return (*([role.tensor_type] if role.tensor_type in ROLES else []), direction, "all")


@lru_cache(maxsize=4096)
def _literal_start(pattern: str) -> str:
    """What every name that the pattern fits begins with; all of it for one without wildcards."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0]


def covers(wide: str, narrow: str) -> bool:
    """Whether ``wide`` certainly fits every name that ``narrow`` fits. What cannot be told is not covered."""
    if wide == narrow or not wide.strip("*"):
        return True
    start = _literal_start(wide)
    if not narrow.startswith(start):
        return False
    if start == wide:
        return narrow[len(start)] == "."
    # Only a * of ``wide`` can take in a * or a ? of ``narrow``, as if these were letters. Brackets are not looked into.
    return not set(wide) & set("?[]") and not set(narrow) & set("[]") and matches(narrow, wide)


@dataclass(frozen=True)
class Entry:
    """One key of a rule, or the default.

    Attributes:
        key: the key.
        index: where it stands.
        expression: what serves.
    """

    key: str
    index: int
    expression: Expression


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        patterns: of layers.
        entries: what serves, by key.
        index: where the rule begins.
    """

    patterns: tuple[str, ...]
    entries: Mapping[str, Entry]
    index: int

    def matches(self, name: str) -> bool:
        """Whether it speaks of a layer."""
        return any(matches(name, pattern) for pattern in self.patterns)

    def entry_for(self, role: QuantizerRole) -> Iterator[Entry]:
        """What it has for a role, the one that counts most first."""
        return (self.entries[key] for key in keys_of(role) if key in self.entries)

    def serves(self, role: QuantizerRole) -> bool:
        """Whether it gives something for a role, whatever the layer."""
        return any(entry.expression.total for entry in self.entry_for(role))

    def described(self, source: Source) -> RecipeRule:
        """For listings."""
        return RecipeRule(", ".join(self.patterns), source.place(self.index).line)


@dataclass(frozen=True)
class Rules:
    """All rules of a file, in their order."""

    source: Source
    rules: Sequence[Rule]
    default: Entry | None

    def asked(self, role: QuantizerRole) -> Iterator[tuple[Rule | None, Entry]]:
        """What may serve a role, in the order in which it is asked."""
        for rule in self.rules:
            if rule.matches(role.name):
                yield from ((rule, entry) for entry in rule.entry_for(role))
        if self.default is not None:
            yield None, self.default

    def check(self) -> None:
        """Refuse a rule that is never asked, and roles that nothing serves.

        Raises:
            OptionError: there is one.
        """
        for number, rule in enumerate(self.rules):
            for entry in rule.entries.values():
                self._check_entry(rule, entry, self.rules[:number])
        if self.default is None:
            self._check_complete()

    def _check_entry(self, rule: Rule, entry: Entry, earlier: Sequence[Rule]) -> None:
        """See that something is left for an entry."""
        roles = [QuantizerRole("linear", name) for name in ROLES]
        spoken = [role for role in roles if entry.key in keys_of(role)]
        own = [role for role in spoken if not _is_served_before(rule, entry, role)]
        if not own:
            raise self.source.error(
                entry.index,
                f"{entry.key!r} never serves: other keys of the rule take all its roles",
                expected="a role that is left",
                remedy="take one of the keys out",
            )
        takers: set[int] = set()
        for role in own:
            for pattern in rule.patterns:
                taker = next(
                    (e for e in earlier if any(covers(p, pattern) for p in e.patterns) and e.serves(role)), None
                )
                if taker is None:
                    return
                takers.add(self.source.place(taker.index).line)
        lines = " and ".join(f"line {line}" for line in sorted(takers))
        raise self.source.error(
            entry.index,
            f"{entry.key!r} never serves: what begins in {lines} takes these layers and roles before",
            expected="rules for few layers before those for many",
            remedy="move this rule up, or take it out",
        )

    def _check_complete(self) -> None:
        everywhere = [rule for rule in self.rules if any(not pattern.strip("*") for pattern in rule.patterns)]
        left = [n for n in _ASKED if not any(rule.serves(QuantizerRole("linear", n)) for rule in everywhere)]
        if left:
            raise self.source.error(
                0,
                f"there is no default, and nothing serves {', '.join(left)} of layers that no rule names",
                expected="the key default",
                remedy="add one; identity keeps high precision",
            )


def _is_served_before(rule: Rule, entry: Entry, role: QuantizerRole) -> bool:
    """Whether another key of the rule serves the role before ``entry`` is asked."""
    for other in rule.entry_for(role):
        if other is entry:
            return False
        if other.expression.total:
            return True
    return False


def nothing_serves(source: Source, role: QuantizerRole, last: Entry | None) -> OptionError:
    """The error about a role that nobody serves."""
    return source.error(
        0 if last is None else last.index,
        f"nothing serves {role.tensor_type!r} of layer {role.name!r}",
        expected="a default that serves every role",
        remedy="add a default" if last is None else "use a default that is no factory, or one that gives a quantizer",
    )
