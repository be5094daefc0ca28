"""``ottava recipes --explain``: which layer and role gets what, from a recipe's own word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ottava.errors import OptionError, UsageError
from ottava.recipes.base import Recipe
from ottava.recipes.explanation import Explanation, RecipeRule
from ottava.recipes.registry import get_recipe
from ottava.recipes.role import QuantizerRole

# What a linear layer asks for.
_TENSOR_TYPES = ("input", "weight", "grad_output")
_WEIGHT = ".weight"


def demo_layers() -> list[str]:
    """The layers of the demo's model that the demo converts."""
    import torch

    from ottava.cli.demo.model import GPT, SIZES

    with torch.device("meta"):
        model = GPT(SIZES["small"])
    # Its weight is that of the embedding, for which the demo leaves it out.
    return [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and name != "head"]


def checkpoint_layers(path: Path) -> list[str]:
    """The layers of a file or folder of tensors: what has a matrix named ``weight``, quantized or not.

    Raises:
        CheckpointError: it is damaged, or nothing that can be read.
        UsageError: no layer is in it.
    """
    from ottava.checkpoint.convert import read_state

    state, _ = read_state(path)
    found = [name.removesuffix(_WEIGHT) for name, value in state.items() if name.endswith(_WEIGHT) and value.dim() == 2]
    if not found:
        raise UsageError(
            f"{path} has no matrix named *{_WEIGHT}", expected="a checkpoint of a model with linear layers"
        )
    return found


def _rows(recipe: Recipe, layers: list[str]) -> tuple[list[dict[str, Any]], list[RecipeRule]]:
    """What each role of each layer gets, and the rules that serve none of them."""
    rows, used = [], set()
    for layer in layers:
        for tensor_type in _TENSOR_TYPES:
            explained = recipe.explain(QuantizerRole("linear", tensor_type, layer))
            used.add(explained.rule)
            rows.append(
                {
                    "layer": layer,
                    "role": tensor_type,
                    "rowwise": explained.rowwise,
                    "columnwise": explained.columnwise,
                    "line": explained.line,
                    "place": _place(explained),
                    "rule": None if explained.rule is None else explained.rule.text,
                }
            )
    return rows, [rule for rule in recipe.rules() if rule not in used]


def _place(found: Explanation | RecipeRule) -> str | None:
    """Where a recipe's file says it, in words."""
    return found.place or (None if found.line is None else f"line {found.line}")


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for column in ("layer", "role", "rowwise", "columnwise", "from"):
        table.add_column(column, overflow="fold")
    before = ""
    for row in rows:
        first = row["layer"] != before
        before = row["layer"]
        if first and table.row_count:
            table.add_section()
        table.add_row(before if first else "", row["role"], row["rowwise"], row["columnwise"], row["place"] or "-")
    return table


def show_explanation(name: str, layers: list[str], checkpoint: Path | None, as_json: bool) -> None:
    """Print what each role of each layer gets under a recipe, and the rules of its file that serve none of them.

    Args:
        name: of an installed recipe, or the path of a recipe file.
        layers: names of layers; those of the demo's model where neither these nor a checkpoint are given.
        checkpoint: a file or folder of tensors whose layers are asked about as well.
        as_json: print an object instead of a table.

    Raises:
        OptionError: a layer has no name; or the recipe's options or its file are not what they should be.
        RecipeNotFoundError, PluginError: the recipe cannot be had.
        CheckpointError, UsageError: as of :func:`checkpoint_layers`.
    """
    if not all(layers):
        raise OptionError("--layer ''", expected="the qualified name of a layer")
    recipe = get_recipe(name)
    asked = [*layers, *(checkpoint_layers(checkpoint) if checkpoint is not None else [])] or demo_layers()
    rows, unused = _rows(recipe, list(dict.fromkeys(asked)))
    if as_json:
        left = [{"line": rule.line, "place": _place(rule), "rule": rule.text} for rule in unused]
        print(json.dumps({"recipe": name, "layers": rows, "unused": left}, indent=2))
        return
    console = Console(markup=False, emoji=False)
    console.print(_table(name, rows))
    for rule in unused:
        console.print(f"unused: the rule in {_place(rule)}, {rule.text}, serves none of these layers", soft_wrap=True)
