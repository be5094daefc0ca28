"""The recipes that can be measured."""

from __future__ import annotations

import ottava
from ottava.errors import OttavaError


def recipes() -> list[str]:
    """The installed recipes that can be built without options."""
    names = []
    for spec in ottava.list_recipes():
        try:
            ottava.get_recipe(spec.name)
        except OttavaError:
            continue
        names.append(spec.name)
    return names
