"""``ottava recipes``."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ottava.recipes.registry import PluginStatus, plugin_statuses


def _rows(status: PluginStatus) -> list[dict[str, Any]]:
    base = {
        "plugin": status.name,
        "distribution": status.distribution,
        "version": status.version,
        "status": status.status,
        "error": status.error,
    }
    if not status.recipes:
        return [{"name": "", "summary": "", "capabilities": [], **base}]
    return [
        {"name": spec.name, "summary": spec.summary, "capabilities": list(spec.capabilities), **base}
        for spec in status.recipes
    ]


def show_recipes(as_json: bool) -> None:
    """Print every recipe with its package, and every package that could not be used with its error."""
    rows = [row for status in plugin_statuses() for row in _rows(status)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = Console()
    if not rows:
        console.print("No recipe is installed. Try: pip install ottava-recipes-current")
        return
    table = Table(title="Recipes")
    for heading in ("name", "version", "distribution", "capabilities", "status"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        capabilities = ", ".join(row["capabilities"])
        table.add_row(row["name"] or "-", row["version"], row["distribution"], capabilities, row["status"])
    console.print(table)
    for row in rows:
        if row["status"] == "broken":
            console.print(f"{row['plugin']} {row['version']} is broken: {row['error']}", markup=False, soft_wrap=True)
