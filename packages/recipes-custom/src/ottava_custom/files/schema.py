"""From what a file says to rules: every key and value is checked, and what is wrong is told with its place."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from ottava.errors import OptionError
from ottava.recipes.role import QuantizerRole
from ottava_custom.files.expressions import Expression, Hybrid
from ottava_custom.files.lookup import Lookup
from ottava_custom.files.nodes import Node, shown
from ottava_custom.files.rules import ROLES, SERVING, Entry, Rule, Rules, keys_of
from ottava_custom.files.source import Source

_ROOT = ("default", "layers")
_RULE = ("match", *SERVING)
_EXPRESSION = "the name of a recipe, identity, or a mapping with recipe, factory, or rowwise and columnwise"
_USAGES = ("rowwise", "columnwise")


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
        self._mapping(root, "a file", _ROOT)
        default = self._entry(root, "default") if "default" in root.value else None
        rules = [self._rule(node) for node in self._layers(root)] if "layers" in root.value else []
        found = Rules(self._source, rules, default)
        found.check()
        for entry in [*(entry for rule in rules for entry in rule.entries.values()), *([default] if default else [])]:
            self._try(entry)
        return found

    # -- the parts --

    def _layers(self, root: Node) -> list[Node]:
        node: Node = root.value["layers"]
        if not isinstance(node.value, list) or not node.value:
            empty = node.value is None or node.value == []
            what = "layers has no rules" if empty else f"layers is {node}"
            remedy = "take the key out" if empty else ""
            raise self._source.error(root.keys["layers"], what, expected="a list of rules", remedy=remedy)
        return node.value

    def _rule(self, node: Node) -> Rule:
        self._mapping(node, "a rule", _RULE)
        if "match" not in node.value:
            raise self._source.error(
                node.index,
                "the rule has no match",
                expected="a pattern of layer names",
                remedy='match: "*" is all layers',
            )
        patterns = self._patterns(node.value["match"])
        entries = {key: self._entry(node, key) for key in node.value if key != "match"}
        if not entries:
            raise self._source.error(node.index, "the rule serves no role", expected=f"one of {', '.join(SERVING)}")
        return Rule(patterns, entries, node.index)

    def _patterns(self, match: Node) -> tuple[str, ...]:
        given = match.value if isinstance(match.value, list) else [match]
        if not given:
            raise self._source.error(match.index, "match is an empty list", expected="a pattern, or a list of patterns")
        for pattern in given:
            if not isinstance(pattern.value, str):
                remedy = "" if isinstance(pattern.value, (dict, list, type(None))) else "put it in quotes"
                raise self._source.error(
                    pattern.index, f"match is {pattern}", expected="a pattern, or a list of patterns", remedy=remedy
                )
            if not pattern.value:
                raise self._source.error(
                    pattern.index, "match is empty", expected="a pattern of layer names", remedy='"*" is all layers'
                )
        return tuple(pattern.value for pattern in given)

    def _entry(self, parent: Node, key: str) -> Entry:
        return Entry(key, parent.keys[key], self._expression(parent.value[key]))

    # -- expressions --

    def _expression(self, node: Node) -> Expression:
        if isinstance(node.value, str):
            return self._lookup.named(node.index, node.value)
        if not isinstance(node.value, dict):
            raise self._source.error(node.index, f"this is {node}", expected=_EXPRESSION)
        for key, read in self._mappings.items():
            if key in node.value:
                return read(node)
        known = tuple(self._mappings)
        if node.value:
            key = next(iter(node.value))
            remedy = 'roles are told apart in a rule; one with match "*" is for all layers' if key in SERVING else ""
            raise self._unknown(node, key, "what serves a role", known, remedy)
        raise self._source.error(node.index, "this is an empty mapping", expected=_EXPRESSION)

    def _text(self, node: Node, key: str) -> str:
        value: Node = node.value[key]
        if not isinstance(value.value, str):
            raise self._source.error(value.index, f"{key} is {value}", expected="a name")
        return value.value

    def _recipe(self, node: Node) -> Expression:
        name = self._text(node, "recipe")
        options = {key: value for key, value in node.value.items() if key != "recipe"}
        return self._lookup.recipe(node.value["recipe"].index, name, options, node.keys)

    def _factory(self, node: Node) -> Expression:
        self._mapping(node, "a factory", ("factory",))
        return self._lookup.factory(node.value["factory"].index, self._text(node, "factory"))

    def _hybrid(self, node: Node) -> Expression:
        self._mapping(node, "a hybrid", _USAGES)
        missing = [usage for usage in _USAGES if usage not in node.value]
        if missing:
            raise self._source.error(
                node.index,
                f"{missing[0]} is missing",
                expected="rowwise and columnwise",
                remedy=f"{missing[0]}: identity keeps high precision",
            )
        rowwise, columnwise = (self._part(node, usage) for usage in _USAGES)
        return Hybrid(self._source, node.index, rowwise, columnwise)

    def _part(self, node: Node, usage: str) -> Expression:
        part = self._expression(node.value[usage])
        part.check_part()
        return part

    def _try(self, entry: Entry) -> None:
        """Make what a hybrid makes, to be told now what will not do."""
        if not isinstance(entry.expression, Hybrid) or not entry.expression.certain:
            return
        for name in ROLES:
            role = QuantizerRole("linear", name)
            if entry.key == "default" or entry.key in keys_of(role):
                entry.expression.serve(role)

    # -- keys --

    def _mapping(self, node: Node, owner: str, known: Iterable[str]) -> None:
        """Refuse what is no mapping, and keys that mean nothing."""
        if not isinstance(node.value, dict):
            raise self._source.error(node.index, f"{owner} is {node}", expected=f"a mapping with {', '.join(known)}")
        for key in node.value:
            if key not in known:
                raise self._unknown(node, key, owner, tuple(known))

    def _unknown(self, node: Node, key: str, owner: str, known: tuple[str, ...], remedy: str = "") -> OptionError:
        near: list[Any] = difflib.get_close_matches(key[:100], known, n=1)
        return self._source.error(
            node.keys[key],
            f"{owner} has no key {shown(key)}",
            expected=f"one of {', '.join(known)}",
            remedy=remedy or (f"use {near[0]!r}" if near else ""),
        )
