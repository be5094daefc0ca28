"""``ottava recipes`` lists installed and broken recipes, and explains what each layer gets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ottava.cli.output import Json, console, escaped, say, show_json, table
from ottava.errors import OptionError, UsageError
from ottava.recipes.base import get_recipe
from ottava.recipes.registry import FACTORY, RECIPE, PluginStatus, plugin_statuses
from ottava.recipes.role import OF_LINEAR, Explanation, QuantizerRole, RecipeRule

_WEIGHT = ".weight"
#: The layers that the demo converts in its model, a GPT of four blocks.
DEMO_LAYERS = tuple(
    f"blocks.{block}.{layer}" for block in range(4) for layer in ("qkv", "proj", "up", "down")
)


def checkpoint_layers(path: Path) -> list[str]:
    """The layers in a file or folder of tensors: those with a matrix named ``weight``, quantized or
    not."""
    # This import is local, because torch takes seconds.
    from ottava.checkpoint import read_state

    state, _ = read_state(path)
    layers = [
        name.removesuffix(_WEIGHT)
        for name, value in state.items()
        if name.endswith(_WEIGHT) and value.dim() == 2
    ]
    if not layers:
        raise UsageError(
            f"{path} has no matrix named *{_WEIGHT}", "a checkpoint of a model with linear layers"
        )
    return layers


def show_explanation(name: str, layers: list[str], checkpoint: Path | None, as_json: bool) -> None:
    """Print the quantizers of each role of each layer under a recipe, and the unused rules of its
    file.

    By default the layers are those of the demo's model.
    """
    if not all(layers):
        raise OptionError("--layer ''", expected="the qualified name of a layer")
    recipe = get_recipe(name)
    if checkpoint is not None:
        layers = [*layers, *checkpoint_layers(checkpoint)]
    roles = [
        QuantizerRole("linear", tensor_type, layer)
        for layer in dict.fromkeys(layers or DEMO_LAYERS)
        for tensor_type in OF_LINEAR
    ]
    explanations = [recipe.explain(role) for role in roles]
    applied_rules = {explanation.rule for explanation in explanations}
    unused = [rule for rule in recipe.rules() if rule not in applied_rules]
    if as_json:
        _show_explanations_as_json(name, roles, explanations, unused)
        return
    rows = table(name, ("layer", "role", "rowwise", "columnwise", "from"), ())
    for role, explanation in zip(roles, explanations, strict=True):
        # The rows of a layer are together; the first one names it.
        layer = role.name if role.tensor_type == OF_LINEAR[0] else ""
        place = explanation.place or "-"
        cells = (layer, role.tensor_type, explanation.rowwise, explanation.columnwise, place)
        is_last = role.tensor_type == OF_LINEAR[-1]
        rows.add_row(*map(escaped, cells), end_section=is_last)
    console().print(rows)
    for rule in unused:
        say(f"unused: the rule in {rule.place}, {rule.text}, serves none of these layers")


def _show_explanations_as_json(
    name: str,
    roles: Sequence[QuantizerRole],
    explanations: Sequence[Explanation],
    unused: Sequence[RecipeRule],
) -> None:
    rows = [
        {
            "layer": role.name,
            "role": role.tensor_type,
            "rowwise": explanation.rowwise,
            "columnwise": explanation.columnwise,
            "rule": explanation.rule.text if explanation.rule is not None else None,
            "place": explanation.place,
        }
        for role, explanation in zip(roles, explanations, strict=True)
    ]
    rules = [{"place": rule.place, "rule": rule.text} for rule in unused]
    show_json({"recipe": name, "layers": rows, "unused": rules})


class _Row(NamedTuple):
    """A spec that a plugin offers, or one that was refused; a plugin without specs has one row.

    Attributes:
        plugin: the plugin.
        kind: the kind of the spec.
        status: ``"ok"``, ``"refused"``, or the state of the plugin in one word.
        error: why the spec or the plugin cannot be used.
        name, summary, capabilities: those of the spec; empty where they say nothing.
    """

    plugin: PluginStatus
    kind: str
    status: str
    error: str = ""
    name: str = ""
    summary: str = ""
    capabilities: Sequence[str] = ()

    def as_json(self) -> dict[str, object]:
        row: dict[str, object] = {"name": self.name, "summary": self.summary}
        if self.kind == RECIPE:
            row["capabilities"] = list(self.capabilities)
        return row | {
            "plugin": self.plugin.name,
            "distribution": self.plugin.distribution,
            "version": self.plugin.version,
            "status": self.status,
            "error": self.error,
        }


def _rows(plugin: PluginStatus, kind: str) -> list[_Row]:
    """One row for each spec of a kind that a plugin offers, refused ones included.

    A plugin without specs has one row among the recipes.
    """
    rows: list[_Row] = []
    for spec in plugin.offers:
        if spec.kind == kind:
            capabilities = getattr(spec, "capabilities", ())
            rows.append(_Row(plugin, kind, "ok", "", spec.name, spec.summary, capabilities))
    for spec, error in plugin.refused.items():
        if spec.kind == kind:
            rows.append(_Row(plugin, kind, "refused", str(error), spec.name))
    if kind == RECIPE and not plugin.offers and not plugin.refused:
        if plugin.status == "ok":
            rows.append(_Row(plugin, kind, "empty", "it offers nothing"))
        else:
            rows.append(_Row(plugin, kind, plugin.status, plugin.error))
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
    if layer or checkpoint:
        options = {"--layer": layer, "--checkpoint": checkpoint}
        names = [option for option, value in options.items() if value]
        raise UsageError(
            f"{' and '.join(names)} without --explain", remedy="say which recipe: --explain NAME"
        )
    plugins = plugin_statuses()
    recipe_rows = [row for plugin in plugins for row in _rows(plugin, RECIPE)]
    factory_rows = [row for plugin in plugins for row in _rows(plugin, FACTORY)]
    if as_json:
        of_recipes = [row.as_json() for row in recipe_rows]
        of_factories = [row.as_json() for row in factory_rows]
        return show_json({"recipes": of_recipes, "quantizer_factories": of_factories})
    if not recipe_rows:
        say("No recipe is installed. Try: pip install ottava-recipes-current")
    capabilities = [", ".join(row.capabilities) for row in recipe_rows]
    _show_rows("Recipes", recipe_rows, "capabilities", capabilities)
    summaries = [row.summary or "-" for row in factory_rows]
    _show_rows("Quantizer factories", factory_rows, "summary", summaries)
    for row in (*recipe_rows, *factory_rows):
        if row.error:
            name = f" {row.name}" if row.name else ""
            plugin = row.plugin
            say(f"{plugin.name} {plugin.version}{name} is {row.status}: {row.error}")


def _show_rows(title: str, rows: Sequence[_Row], column: str, texts: Sequence[str]) -> None:
    """Print a table of rows, in which ``column`` has the ``texts``; nothing without rows."""
    if not rows:
        return
    columns = ("name", "version", "distribution", column, "status")
    cells = [
        (
            row.name or "-",
            row.plugin.version or "-",
            row.plugin.distribution or "-",
            text,
            row.status,
        )
        for row, text in zip(rows, texts, strict=True)
    ]
    console().print(table(title, columns, cells))
