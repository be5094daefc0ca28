"""Options of recipes as people write them: in a command line, or in a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

from ottava.errors import OptionError, OttavaError
from ottava.recipes.base import get_recipe


class OptionDefaults:
    """What the options of a recipe are by default, which tells what may stand in their place.

    Args:
        recipe: the name of an installed recipe. Of one that cannot be built without options nothing is known.
    """

    def __init__(self, recipe: str) -> None:
        self._recipe: Any = None
        # Whoever builds it with its options is told what is wrong.
        with contextlib.suppress(OttavaError):
            self._recipe = get_recipe(recipe)

    def adapt(self, option: str, value: Any) -> Any:
        """``value`` as the recipe takes it: the member of an enumeration for its name, a tuple for a list.

        Raises:
            OptionError: an enumeration has no such member.
        """
        default = getattr(self._recipe, option, None)
        if isinstance(default, Enum) and isinstance(value, str):
            members = type(default).__members__
            if value not in members:
                raise OptionError(f"{option} is {value!r}", expected=f"one of {', '.join(members)}")
            return members[value]
        if isinstance(default, tuple) and isinstance(value, list):
            return tuple(value)
        return value

    def parse(self, option: str, text: str) -> Any:
        """The value that ``text`` says: JSON where that makes sense, else text; then as of :meth:`adapt`."""
        value: Any = text
        if not isinstance(getattr(self._recipe, option, None), (Enum, str)):
            value = {"True": True, "False": False, "None": None}.get(text, text)
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(text)
        return self.adapt(option, value)


def parse_options(recipe: str | None, given: Sequence[str]) -> dict[str, Any]:
    """Options from texts ``key=value``, each value as of :meth:`OptionDefaults.parse`; with no recipe a text.

    Raises:
        OptionError: one is not ``key=value``, stands there twice, or names no member of an enumeration.
    """
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise OptionError(f"--option {text!r}", expected="key=value, each key once")
        options[key] = value
    if options and recipe is not None:
        defaults = OptionDefaults(recipe)
        options = {key: defaults.parse(key, value) for key, value in options.items()}
    return options
