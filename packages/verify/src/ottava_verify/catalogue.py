"""The contracts of installed recipes, with their options."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ottava.contract import Direction
from ottava.errors import OttavaError
from ottava.recipes import Recipe, get_recipe
from ottava.recipes.registry import list_recipes
from ottava.recipes.role import OF_LINEAR
from ottava_verify.matching import Named
from ottava_verify.steps import Usage

_USAGES: tuple[Usage, ...] = ("rowwise", "columnwise")
#: Values of options that are no flags, each of them alone. A recipe that refuses one goes without.
_VALUES: Mapping[str, Sequence[Mapping[str, object]]] = {
    name: [{name: value} for value in values]
    for name, values in {
        "fp8_format": ("E4M3", "E5M2"),
        "scale_rounding": ("up", "floor", "even", "nearest"),
        "element": ("MXFP6E2M3", "MXFP6E3M2", "MXINT8", "MXINT8S"),
        "four_over_six": ("weights",),
        "x_block_scaling_dim": (2,),
        "w_block_scaling_dim": (1,),
    }.items()
} | {
    "four_over_six_bound": [{"four_over_six": "weights", "four_over_six_bound": 448}],
    "four_over_six_error": [
        {"four_over_six": "weights", "four_over_six_error": "MSE"},
        {"four_over_six": "weights", "four_over_six_bound": 448, "four_over_six_error": "MSE"},
    ],
}
# Flags that change no byte on one rank, and need a process group.
_OF_RANKS = ("with_amax_reduction", "reduce_amax")


def contracts_of_recipes(
    roles: Sequence[str] = ("weight", "input", "grad_output"),
) -> list[Named]:
    """The contracts of all usages of installed recipes, with each option alone: each once, those
    of default options first."""
    recipes = list(_recipes())
    recipes.sort(key=lambda pair: bool(pair[1]))
    named: dict[object, Named] = {}
    for title, options, recipe in recipes:
        for role in roles:
            for usage, entry in _of_recipe(_title(title, options), recipe, role):
                named.setdefault((entry.choices, usage), entry)
    return list(named.values())


def contracts_of(recipe: Recipe, title: str, role: str = "") -> list[Named]:
    """The stated contracts of a recipe for a role, or for all of them."""
    roles = [role] if role else OF_LINEAR
    return [entry for role in roles for _, entry in _of_recipe(title, recipe, role)]


def _recipes() -> Iterator[tuple[str, dict[str, object], Recipe]]:
    """Installed recipes that need no options, with each of their options alone."""
    for spec in list_recipes():
        for options in ({}, *_options(spec.name)):
            try:
                yield spec.name, dict(options), get_recipe(spec.name, **options)
            except OttavaError:
                continue


def _options(name: str) -> Iterator[Mapping[str, object]]:
    try:
        recipe: Any = get_recipe(name)
    except OttavaError:
        return
    if not dataclasses.is_dataclass(recipe):
        return
    for option in dataclasses.fields(recipe):
        if type(option.default) is bool and option.name not in _OF_RANKS:
            yield {option.name: not option.default}
        yield from _VALUES.get(option.name, ())


def _title(name: str, options: Mapping[str, object]) -> str:
    words = ", ".join(f"{option}={value}" for option, value in options.items())
    return f"{name}({words})" if words else name


def _of_recipe(title: str, recipe: Recipe, role: str) -> Iterator[tuple[Usage, Named]]:
    """The usages of a role whose choices are stated."""
    try:
        contract = recipe.quantizer(role).contract
    except (OttavaError, AttributeError):
        return
    for usage in _USAGES:
        choices = getattr(contract, usage)
        if isinstance(choices, Direction) and contract.is_stated:
            yield usage, Named(f"{title}, {role}, {usage}", contract, usage)
