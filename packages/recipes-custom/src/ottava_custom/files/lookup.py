"""Recipes and quantizer factories by the names that a file has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from ottava.errors import OptionError, RecipeNotFoundError
from ottava.recipes.base import Recipe
from ottava.recipes.options import OptionDefaults
from ottava.recipes.registry import get_quantizer_factory, get_recipe, list_quantizer_factories, list_recipes
from ottava.recipes.spec import is_name
from ottava_custom.files.expressions import IDENTITY, Expression, Identity, OfFactory, OfRecipe
from ottava_custom.files.nodes import Node, shown
from ottava_custom.files.source import Source

#: Characters of the longest name that is looked for.
MAX_NAME = 100


class Lookup:
    """Finds what the names in a file stand for; equal texts give the same recipe object."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._recipes: dict[tuple[str, str], Recipe] = {}

    def named(self, index: int, name: str) -> Expression:
        """What a bare name stands for: ``identity``, a recipe, or else a factory.

        Raises:
            OptionError: it can be no name, or the recipe needs options.
            RecipeNotFoundError, PluginError: nothing of that name can be had.
        """
        if name == IDENTITY:
            return Identity(self._source, index)
        self._check(index, name, f"{IDENTITY}, a recipe or a factory")
        factories = [spec.name for spec in list_quantizer_factories()]
        try:
            return self.recipe(index, name, {}, {})
        except RecipeNotFoundError as missing:
            if name in factories:
                return self.factory(index, name)
            known = sorted({IDENTITY, *(spec.name for spec in list_recipes()), *factories})
            near = difflib.get_close_matches(name, known, n=3)
            # The name may be misspelled: it must not become a command that installs whatever has that name.
            remedy = f"use {near[0]!r}, or install the package that has {name!r}" if near else missing.remedy
            raise RecipeNotFoundError(
                f"{self._source.where(index)}: no installed recipe or quantizer factory is named {name!r}",
                expected=f"one of {', '.join(known)}",
                remedy=remedy,
            ) from missing

    def factory(self, index: int, name: str) -> Expression:
        """A published quantizer factory.

        Raises:
            RecipeNotFoundError, PluginError: it cannot be had.
        """
        self._check(index, name, "the name of a factory")
        with self._source.at(index):
            return OfFactory(self._source, index, name, get_quantizer_factory(name))

    def recipe(self, index: int, name: str, options: Mapping[str, Node], keys: Mapping[str, int]) -> Expression:
        """A recipe with options.

        Raises:
            OptionError: it does not take an option, or not this value.
            RecipeNotFoundError, PluginError: it cannot be had.
        """
        self._check(index, name, "the name of a recipe")
        taken = self._adapted(name, options)
        try:
            recipe = self._built(name, taken)
        except OptionError as error:
            # Where the recipe's own words name an option, or what it is, that is the place.
            said = next((key for key, node in options.items() if _is_named(key, node, error.what)), None)
            with self._source.at(index if said is None else keys[said]):
                raise
        except Exception:
            with self._source.at(index):
                raise
        return OfRecipe(self._source, index, recipe, tuple(taken.items()))

    def _check(self, index: int, name: str, expected: str) -> None:
        if not is_name(name) or len(name) > MAX_NAME:
            raise self._source.error(index, f"{shown(name)} is no name", expected=expected)

    def _adapted(self, name: str, options: Mapping[str, Node]) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        defaults = OptionDefaults(name) if options else None
        for key, node in options.items():
            with self._source.at(node.index):
                taken[key] = node.plain() if defaults is None else defaults.adapt(key, node.plain())
        return taken

    def _built(self, name: str, options: dict[str, Any]) -> Recipe:
        if "name" in options:  # the one word that the registry keeps for itself
            raise OptionError(f"recipe {name!r} has no option 'name'")
        key = name, repr(sorted(options.items(), key=lambda item: item[0]))
        if key not in self._recipes:
            self._recipes[key] = get_recipe(name, **options)
        return self._recipes[key]


def _is_named(key: str, node: Node, what: str) -> bool:
    known = isinstance(node.value, str) and len(node.value) > 1 and node.value in what
    return known or re.search(rf"\b{re.escape(key)}\b", what) is not None
