"""``ottava recipes``: what is installed, what is broken, and which layer gets what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ottava.cli.explain import show_explanation
from ottava.cli.output import Json, console, say, show_json, table
from ottava.errors import UsageError
from ottava.recipes.ownership import FACTORY, RECIPE, PluginStatus
from ottava.recipes.registry import plugin_statuses, unknown_disabled


def _rows(status: PluginStatus, kind: str) -> list[dict[str, Any]]:
    """One row for each that the plugin offers or is refused; a plugin without any has one among the recipes."""

    found = [(s.name, s.summary, getattr(s, "capabilities", ()), "ok", "") for s in status.specs(kind)]
    found += [(r.name, "", (), "refused", str(r.error)) for r in status.refused if r.kind == kind]
    if kind == RECIPE and not (status.recipes or status.quantizer_factories or status.refused):
        empty = status.status == "ok"
        word, error = ("empty", "it offers nothing") if empty else (status.status, status.error)
        found.append(("", "", (), word, error))
    return [
        {
            "name": name,
            "summary": summary,
            **({"capabilities": list(capabilities)} if kind == RECIPE else {}),
            "plugin": status.name,
            "distribution": status.distribution,
            "version": status.version,
            "status": word,
            "error": error,
        }
        for name, summary, capabilities, word, error in found
    ]


def recipes(
    as_json: Json = False,
    explain: Annotated[
        str | None,
        typer.Option(help="Say which layer and role gets what under a recipe: a name, or the path of a recipe file."),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(help="With --explain: a layer's name, repeatable; by default those of the demo's model."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="With --explain: a file or folder of tensors whose layers to ask about.")
    ] = None,
) -> None:
    """List the installed recipes and quantizer factories, and the packages that are broken."""
    if explain is not None:
        return show_explanation(explain, layer or [], checkpoint, as_json)
    if given := [option for option, value in (("--layer", layer), ("--checkpoint", checkpoint)) if value]:
        raise UsageError(f"{' and '.join(given)} without --explain", remedy="say which recipe: --explain NAME")
    statuses = plugin_statuses()
    found, factories = ([row for status in statuses for row in _rows(status, kind)] for kind in (RECIPE, FACTORY))
    if unknown := unknown_disabled():
        say(f"OTTAVA_DISABLE_PLUGINS names what is not installed: {', '.join(unknown)}", stderr=True)
    if as_json:
        return show_json({"recipes": found, "quantizer_factories": factories})
    if not found:
        say("No recipe is installed. Try: pip install ottava-recipes-current")
    for title, rows, about in (("Recipes", found, "capabilities"), ("Quantizer factories", factories, "summary")):
        columns = ("name", "version", "distribution", about, "status")
        cells = [[", ".join(row[c]) if c == "capabilities" else row[c] or "-" for c in columns] for row in rows]
        if rows:
            console().print(table(title, columns, cells))
    for row in (*found, *factories):
        if row["error"]:
            name = f" {row['name']}" if row["name"] else ""
            say(f"{row['plugin']} {row['version']}{name} is {row['status']}: {row['error']}")
    return None
