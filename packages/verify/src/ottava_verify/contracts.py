"""Usages of contracts: of installed recipes with their options, and of what a user names."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ottava.contract import Contract, Direction
from ottava.contract.steps import USAGES, Steps, Usage, steps_of
from ottava.errors import OptionError, OttavaError, translated
from ottava.filesystem import AnyPath, as_path
from ottava.recipes import Recipe, get_recipe
from ottava.recipes.registry import list_recipes
from ottava.recipes.role import check_of_linear
from ottava.tensors import Quantizer

#: What a user names a contract by.
AnyContract = Contract | Recipe | Quantizer | AnyPath

# Values of options that are no flags, each of them alone. A recipe that refuses one goes without.
_VALUES: Mapping[str, Sequence[object]] = {
    "fp8_format": ("E4M3", "E5M2"),
    "scale_rounding": ("up", "floor", "even", "nearest"),
    "element": ("MXFP6E2M3", "MXFP6E3M2", "MXINT8", "MXINT8S"),
    "four_over_six": ("weights",),
    "x_block_scaling_dim": (2,),
    "w_block_scaling_dim": (1,),
}
# Options that change bytes only together.
_TOGETHER: Sequence[Mapping[str, object]] = (
    {"four_over_six": "weights", "four_over_six_bound": 448},
    {"four_over_six": "weights", "four_over_six_error": "MSE"},
    {"four_over_six": "weights", "four_over_six_bound": 448, "four_over_six_error": "MSE"},
)
# Flags that change no byte on one rank, and need a process group.
_OF_RANKS = ("with_amax_reduction", "reduce_amax")


@dataclass(frozen=True)
class Named:
    """One usage of a contract, with a name for people: ``"mxfp8, weight, rowwise"``."""

    name: str
    contract: Contract
    usage: Usage

    @cached_property
    def steps(self) -> Steps:
        """The steps of the usage."""
        return steps_of(self.contract, self.usage)

    @property
    def citation(self) -> str:
        """The citation of the contract under the name of its recipe."""
        name = re.split(r"[ ,(]", self.name.removeprefix("the "))[0]
        return self.contract.citation(Path(name).stem)


def contracts_of_recipes() -> list[Named]:
    """The contracts of all usages of installed recipes, with each option alone: each once, those
    of default options first."""
    named: dict[object, Named] = {}
    for each in _of_recipes():
        named.setdefault((each.steps, each.usage), each)
    return list(named.values())


def _of_recipes() -> Iterator[Named]:
    """All usages of all roles of installed recipes, those of default options first."""
    for title, recipe in sorted(_recipes(), key=lambda pair: "(" in pair[0]):
        for role in ("weight", "input", "grad_output"):
            yield from _of_role(title, recipe, role)


def _recipes() -> Iterator[tuple[str, Recipe]]:
    """Installed recipes that need no options, and with each of their options alone."""
    for spec in list_recipes():
        for options in ({}, *_options(spec.name)):
            words = ", ".join(f"{option}={value}" for option, value in options.items())
            try:
                recipe = get_recipe(spec.name, **options)
            except OttavaError:
                continue
            yield f"{spec.name}({words})" if words else spec.name, recipe


def _options(name: str) -> Iterator[Mapping[str, object]]:
    try:
        recipe: Any = get_recipe(name)
    except OttavaError:
        return
    if not dataclasses.is_dataclass(recipe):
        return
    fields = {option.name: option.default for option in dataclasses.fields(recipe)}
    for option, default in fields.items():
        if isinstance(default, bool) and option not in _OF_RANKS:
            yield {option: not default}
        for value in _VALUES.get(option, ()):
            yield {option: value}
    yield from (options for options in _TOGETHER if options.keys() <= fields.keys())


def _of_role(title: str, recipe: Recipe, role: str) -> Iterator[Named]:
    """The usages of a role whose choices are stated."""
    try:
        contract = recipe.quantizer(role).contract
    except (OttavaError, AttributeError):
        return
    if not contract.is_stated:
        return
    for usage in USAGES:
        if isinstance(getattr(contract, usage), Direction):
            yield Named(f"{title}, {role}, {usage}", contract, usage)


def resolve_contract(
    contract: AnyContract,
    *,
    role: str = "input",
    usage: Usage = "rowwise",
    options: Mapping[str, object] | None = None,
) -> Named:
    """One usage of a contract.

    Args:
        contract: a contract, a recipe or its name, a quantizer, the citation of a contract of an
            installed recipe, or a file (.json) with what `ottava contract` prints.
        role: for which a recipe makes a quantizer.
        options: of the recipe that is named.

    Raises:
        OptionError: nothing is stated of the usage.
        RecipeNotFoundError: no package has the recipe.
    """
    check_of_linear([role])
    if usage not in USAGES:
        raise OptionError(f"the usage is {usage!r}", expected="rowwise or columnwise")
    if isinstance(contract, os.PathLike):
        contract = os.fspath(contract)
    title = contract if isinstance(contract, str) else type(contract).__name__
    if title.startswith("ottava:"):
        return _cited(title, usage)
    if title.endswith(".json"):
        contract = _read(title, role)
    if isinstance(contract, str):
        contract = get_recipe(contract, **dict(options or {}))
    if isinstance(contract, Recipe):
        title = f"{title}, {role}"
        contract = contract.quantizer(role)
    stated: Any = getattr(contract, "contract", contract)
    if not isinstance(stated, Contract) or not isinstance(getattr(stated, usage), Direction):
        raise OptionError(
            f"{title} states no bytes of its {usage} data",
            expected="a contract that states every choice",
            remedy="`ottava contract` prints contracts",
        )
    return Named(f"{title}, {usage}", stated, usage)


def _cited(citation: str, usage: Usage) -> Named:
    """The usage of a contract of an installed recipe, by its citation."""
    for each in _of_recipes():
        if each.usage == usage and each.contract.hash == citation.rpartition("/")[2]:
            return each
    raise OptionError(
        f"{citation} is the contract of no installed recipe, with any option",
        expected="a citation that `ottava contract` prints",
        remedy="install the package of the recipe, or give the contract as a file (.json)",
    )


def _read(path: str, role: str) -> Contract:
    """The contract in a file: alone, or of a role in what `ottava contract` prints."""
    with translated(
        f"{path} is no contract", "JSON, as `ottava contract` prints it", to=OptionError
    ):
        value = json.loads(as_path(path).read_text())
    roles = value if isinstance(value, dict) else {}
    return Contract.of_value(roles[role]["contract"] if role in roles else value)
