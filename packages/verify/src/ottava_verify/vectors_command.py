"""``ottava vectors`` writes golden vectors."""

import re
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from ottava.cli.contract import Options, Roles
from ottava.cli.files import FileKind, Force, Output, check_outputs
from ottava.cli.output import parse_options, say

_HEAD = rb"(?s).{8}\{\"__metadata__\":\{.*\"format\":\"ottava-vectors"
_VECTORS = FileKind("file of golden vectors", re.compile(_HEAD))


def vectors(
    RECIPE: Annotated[str, typer.Argument(help="A recipe, or a recipe file.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    role: Roles = None,
    option: Options = None,
    force: Force = False,
) -> None:
    """Write inputs and the bytes that a recipe makes of them to one file."""
    from ottava.recipes import get_recipe
    from ottava.recipes.role import OF_LINEAR
    from ottava_verify.vectors import make_vectors

    check_outputs([Output("--out", out, _VECTORS)], [], force)
    start = time.perf_counter()
    recipe = get_recipe(RECIPE, **parse_options(option or []))
    made = make_vectors(recipe, role or OF_LINEAR)
    made.save(out)
    seconds = time.perf_counter() - start
    say(f"Written: {out}, {decimal(out.stat().st_size)}, in {seconds:.1f} s")
    say(f"SHA-256: {made.sha256}")
