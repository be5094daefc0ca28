"""``ottava contract`` prints contracts, ``ottava vectors`` writes golden vectors."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from ottava.cli.output import parse_options, say, show_json
from ottava.errors import UsageError

if TYPE_CHECKING:
    from ottava.contract import Contract

_Texts = list[str] | None
_Roles = Annotated[
    _Texts, typer.Option(help="input, weight or grad_output; may be given again. Default: all.")
]
_Options = Annotated[
    _Texts, typer.Option(help="An option of the recipe, key=value; may be given again.")
]


def contract(
    RECIPE: Annotated[str | None, typer.Argument(help="A recipe, or a recipe file.")] = None,
    role: _Roles = None,
    option: _Options = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the schema instead.")] = False,
    one_line: Annotated[bool, typer.Option("--one-line", help="Print no line breaks.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a page with worked examples instead.")
    ] = False,
) -> None:
    """Print every choice between values and bytes of a recipe as JSON, and how to cite it."""
    from ottava.contract import schema as schema_of_contracts

    value: object
    if markdown and RECIPE is not None:
        print(_page(RECIPE, role, option), end="")
        return
    if schema:
        value = schema_of_contracts()
    elif RECIPE is None:
        raise UsageError(
            "no recipe", expected="a recipe, or --schema", remedy="`ottava recipes` lists recipes"
        )
    else:
        value = _contracts(RECIPE, role, option)
    if one_line:
        print(json.dumps(value))
    else:
        show_json(value)


def _page(name: str, roles: _Texts, options: _Texts) -> str:
    """The page of a recipe."""
    from ottava_verify.explained import page

    return page(*_stated(name, roles, options))


def _contracts(name: str, roles: _Texts, options: _Texts) -> dict[str, object]:
    """The citation and the contract of each role."""
    title, contracts = _stated(name, roles, options)
    return {
        role: {"citation": each.citation(title), "contract": each.value()}
        for role, each in contracts.items()
    }


def _stated(name: str, roles: _Texts, options: _Texts) -> "tuple[str, dict[str, Contract]]":
    """The name of a recipe, and its contracts by role."""
    from ottava.recipes import get_recipe
    from ottava.recipes.role import OF_LINEAR
    from ottava_verify.contracts import quantizers_of

    recipe = get_recipe(name, **parse_options(options or []))
    quantizers = quantizers_of(recipe, roles or OF_LINEAR)
    return recipe.name, {role: each.contract for role, each in quantizers.items()}


def vectors(
    RECIPE: Annotated[str, typer.Argument(help="A recipe, or a recipe file.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write, or to replace.")],
    role: _Roles = None,
    option: _Options = None,
) -> None:
    """Write inputs and the bytes that a recipe makes of them to one file."""
    from ottava.filesystem import check_file_target
    from ottava.recipes import get_recipe
    from ottava.recipes.role import OF_LINEAR
    from ottava_verify.vectors import make_vectors

    check_file_target(out)
    start = time.perf_counter()
    recipe = get_recipe(RECIPE, **parse_options(option or []))
    made = make_vectors(recipe, role or OF_LINEAR)
    made.save(out)
    seconds = time.perf_counter() - start
    say(f"Written: {out}, {decimal(out.stat().st_size)}, in {seconds:.1f} s")
    say(f"SHA-256: {made.sha256}")
