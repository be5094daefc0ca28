"""The rules of a recipe file: which expression serves which role of which layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ottava.recipes.patterns import fits
from ottava.recipes.role import OF_LINEAR, QuantizerRole, RecipeRule
from ottava_custom.factories import TENSOR_TYPES, unmatched
from ottava_custom.files.expressions import Expression, Served
from ottava_custom.files.source import Place

#: The keys of a rule that say what serves, and in words for which roles.
SERVING = ("all", "forward", "backward", *TENSOR_TYPES)
#: The roles that these keys speak of, of a layer without a name.
ROLES = tuple(QuantizerRole("linear", tensor_type) for tensor_type in TENSOR_TYPES)


def covers(wide: str, narrow: str) -> bool:
    """Whether ``wide`` certainly fits every name that ``narrow`` fits; False where patterns cannot
    tell."""
    if wide == narrow or not wide.strip("*"):
        return True
    # A wildcard of ``narrow`` is compared as if it were a letter, which only a * of ``wide`` takes.
    return not set(wide) & set("?[]") and not set(narrow) & set("[]") and fits(narrow, wide)


@dataclass(frozen=True)
class Entry:
    """A key of a rule, or the default: where the key stands, and what serves."""

    key: str
    place: Place
    expression: Expression


@dataclass(frozen=True)
class Rule:
    """Patterns of layers with their places, and what serves these layers, by key."""

    number: int
    place: Place
    patterns: Mapping[str, Place]
    entries: Mapping[str, Entry]

    def entries_for(self, role: QuantizerRole) -> Iterator[Entry]:
        """The entries that are asked for a role: that of the role first, that of all roles last,
        up to one that serves it in any case."""
        direction = "backward" if role.is_gradient else "forward"
        for key in (role.tensor_type, direction, "all"):
            if key in self.entries:
                yield self.entries[key]
                if self.entries[key].expression.total:
                    return

    def serves(self, role: QuantizerRole) -> bool:
        """Whether no later rule is asked for the role of a layer that a pattern fits."""
        return any(entry.expression.total for entry in self.entries_for(role))

    def roles_of(self, entry: Entry) -> list[QuantizerRole]:
        """The roles for which the entry is asked."""
        return [role for role in ROLES if entry in self.entries_for(role)]

    def listed(self) -> RecipeRule:
        """The rule for listings."""
        return RecipeRule(", ".join(self.patterns), self.place.short)


class _Earlier:
    """The rules before one, by their patterns.

    Names are looked up and only patterns with wildcards are compared, because a file may have a
    rule for each of a thousand layers.
    """

    def __init__(self) -> None:
        self._names: defaultdict[str, list[Rule]] = defaultdict(list)
        self._wildcards: list[tuple[str, Rule]] = []

    def add(self, rule: Rule) -> None:
        for pattern in rule.patterns:
            self._names[pattern].append(rule)
            if set(pattern) & set("*?["):
                self._wildcards.append((pattern, rule))

    def covering(self, pattern: str) -> list[Rule]:
        """The rules that have all layers that a pattern fits, in the order of the file."""
        ends = [at for at, character in enumerate(pattern) if character == "."]
        modules = [pattern[:end] for end in (*ends, len(pattern))]
        rules = [rule for name in modules for rule in self._names.get(name, ())]
        rules += [rule for wide, rule in self._wildcards if covers(wide, pattern)]
        return sorted(rules, key=lambda rule: rule.number)


@dataclass(frozen=True)
class Rules:
    """All rules of a file, in their order, and the default."""

    file: Place
    rules: Sequence[Rule]
    default: Entry | None

    def entries(self) -> list[Entry]:
        """The entries of all rules, and the default."""
        entries = [entry for rule in self.rules for entry in rule.entries.values()]
        if self.default is not None:
            entries.append(self.default)
        return entries

    def resolve(self, role: QuantizerRole) -> tuple[Rule | None, Entry, Served]:
        """The rule (None for the default) and the entry that serve a role, and what the entry
        gives.

        Raises:
            OptionError: nothing serves the role.
        """
        place, remedy = self.file, "add a default"
        for rule, entry in self._candidates(role):
            served = entry.expression.serve(role)
            if served is not None:
                return rule, entry, served
            place, remedy = entry.place, "use a default that is a recipe or identity"
        raise place.error(
            f"nothing serves {role.tensor_type!r} of layer {role.name!r}",
            expected="a default that serves every role",
            remedy=remedy,
        )

    def _candidates(self, role: QuantizerRole) -> Iterator[tuple[Rule | None, Entry]]:
        for rule in self.rules:
            if any(fits(role.name, pattern) for pattern in rule.patterns):
                for entry in rule.entries_for(role):
                    yield rule, entry
        if self.default is not None:
            yield None, self.default

    def check(self) -> None:
        """Raises OptionError for an entry that never serves, and for roles that nothing serves."""
        earlier = _Earlier()
        for rule in self.rules:
            covering = [earlier.covering(pattern) for pattern in rule.patterns]
            for entry in rule.entries.values():
                _check_entry(rule, entry, covering)
            earlier.add(rule)
        if self.default is None:
            self._check_every_role_is_served()

    def _check_every_role_is_served(self) -> None:
        for_all = [rule for rule in self.rules if any(not p.strip("*") for p in rule.patterns)]
        roles = [QuantizerRole("linear", tensor_type) for tensor_type in OF_LINEAR]
        unserved = [r.tensor_type for r in roles if not any(rule.serves(r) for rule in for_all)]
        if unserved:
            raise self.file.error(
                f"nothing serves {', '.join(unserved)} of layers that no rule names",
                expected="the key default",
                remedy="add a default; identity keeps high precision",
            )

    def check_layers(self, names: Sequence[str]) -> None:
        """Raises OptionError for a pattern that fits none of the layers of a model, in this file or
        in a recipe that it names."""
        places: dict[str, Place] = {}
        for rule in self.rules:
            for pattern, place in rule.patterns.items():
                places.setdefault(pattern, place)
        for pattern, expected in unmatched(places, names):
            raise places[pattern].error(
                f"pattern {pattern!r} matches no layer of the model",
                expected,
                remedy="names are those of model.named_modules(); * matches any characters",
            )
        for entry in self.entries():
            entry.expression.check_layers(names)


def _check_entry(rule: Rule, entry: Entry, covering: Sequence[Sequence[Rule]]) -> None:
    """Raises OptionError for an entry that never serves.

    Args:
        covering: for each pattern of the rule, the earlier rules that have all its layers.
    """
    roles = rule.roles_of(entry)
    if not roles:
        raise entry.place.error(
            f"{entry.key!r} never serves, because other keys of the rule take all its roles",
            expected="a role that is left",
            remedy="take one of the keys out",
        )
    servers: dict[int, str] = {}
    for role in roles:
        for rules in covering:
            server = next((earlier for earlier in rules if earlier.serves(role)), None)
            if server is None:
                return
            servers[server.number] = server.place.short
    places = " and ".join(servers[number] for number in sorted(servers))
    raise entry.place.error(
        f"{entry.key!r} never serves, because {places} takes these layers and roles before",
        expected="rules for few layers before those for many",
        remedy="move this rule up, or take it out",
    )
