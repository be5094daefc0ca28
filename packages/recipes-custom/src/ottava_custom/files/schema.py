"""From what a file says to rules: every key and value is checked, and what is wrong is told with
its place."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from ottava.errors import OptionError
from ottava_custom.files.expressions import Expression, Hybrid
from ottava_custom.files.lookup import Lookup
from ottava_custom.files.nodes import Node, shown
from ottava_custom.files.rules import SERVING, Entry, Rule, Rules, roles_of
from ottava_custom.files.source import Source

_ROOT = ("default", "layers")
_RULE = ("match", *SERVING)
_EXPRESSION = (
    "the name of a recipe, identity, or a mapping with recipe, factory, or rowwise and columnwise"
)
_PATTERN = "a pattern of layer names"
_PATTERNS = "a pattern, or a list of patterns"
_USAGES = ("rowwise", "columnwise")
# Characters of the longest pattern.
_MAX_PATTERN = 1000


class Schema:
    """Reads the nodes of a file.

    What is not as it should be is an OptionError; a recipe or a factory that cannot be had, a
    RecipeNotFoundError or a PluginError. All name the place.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._error = source, source.error
        self._lookup = Lookup(source)
        # What tells the kind of a mapping that is an expression, and what reads it; the first key
        # that is there.
        self._mappings: dict[str, Callable[[Node], Expression]] = {
            "recipe": self._recipe,
            "factory": self._factory,
            "rowwise": self._hybrid,
            "columnwise": self._hybrid,
        }

    def rules(self, root: Node) -> Rules:
        """The rules of a file."""
        self._check_keys(root, "a file", _ROOT)
        default = self._entry(root, "default") if "default" in root.value else None
        rules = [self._rule(node) for node in self._layers(root)] if "layers" in root.value else []
        found = Rules(self._source, rules, default)
        found.check()
        for entry in [
            *(entry for rule in rules for entry in rule.entries.values()),
            *([default] if default else []),
        ]:
            made = entry.expression
            # A hybrid is made now where its sides can be, to be told what will not do.
            if isinstance(made, Hybrid) and made.rowwise.total and made.columnwise.total:
                for role in roles_of("all" if entry is default else entry.key):
                    made.serve(role)
        return found

    def _layers(self, root: Node) -> list[Node]:
        node: Node = root.value["layers"]
        if isinstance(node.value, list) and node.value:
            return node.value
        empty = node.value is None or node.value == []
        what, remedy = (
            ("layers has no rules", "take the key out") if empty else (f"layers is {node}", "")
        )
        raise self._error(root.keys["layers"], what, expected="a list of rules", remedy=remedy)

    def _rule(self, node: Node) -> Rule:
        self._check_keys(node, "a rule", _RULE)
        if "match" not in node.value:
            remedy = 'match: "*" is all layers'
            raise self._error(node.place, "the rule has no match", expected=_PATTERN, remedy=remedy)
        match: Node = node.value["match"]
        given = match.value if isinstance(match.value, list) else [match]
        if not given:
            raise self._error(match.place, "match is an empty list", expected=_PATTERNS)
        patterns = tuple(self._pattern(pattern) for pattern in given)
        entries = {key: self._entry(node, key) for key in node.value if key != "match"}
        if not entries:
            raise self._error(
                node.place, "the rule serves no role", expected=f"one of {', '.join(SERVING)}"
            )
        return Rule(patterns, entries, node.place, tuple(pattern.place for pattern in given))

    def _pattern(self, node: Node) -> str:
        pattern = node.value
        if not isinstance(pattern, str):
            remedy = "" if isinstance(pattern, (dict, list, type(None))) else "put it in quotes"
            raise self._error(node.place, f"match is {node}", expected=_PATTERNS, remedy=remedy)
        if not pattern:
            raise self._error(
                node.place, "match is empty", expected=_PATTERN, remedy='"*" is all layers'
            )
        if len(pattern) > _MAX_PATTERN:
            what = f"match has {len(pattern)} characters"
            raise self._error(node.place, what, expected=f"a pattern of at most {_MAX_PATTERN}")
        return pattern

    def _entry(self, parent: Node, key: str) -> Entry:
        return Entry(key, parent.keys[key], self._expression(parent.value[key]))

    def _expression(self, node: Node) -> Expression:
        if isinstance(node.value, str):
            return self._lookup.named(node.place, node.value)
        if not isinstance(node.value, dict) or not node.value:
            what = "this is an empty mapping" if node.value == {} else f"this is {node}"
            raise self._error(node.place, what, expected=_EXPRESSION)
        for key, read in self._mappings.items():
            if key in node.value:
                return read(node)
        key = next(iter(node.value))
        remedy = (
            'roles are told apart in a rule; one with match "*" is for all layers'
            if key in SERVING
            else ""
        )
        raise self._unknown(node, key, "what serves a role", self._mappings, remedy)

    def _name(self, node: Node, key: str) -> Node:
        """The value of a key that has a name."""
        value: Node = node.value[key]
        if not isinstance(value.value, str):
            raise self._error(value.place, f"{key} is {value}", expected="a name")
        return value

    def _recipe(self, node: Node) -> Expression:
        options = {key: value for key, value in node.value.items() if key != "recipe"}
        return self._lookup.recipe(self._name(node, "recipe"), options, node.keys)

    def _factory(self, node: Node) -> Expression:
        self._check_keys(node, "a factory", ("factory",))
        name = self._name(node, "factory")
        return self._lookup.factory(name.place, name.value)

    def _hybrid(self, node: Node) -> Expression:
        self._check_keys(node, "a hybrid", _USAGES)
        for usage in _USAGES:
            if usage not in node.value:
                remedy = f"{usage}: identity keeps high precision"
                what = f"{usage} is missing"
                raise self._error(
                    node.place, what, expected="rowwise and columnwise", remedy=remedy
                )
        return Hybrid(
            self._source, node.place, *(self._expression(node.value[usage]) for usage in _USAGES)
        )

    def _check_keys(self, node: Node, owner: str, known: Iterable[str]) -> None:
        """Refuse what is no mapping, and keys that mean nothing."""
        if not isinstance(node.value, dict):
            raise self._error(
                node.place, f"{owner} is {node}", expected=f"a mapping with {', '.join(known)}"
            )
        for key in node.value:
            if key not in known:
                raise self._unknown(node, key, owner, known)

    def _unknown(
        self, node: Node, key: str, owner: str, known: Iterable[str], remedy: str = ""
    ) -> OptionError:
        near = difflib.get_close_matches(key[:100], list(known), n=1)
        remedy = remedy or (f"use {near[0]!r}" if near else "")
        what = f"{owner} has no key {shown(key)}"
        return self._error(
            node.keys[key], what, expected=f"one of {', '.join(known)}", remedy=remedy
        )
