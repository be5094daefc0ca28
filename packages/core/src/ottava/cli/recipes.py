"""``ottava recipes``."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ottava.recipes.ownership import FACTORY, RECIPE, PluginStatus
from ottava.recipes.registry import plugin_statuses, unknown_disabled


def _rows(status: PluginStatus, kind: str) -> list[dict[str, Any]]:
    """One row for each that the plugin offers or is refused; a plugin without any has one among the recipes."""
    base = {"plugin": status.name, "distribution": status.distribution, "version": status.version}
    rows: list[dict[str, Any]] = []
    for spec in status.specs(kind):
        capabilities = {"capabilities": list(spec.capabilities)} if kind == RECIPE else {}  # type: ignore[union-attr]
        rows.append({"name": spec.name, "summary": spec.summary, **capabilities, **base, "status": "ok", "error": ""})
    for refusal in (r for r in status.refused if r.kind == kind):
        rows.append({"name": refusal.name, "summary": "", **base, "status": "refused", "error": str(refusal.error)})
    empty = not status.recipes and not status.quantizer_factories and not status.refused
    if empty and kind == RECIPE:
        error = "it offers nothing" if status.status == "ok" else status.error
        word = "empty" if status.status == "ok" else status.status
        rows.append({"name": "", "summary": "", **base, "status": word, "error": error})
    return [{"capabilities": [], **row} if kind == RECIPE else row for row in rows]


def _table(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [", ".join(row[column]) if column == "capabilities" else row[column] or "-" for column in columns]
        table.add_row(*cells)
    return table


def show_recipes(as_json: bool) -> None:
    """Print every recipe and quantizer factory with its package, and every package with a problem and its error."""
    statuses = plugin_statuses()
    recipes, factories = ([row for status in statuses for row in _rows(status, kind)] for kind in (RECIPE, FACTORY))
    unknown = unknown_disabled()
    # Texts of plugins are printed as they are, whatever brackets and colons they have.
    errors = Console(stderr=True, markup=False, emoji=False)
    if unknown:
        errors.print(f"OTTAVA_DISABLE_PLUGINS names what is not installed: {', '.join(unknown)}", soft_wrap=True)
    if as_json:
        print(json.dumps({"recipes": recipes, "quantizer_factories": factories}, indent=2))
        return
    console = Console(markup=False, emoji=False)
    if not recipes:
        console.print("No recipe is installed. Try: pip install ottava-recipes-current")
    else:
        console.print(_table("Recipes", recipes, ("name", "version", "distribution", "capabilities", "status")))
    if factories:
        columns = ("name", "version", "distribution", "summary", "status")
        console.print(_table("Quantizer factories", factories, columns))
    for row in (*recipes, *factories):
        if row["error"]:
            name = f" {row['name']}" if row["name"] else ""
            text = f"{row['plugin']} {row['version']}{name} is {row['status']}: {row['error']}"
            console.print(text, soft_wrap=True)
