"""``ottava recipes`` lists installed and broken recipes, and explains what each layer gets."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from ottava.cli.output import Json, console, escaped, say, show_json, table
from ottava.errors import OptionError, UsageError
from ottava.recipes.base import get_recipe
from ottava.recipes.registry import FACTORY, RECIPE, PluginStatus, discover, plugin_statuses
from ottava.recipes.role import OF_LINEAR, QuantizerRole

#: The group of entry points for readers of checkpoints: functions from a path to a state dict and
#: texts.
READERS = "ottava.readers"
_WEIGHT = ".weight"
#: The layers that the demo converts in its model, a GPT of four blocks.
DEMO_LAYERS = tuple(
    f"blocks.{block}.{layer}" for block in range(4) for layer in ("qkv", "proj", "up", "down")
)


def checkpoint_layers(path: Path) -> list[str]:
    """The layers in a file or folder of tensors: those with a matrix named ``weight``, quantized or
    not."""
    readers = discover(READERS)
    if not readers:
        package = "ottava-integrations"
        raise UsageError(
            "--checkpoint is not installed", expected=package, remedy=f"pip install {package}"
        )
    state, _ = readers[0].entry.load()(path)
    found = [
        name.removesuffix(_WEIGHT)
        for name, value in state.items()
        if name.endswith(_WEIGHT) and value.dim() == 2
    ]
    if not found:
        raise UsageError(
            f"{path} has no matrix named *{_WEIGHT}", "a checkpoint of a model with linear layers"
        )
    return found


def show_explanation(name: str, layers: list[str], checkpoint: Path | None, as_json: bool) -> None:
    """Print the quantizers of each role of each layer under a recipe, and the unused rules of its
    file.

    By default the layers are those of the demo's model.
    """
    if not all(layers):
        raise OptionError("--layer ''", expected="the qualified name of a layer")
    recipe = get_recipe(name)
    asked = [
        *layers,
        *(checkpoint_layers(checkpoint) if checkpoint is not None else []),
    ] or DEMO_LAYERS
    rows: list[dict[str, Any]] = []
    used = set()
    for layer, tensor_type in itertools.product(dict.fromkeys(asked), OF_LINEAR):
        explained = recipe.explain(QuantizerRole("linear", tensor_type, layer))
        used.add(explained.rule)
        about = vars(explained) | {"rule": explained.rule and explained.rule.text}
        rows.append({"layer": layer, "role": tensor_type, **about})
    unused = [rule for rule in recipe.rules() if rule not in used]
    if as_json:
        left = [{"place": rule.place, "rule": rule.text} for rule in unused]
        return show_json({"recipe": name, "layers": rows, "unused": left})
    made = table(name, ("layer", "role", "rowwise", "columnwise", "from"), ())
    for number, row in enumerate(rows, 1):
        layer = row["layer"] if number % len(OF_LINEAR) == 1 else ""
        cells = (layer, row["role"], row["rowwise"], row["columnwise"], row["place"] or "-")
        made.add_row(*map(escaped, cells), end_section=number % len(OF_LINEAR) == 0)
    console().print(made)
    for rule in unused:
        say(f"unused: the rule in {rule.place}, {rule.text}, serves none of these layers")


def _rows(status: PluginStatus, kind: str) -> list[dict[str, Any]]:
    """One row for each spec that a plugin offers, refused ones included.

    A plugin without specs has one row among the recipes.
    """
    found = [
        (s.name, s.summary, getattr(s, "capabilities", ()), "ok", "")
        for s in status.offers
        if s.kind == kind
    ]
    found += [
        (s.name, "", (), "refused", str(error))
        for s, error in status.refused.items()
        if s.kind == kind
    ]
    if kind == RECIPE and not (status.offers or status.refused):
        empty = status.status == "ok"
        word, error = ("empty", "it offers nothing") if empty else (status.status, status.error)
        found.append(("", "", (), word, error))
    package: dict[str, Any] = {
        "plugin": status.name,
        "distribution": status.distribution,
        "version": status.version,
    }
    rows = []
    for name, summary, capabilities, word, error in found:
        able: dict[str, Any] = {"capabilities": list(capabilities)} if kind == RECIPE else {}
        rows.append(
            {"name": name, "summary": summary, **able, **package, "status": word, "error": error}
        )
    return rows


def recipes(
    as_json: Json = False,
    explain: Annotated[
        str | None, typer.Option(help="What each layer gets under a recipe, or a recipe file.")
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="With --explain: a layer's name; may be given again.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="With --explain: a file or folder, for its layers.")
    ] = None,
) -> None:
    """List the installed recipes and quantizer factories, and the packages that are broken."""
    if explain is not None:
        return show_explanation(explain, layer or [], checkpoint, as_json)
    if given := [
        option for option, value in (("--layer", layer), ("--checkpoint", checkpoint)) if value
    ]:
        raise UsageError(
            f"{' and '.join(given)} without --explain", remedy="say which recipe: --explain NAME"
        )
    statuses = plugin_statuses()
    found, factories = (
        [row for status in statuses for row in _rows(status, kind)] for kind in (RECIPE, FACTORY)
    )
    if as_json:
        return show_json({"recipes": found, "quantizer_factories": factories})
    if not found:
        say("No recipe is installed. Try: pip install ottava-recipes-current")
    for title, rows, about in (
        ("Recipes", found, "capabilities"),
        ("Quantizer factories", factories, "summary"),
    ):
        columns = ("name", "version", "distribution", about, "status")
        cells = [
            [", ".join(row[c]) if c == "capabilities" else row[c] or "-" for c in columns]
            for row in rows
        ]
        if rows:
            console().print(table(title, columns, cells))
    for row in (*found, *factories):
        if row["error"]:
            name = f" {row['name']}" if row["name"] else ""
            say(f"{row['plugin']} {row['version']}{name} is {row['status']}: {row['error']}")
