"""The schema of a recipe file: its keys, what may stand there, and the rules that they make.

Every mapping in a file is of one of the kinds in :data:`KEYS`, and is checked against it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ottava.errors import OptionError, RecipeNotFoundError
from ottava.recipes.base import Recipe, get_recipe
from ottava.recipes.registry import get_quantizer_factory, list_quantizer_factories, list_recipes
from ottava.recipes.spec import is_name
from ottava_custom.files.expressions import Expression, Hybrid, Identity, OfFactory, OfRecipe
from ottava_custom.files.rules import ROLES, SERVING, Entry, Rule, Rules
from ottava_custom.files.source import Node, Place


@dataclass(frozen=True)
class Key:
    """What may stand at a key.

    Attributes:
        kinds: the types of the value.
        expected: the same in words, for errors.
        required: whether the key has to be there.
        remedy: what to do where the key or its value is missing.
    """

    kinds: tuple[type, ...]
    expected: str
    required: bool = False
    remedy: str = ""


_SERVER = Key(
    (str, dict),
    "the name of a recipe, identity, or a mapping with recipe, factory, or rowwise and columnwise",
)
_SIDE = replace(_SERVER, required=True, remedy="identity keeps high precision")
_NAME = Key((str,), "a name", required=True)
_PATTERN = Key((str,), "a pattern of layer names, in quotes")
_MATCH = Key((str, list), f"{_PATTERN.expected}, or a list", True, 'match: "*" is all layers')

#: Kind of mapping -> the keys that it may have. The other keys of a recipe are its options.
KEYS = {
    "file": {
        "default": _SERVER,
        "layers": Key((list,), "a list of rules", remedy="take the key out if there are no rules"),
    },
    "rule": {"match": _MATCH, **dict.fromkeys(SERVING, _SERVER)},
    "recipe": {"recipe": _NAME},
    "factory": {"factory": _NAME},
    "hybrid": {"rowwise": _SIDE, "columnwise": _SIDE},
}


def _check(node: Node, kind: str) -> dict[str, Node]:
    """The values of a mapping, whose keys and values are checked against :data:`KEYS`."""
    keys = KEYS[kind]
    if not isinstance(node.value, dict):
        raise node.place.error(f"a {kind} is {node}", expected=f"a mapping with {', '.join(keys)}")
    for name in node.value:
        if name not in keys and kind != "recipe":
            raise _unknown(node.keys[name], f"a {kind}", name, keys)
    for name, key in keys.items():
        if name in node.value:
            _check_value(name, node.value[name], key)
        elif key.required:
            raise node.place.error(f"a {kind} has no {name}", key.expected, key.remedy)
    return node.value


def _check_value(name: str, node: Node, key: Key) -> None:
    if not node.value or not isinstance(node.value, key.kinds):
        raise node.place.error(f"{name} is {node}", key.expected, key.remedy)


def _unknown(
    place: Place, owner: str, name: str, keys: Iterable[str], remedy: str = ""
) -> OptionError:
    near = difflib.get_close_matches(name, keys, n=1)
    if near and not remedy:
        remedy = f"use {near[0]!r}"
    return place.error(f"{owner} has no key {name!r}", f"one of {', '.join(keys)}", remedy)


class Schema:
    """Makes the rules of one file of its values.

    Raises:
        OptionError: a key or a value is wrong.
        RecipeNotFoundError, PluginError: a recipe or a factory is not installed, or fails. All
            errors name the place.
    """

    def __init__(self) -> None:
        # Roles that equal recipes serve share the state of a layer, so that equal options have to
        # give one object: not every recipe compares by its options.
        self._recipes: dict[tuple[str, str], Recipe] = {}
        self._mappings: dict[str, Callable[[Node], Expression]] = {
            "recipe": self._recipe,
            "factory": self._factory,
            "rowwise": self._hybrid,
            "columnwise": self._hybrid,
        }

    def rules(self, root: Node) -> Rules:
        """The rules of a file."""
        values = _check(root, "file")
        nodes = _items(values["layers"]) if "layers" in values else []
        rules = [self._rule(number, node) for number, node in enumerate(nodes)]
        default = self._entry("default", root) if "default" in values else None
        for rule in rules:
            for entry in rule.entries.values():
                entry.expression.check_roles(rule.roles_of(entry))
        if default is not None:
            default.expression.check_roles(ROLES)
        result = Rules(Place(root.place.path), rules, default)
        result.check()
        return result

    def _rule(self, number: int, node: Node) -> Rule:
        values = _check(node, "rule")
        patterns: dict[str, Place] = {}
        for pattern in _items(values["match"]):
            _check_value("match", pattern, _PATTERN)
            patterns[str(pattern.value)] = pattern.place
        entries = {key: self._entry(key, node) for key in values if key != "match"}
        if not entries:
            raise node.place.error(
                "the rule serves no role", expected=f"one of {', '.join(SERVING)}"
            )
        return Rule(number, node.place, patterns, entries)

    def _entry(self, key: str, parent: Node) -> Entry:
        return Entry(key, parent.keys[key], self._expression(parent.mapping[key]))

    def _expression(self, node: Node) -> Expression:
        if isinstance(node.value, str):
            return self._of_name(node.place, node.value)
        for key, make in self._mappings.items():
            if key in node.mapping:
                return make(node)
        name = next(iter(node.mapping))
        remedy = ""
        if name in SERVING:
            remedy = 'roles are told apart in a rule; one with match "*" is for all layers'
        raise _unknown(node.keys[name], "what serves a role", name, self._mappings, remedy)

    def _of_name(self, place: Place, name: str) -> Expression:
        """What a bare name stands for: identity, a recipe, or else a factory."""
        if name == "identity":
            return Identity(place)
        _check_name(place, name, "identity, a recipe or a factory")
        try:
            with place.named_in_errors():
                return OfRecipe(place, self._get_recipe(name, {}), {})
        except RecipeNotFoundError as error:
            factories = [spec.name for spec in list_quantizer_factories()]
            if name in factories:
                return self._published(place, name)
            names = sorted({"identity", *(spec.name for spec in list_recipes()), *factories})
            near = difflib.get_close_matches(name, names, n=1)
            remedy = error.remedy
            if near:
                # A misspelled name must not become a command that installs whatever has that name.
                remedy = f"use {near[0]!r}, or install the package that has {name!r}"
            raise RecipeNotFoundError(
                f"{place}: no installed recipe or quantizer factory is named {name!r}",
                f"one of {', '.join(names)}",
                remedy,
            ) from error

    def _recipe(self, node: Node) -> Expression:
        values = _check(node, "recipe")
        place, name = values["recipe"].place, str(values["recipe"].value)
        _check_name(place, name, "the name of a recipe")
        options = {option: value.plain() for option, value in values.items() if option != "recipe"}
        try:
            recipe = self._get_recipe(name, options)
        except Exception as error:
            option = _option_named_in(error, options)
            with (place if option is None else node.keys[option]).named_in_errors():
                raise
        return OfRecipe(place, recipe, options)

    def _get_recipe(self, name: str, options: dict[str, object]) -> Recipe:
        if "name" in options:
            # get_recipe itself has an argument of this name.
            raise OptionError(f"recipe {name!r} has no option 'name'")
        key = name, repr(sorted(options.items()))
        if key not in self._recipes:
            self._recipes[key] = get_recipe(name, **options)
        return self._recipes[key]

    def _factory(self, node: Node) -> Expression:
        name = _check(node, "factory")["factory"]
        return self._published(name.place, str(name.value))

    def _published(self, place: Place, name: str) -> Expression:
        _check_name(place, name, "the name of a factory")
        with place.named_in_errors():
            return OfFactory(place, name, get_quantizer_factory(name))

    def _hybrid(self, node: Node) -> Expression:
        values = _check(node, "hybrid")
        rowwise = self._expression(values["rowwise"])
        columnwise = self._expression(values["columnwise"])
        for side in (rowwise, columnwise):
            if isinstance(side, Hybrid):
                raise side.place.error(
                    "a hybrid inside a hybrid", "one quantizer for one direction"
                )
        return Hybrid(node.place, rowwise, columnwise)


def _items(node: Node) -> list[Node]:
    """The items of a list, or a value by itself."""
    return node.value if isinstance(node.value, list) else [node]


def _check_name(place: Place, name: str, expected: str) -> None:
    if not is_name(name):
        raise place.error(f"{name!r} is no name", expected)


def _option_named_in(error: Exception, options: Mapping[str, object]) -> str | None:
    """The option that an error of a recipe about its options names, or whose value it names."""
    if not isinstance(error, OptionError):
        return None
    for option, value in options.items():
        # The error about a file inside a file names the file, and not the option.
        names_value = isinstance(value, str) and len(value) > 1 and value in error.what
        if names_value or re.search(rf"\b{re.escape(option)}\b", error.what):
            return option
    return None
