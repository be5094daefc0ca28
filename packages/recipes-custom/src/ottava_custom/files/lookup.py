"""Recipes and quantizer factories by the names that a file has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from ottava.errors import OptionError, RecipeNotFoundError
from ottava.recipes.base import Recipe, get_recipe
from ottava.recipes.registry import get_quantizer_factory, list_quantizer_factories, list_recipes
from ottava.recipes.spec import is_name
from ottava_custom.files.expressions import IDENTITY, Expression, Identity, OfFactory, OfRecipe
from ottava_custom.files.nodes import Node, shown
from ottava_custom.files.source import Place, Source

#: Characters of the longest name that is looked for.
MAX_NAME = 100


class Lookup:
    """Finds what the names in a file stand for; equal texts give the same recipe object. Errors
    name the place."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._recipes: dict[tuple[str, str], Recipe] = {}

    def named(self, place: Place, name: str) -> Expression:
        """What a bare name stands for: ``identity``, a recipe, or else a factory."""
        if name == IDENTITY:
            return Identity(self._source, place)
        self._check(place, name, f"{IDENTITY}, a recipe or a factory")
        try:
            return self.recipe(Node(name, place), {}, {})
        except RecipeNotFoundError as missing:
            factories = [spec.name for spec in list_quantizer_factories()]
            if name in factories:
                return self.factory(place, name)
            known = sorted({IDENTITY, *(spec.name for spec in list_recipes()), *factories})
            near = difflib.get_close_matches(name, known, n=3)
            # The name may be misspelled: it must not become a command that installs whatever has
            # that name.
            remedy = (
                f"use {near[0]!r}, or install the package that has {name!r}"
                if near
                else missing.remedy
            )
            what = (
                f"{self._source.where(place)}: no installed recipe or quantizer factory is "
                f"named {name!r}"
            )
            raise RecipeNotFoundError(
                what, expected=f"one of {', '.join(known)}", remedy=remedy
            ) from missing

    def factory(self, place: Place, name: str) -> Expression:
        """A published quantizer factory."""
        self._check(place, name, "the name of a factory")
        with self._source.at(place):
            return OfFactory(self._source, place, name, get_quantizer_factory(name))

    def recipe(
        self, named: Node, options: Mapping[str, Node], keys: Mapping[str, Place]
    ) -> Expression:
        """A recipe with options, whose keys have these places."""
        name, place = named.value, named.place
        self._check(place, name, "the name of a recipe")
        taken: dict[str, Any] = {}
        for key, node in options.items():
            with self._source.at(node.place):
                taken[key] = node.plain()
        built = name, repr(sorted(taken.items(), key=lambda item: item[0]))
        try:
            if "name" in taken:  # the one word that the registry keeps for itself
                raise OptionError(f"recipe {name!r} has no option 'name'")
            if built not in self._recipes:
                self._recipes[built] = get_recipe(name, **taken)
        except Exception as error:
            # Where the recipe's own words name an option, or what it is, that is the place.
            what = error.what if isinstance(error, OptionError) else ""
            said = next((key for key, node in options.items() if _is_named(key, node, what)), None)
            with self._source.at(place if said is None else keys[said]):
                raise
        return OfRecipe(self._source, place, self._recipes[built], tuple(taken.items()))

    def _check(self, place: Place, name: str, expected: str) -> None:
        if not is_name(name) or len(name) > MAX_NAME:
            raise self._source.error(place, f"{shown(name)} is no name", expected=expected)


def _is_named(key: str, node: Node, what: str) -> bool:
    known = isinstance(node.value, str) and len(node.value) > 1 and node.value in what
    return known or re.search(rf"\b{re.escape(key)}\b", what) is not None
