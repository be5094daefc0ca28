"""What there is to measure."""

from __future__ import annotations

import ottava
from ottava.errors import OttavaError


def recipes() -> list[str]:
    """The installed recipes that can be built without options."""
    found = []
    for spec in ottava.list_recipes():
        try:
            ottava.get_recipe(spec.name)
        except OttavaError:
            continue
        found.append(spec.name)
    return found
