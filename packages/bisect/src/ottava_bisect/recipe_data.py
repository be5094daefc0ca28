"""Recipes as data: a name and options, or the text of a recipe file."""

import dataclasses
import math
from enum import Enum
from typing import Any

import ottava
from ottava.errors import CheckpointError, OttavaError, UsageError
from ottava.recipes import Recipe
from ottava_custom import CustomRecipe
from ottava_custom.files import FileFactory

_REMEDY = (
    "give the recipe: recipe= in Python, --recipe for the command, or a model that is "
    "converted already"
)


def describe(recipe: Recipe) -> dict[str, Any]:
    """The JSON description of a recipe: ``{"name", "options"}`` or ``{"file", "text"}``.

    :func:`build` makes an equal recipe from it. A recipe that holds functions is described by
    ``{"words"}``, from which no recipe can be built.
    """
    words: dict[str, Any] = {"words": f"{recipe!r:.500}"}
    factory = recipe.qfactory if isinstance(recipe, CustomRecipe) else None
    if recipe._factory is not None:
        return words
    if isinstance(factory, FileFactory):
        return {"file": factory.path, "text": factory.text}
    if not dataclasses.is_dataclass(recipe) or not recipe.name:
        return words
    options = {
        field.name: _plain(getattr(recipe, field.name))
        for field in dataclasses.fields(recipe)
        if field.init
    }
    described = {"name": recipe.name, "options": options}
    try:
        return described if build(described).same_as(recipe) else words
    except OttavaError:
        return words


def build(data: Any) -> Recipe:
    """The recipe that :func:`describe` described.

    Raises:
        CheckpointError: ``data`` is not such a description.
        UsageError: the recipe held functions, which data cannot describe.
        RecipeNotFoundError, OptionError, PluginError: see :func:`ottava.get_recipe`.
    """
    kind = next((kind for kind in _KINDS if _is_of_kind(data, kind)), None)
    if kind is None:
        raise CheckpointError(
            f"a recipe is described as {data!r:.80}", expected="what capture writes"
        )
    if kind == "words":
        raise UsageError(
            f"the recipe {data['words']} is not of data alone",
            expected="a recipe to use",
            remedy=_REMEDY,
        )
    if kind == "file":
        return CustomRecipe(FileFactory(data["file"], data["text"]))
    if "." in data["name"] or "/" in data["name"]:
        raise CheckpointError(
            f"a recipe has the name {data['name']!r:.80}", expected="the name of a recipe"
        )
    options = {str(name): _number(value) for name, value in data["options"].items()}
    return ottava.get_recipe(data["name"], **options)


# Kind of description -> its entries, and their types.
_KINDS: dict[str, dict[str, type]] = {
    "words": {"words": str},
    "name": {"name": str, "options": dict},
    "file": {"file": str, "text": str},
}


def _is_of_kind(data: Any, kind: str) -> bool:
    types = _KINDS[kind]
    if not isinstance(data, dict) or set(data) != set(types):
        return False
    return all(isinstance(data[key], own_type) for key, own_type in types.items())


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, tuple):
        return list(value)
    if type(value) in (bool, int, float, str):
        return value
    return None


def _number(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"float"}:
        return float(value["float"])
    return value
