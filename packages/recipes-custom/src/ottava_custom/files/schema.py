"""From what a file says to rules: every key and value is checked, and what is wrong is told with its place."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from ottava.errors import OptionError
from ottava.recipes.role import QuantizerRole
from ottava_custom.files.expressions import Expression, Hybrid
from ottava_custom.files.lookup import Lookup
from ottava_custom.files.nodes import Node, shown
from ottava_custom.files.rules import ROLES, SERVING, Entry, Rule, Rules, keys_of
from ottava_custom.files.source import Place, Source

_ROOT = ("default", "layers")
_RULE = ("match", *SERVING)
_EXPRESSION = "the name of a recipe, identity, or a mapping with recipe, factory, or rowwise and columnwise"
_PATTERNS = "a pattern, or a list of patterns"
_USAGES = ("rowwise", "columnwise")
# Characters of the longest pattern.
_MAX_PATTERN = 1000


def rules_of(source: Source, root: Node) -> Rules:
    """The rules of a file.

    Raises:
        OptionError: a key, a value or an option is not what it should be; the message names the place.
        RecipeNotFoundError, PluginError: a recipe or a factory cannot be had; the same.
    """
    return _Schema(source).rules(root)


class _Schema:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._lookup = Lookup(source)
        #: What the keys of a mapping that is an expression may be, and what reads it; the first key that is there.
        self._mappings: dict[str, Callable[[Node], Expression]] = {
            "recipe": self._recipe,
            "factory": self._factory,
            "rowwise": self._hybrid,
            "columnwise": self._hybrid,
        }

    def rules(self, root: Node) -> Rules:
        self._check_keys(root, "a file", _ROOT)
        default = self._entry(root, "default") if "default" in root.value else None
        rules = [self._rule(node) for node in self._layers(root)] if "layers" in root.value else []
        found = Rules(self._source, rules, default)
        found.check()
        for entry in [*(entry for rule in rules for entry in rule.entries.values()), *([default] if default else [])]:
            self._try(entry)
        return found

    def _error(self, place: Place, what: str, expected: str, remedy: str = "") -> OptionError:
        return self._source.error(place, what, expected=expected, remedy=remedy)

    # -- rules --

    def _layers(self, root: Node) -> list[Node]:
        node: Node = root.value["layers"]
        if isinstance(node.value, list) and node.value:
            return node.value
        empty = node.value is None or node.value == []
        what = "layers has no rules" if empty else f"layers is {node}"
        raise self._error(root.keys["layers"], what, "a list of rules", "take the key out" if empty else "")

    def _rule(self, node: Node) -> Rule:
        self._check_keys(node, "a rule", _RULE)
        if "match" not in node.value:
            remedy = 'match: "*" is all layers'
            raise self._error(node.place, "the rule has no match", "a pattern of layer names", remedy)
        patterns = self._patterns(node.value["match"])
        entries = {key: self._entry(node, key) for key in node.value if key != "match"}
        if not entries:
            raise self._error(node.place, "the rule serves no role", f"one of {', '.join(SERVING)}")
        return Rule(patterns, entries, node.place)

    def _patterns(self, match: Node) -> tuple[str, ...]:
        given = match.value if isinstance(match.value, list) else [match]
        if not given:
            raise self._error(match.place, "match is an empty list", _PATTERNS)
        for pattern in given:
            if not isinstance(pattern.value, str):
                remedy = "" if isinstance(pattern.value, (dict, list, type(None))) else "put it in quotes"
                raise self._error(pattern.place, f"match is {pattern}", _PATTERNS, remedy)
            if not pattern.value:
                raise self._error(pattern.place, "match is empty", "a pattern of layer names", '"*" is all layers')
            if len(pattern.value) > _MAX_PATTERN:
                what = f"match has {len(pattern.value)} characters"
                raise self._error(pattern.place, what, f"a pattern of at most {_MAX_PATTERN}")
        return tuple(pattern.value for pattern in given)

    def _entry(self, parent: Node, key: str) -> Entry:
        return Entry(key, parent.keys[key], self._expression(parent.value[key]))

    # -- expressions --

    def _expression(self, node: Node) -> Expression:
        if isinstance(node.value, str):
            return self._lookup.named(node.place, node.value)
        if not isinstance(node.value, dict):
            raise self._error(node.place, f"this is {node}", _EXPRESSION)
        for key, read in self._mappings.items():
            if key in node.value:
                return read(node)
        if not node.value:
            raise self._error(node.place, "this is an empty mapping", _EXPRESSION)
        key = next(iter(node.value))
        remedy = 'roles are told apart in a rule; one with match "*" is for all layers' if key in SERVING else ""
        raise self._unknown(node, key, "what serves a role", tuple(self._mappings), remedy)

    def _text(self, node: Node, key: str) -> str:
        value: Node = node.value[key]
        if not isinstance(value.value, str):
            raise self._error(value.place, f"{key} is {value}", "a name")
        return value.value

    def _recipe(self, node: Node) -> Expression:
        name = self._text(node, "recipe")
        options = {key: value for key, value in node.value.items() if key != "recipe"}
        return self._lookup.recipe(node.value["recipe"].place, name, options, node.keys)

    def _factory(self, node: Node) -> Expression:
        self._check_keys(node, "a factory", ("factory",))
        return self._lookup.factory(node.value["factory"].place, self._text(node, "factory"))

    def _hybrid(self, node: Node) -> Expression:
        self._check_keys(node, "a hybrid", _USAGES)
        missing = next((usage for usage in _USAGES if usage not in node.value), None)
        if missing is not None:
            remedy = f"{missing}: identity keeps high precision"
            raise self._error(node.place, f"{missing} is missing", "rowwise and columnwise", remedy)
        rowwise, columnwise = (self._expression(node.value[usage]) for usage in _USAGES)
        for expression in (rowwise, columnwise):
            expression.check_direction()
        return Hybrid(self._source, node.place, rowwise, columnwise)

    def _try(self, entry: Entry) -> None:
        """Make what a hybrid makes, to be told now what will not do."""
        if isinstance(entry.expression, Hybrid) and entry.expression.certain:
            for role in (QuantizerRole("linear", name) for name in ROLES):
                if entry.key == "default" or entry.key in keys_of(role):
                    entry.expression.serve(role)

    # -- keys --

    def _check_keys(self, node: Node, owner: str, known: Iterable[str]) -> None:
        """Refuse what is no mapping, and keys that mean nothing."""
        if not isinstance(node.value, dict):
            raise self._error(node.place, f"{owner} is {node}", f"a mapping with {', '.join(known)}")
        for key in node.value:
            if key not in known:
                raise self._unknown(node, key, owner, tuple(known))

    def _unknown(self, node: Node, key: str, owner: str, known: tuple[str, ...], remedy: str = "") -> OptionError:
        near = difflib.get_close_matches(key[:100], known, n=1)
        remedy = remedy or (f"use {near[0]!r}" if near else "")
        return self._error(node.keys[key], f"{owner} has no key {shown(key)}", f"one of {', '.join(known)}", remedy)
