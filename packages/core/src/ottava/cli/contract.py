"""``ottava contract`` prints what makes the bytes of a recipe."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ottava.cli.output import parse_options, show_json
from ottava.errors import OptionError, UsageError
from ottava.recipes.base import get_recipe
from ottava.recipes.role import OF_LINEAR, check_of_linear

if TYPE_CHECKING:
    from ottava.contract import Contract

Texts = list[str] | None
Roles = Annotated[
    Texts, typer.Option(help="input, weight or grad_output; may be given again. Default: all.")
]
Options = Annotated[
    Texts, typer.Option(help="An option of the recipe, key=value; may be given again.")
]


def contract(
    RECIPE: Annotated[str | None, typer.Argument(help="A recipe, or a recipe file.")] = None,
    role: Roles = None,
    option: Options = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the schema instead.")] = False,
    one_line: Annotated[bool, typer.Option("--one-line", help="Print no line breaks.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a page with worked examples instead.")
    ] = False,
) -> None:
    """Print every choice between values and bytes of a recipe as JSON, and how to cite it."""
    if schema and (RECIPE is not None or role or option or markdown):
        raise OptionError("--schema with a recipe, or with --markdown", expected="--schema alone")
    if schema:
        from ottava.contract import schema as schema_of_contracts

        _show(schema_of_contracts(), one_line)
        return
    if RECIPE is None:
        raise UsageError(
            "no recipe", expected="a recipe, or --schema", remedy="`ottava recipes` lists recipes"
        )
    name, contracts = _stated(RECIPE, role, option)
    if markdown:
        from ottava.contract.page import page

        print(page(name, contracts), end="")
        return
    _show(
        {
            role: {"citation": each.citation(name), "contract": each.value()}
            for role, each in contracts.items()
        },
        one_line,
    )


def _show(value: Mapping[str, object], one_line: bool) -> None:
    if one_line:
        print(json.dumps(value))
    else:
        show_json(value)


def _stated(name: str, roles: Texts, options: Texts) -> "tuple[str, dict[str, Contract]]":
    """The name of a recipe, and its contracts by role."""
    tensor_types = roles or OF_LINEAR
    check_of_linear(tensor_types)
    recipe = get_recipe(name, **parse_options(options or []))
    return recipe.name, {each: recipe.quantizer(each).contract for each in tensor_types}
