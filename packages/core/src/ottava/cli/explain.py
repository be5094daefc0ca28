"""``ottava recipes --explain``: which layer and role gets what, from a recipe's own word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ottava.cli.output import console, say, show_json, table
from ottava.errors import OptionError, UsageError
from ottava.recipes.base import Recipe, get_recipe
from ottava.recipes.explanation import Explanation, RecipeRule
from ottava.recipes.role import OF_LINEAR, QuantizerRole

_WEIGHT = ".weight"
#: The layers that the demo converts in its model, a GPT of four blocks.
DEMO_LAYERS = tuple(f"blocks.{block}.{layer}" for block in range(4) for layer in ("qkv", "proj", "up", "down"))


def checkpoint_layers(path: Path) -> list[str]:
    """The layers of a file or folder of tensors: what has a matrix named ``weight``, quantized or not."""
    from ottava.checkpoint.convert import read_state

    state, _ = read_state(path)
    found = [name.removesuffix(_WEIGHT) for name, value in state.items() if name.endswith(_WEIGHT) and value.dim() == 2]
    if not found:
        what, expected = f"{path} has no matrix named *{_WEIGHT}", "a checkpoint of a model with linear layers"
        raise UsageError(what, expected=expected)
    return found


def _rows(recipe: Recipe, layers: list[str]) -> tuple[list[dict[str, Any]], list[RecipeRule]]:
    """What each role of each layer gets, and the rules that serve none of them."""
    rows, used = [], set()
    for layer in layers:
        for tensor_type in OF_LINEAR:
            explained = recipe.explain(QuantizerRole("linear", tensor_type, layer))
            used.add(explained.rule)
            rule = None if explained.rule is None else explained.rule.text
            about = vars(explained) | {"place": _place(explained), "rule": rule}
            rows.append({"layer": layer, "role": tensor_type, **about})
    return rows, [rule for rule in recipe.rules() if rule not in used]


def _place(found: Explanation | RecipeRule) -> str | None:
    """Where a recipe's file says it, in words."""
    return found.place or (None if found.line is None else f"line {found.line}")


def show_explanation(name: str, layers: list[str], checkpoint: Path | None, as_json: bool) -> None:
    """Print what each role of each layer gets under a recipe, and the rules of its file that serve none of them.

    Without ``layers`` and a checkpoint these are the layers of the demo's model.
    """
    if not all(layers):
        raise OptionError("--layer ''", expected="the qualified name of a layer")
    recipe = get_recipe(name)
    asked = [*layers, *(checkpoint_layers(checkpoint) if checkpoint is not None else [])] or DEMO_LAYERS
    rows, unused = _rows(recipe, list(dict.fromkeys(asked)))
    if as_json:
        left = [{"line": rule.line, "place": _place(rule), "rule": rule.text} for rule in unused]
        return show_json({"recipe": name, "layers": rows, "unused": left})
    made = table(name, ("layer", "role", "rowwise", "columnwise", "from"), ())
    for number, row in enumerate(rows, 1):
        layer = row["layer"] if number % len(OF_LINEAR) == 1 else ""
        cells = (layer, row["role"], row["rowwise"], row["columnwise"], row["place"] or "-")
        made.add_row(*cells, end_section=number % len(OF_LINEAR) == 0)
    console().print(made)
    for rule in unused:
        say(f"unused: the rule in {_place(rule)}, {rule.text}, serves none of these layers")
    return None
