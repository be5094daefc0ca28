"""Options of recipes, as people write them on command lines and in files."""

import contextlib
import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

from ottava.errors import OptionError, OttavaError
from ottava.recipes.base import get_recipe


class OptionDefaults:
    """What the options of an installed recipe are by default, which tells what may stand in their place: nothing where
    it cannot be built without options, since whoever builds it is told what is wrong."""

    def __init__(self, recipe: str) -> None:
        self._recipe: Any = None
        with contextlib.suppress(OttavaError):
            self._recipe = get_recipe(recipe)

    def adapt(self, option: str, value: Any) -> Any:
        """``value`` as the recipe takes it: the member of an enumeration for its name, a tuple for a list."""
        default = getattr(self._recipe, option, None)
        if isinstance(default, Enum) and isinstance(value, str):
            if value not in (members := type(default).__members__):
                raise OptionError(f"{option} is {value!r}", expected=f"one of {', '.join(members)}")
            return members[value]
        return tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value

    def parse(self, option: str, text: str) -> Any:
        """The value that ``text`` says: JSON where that makes sense, else text; then as of :meth:`adapt`."""
        value: Any = text
        if not isinstance(getattr(self._recipe, option, None), (Enum, str)):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
        return self.adapt(option, value)


def parse_options(recipe: str | None, given: Sequence[str]) -> dict[str, Any]:
    """Options from texts ``key=value``, each value as of :meth:`OptionDefaults.parse`; with no recipe a text."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise OptionError(f"--option {text!r}", expected="key=value, each key once")
        options[key] = value
    defaults = None if recipe is None or not options else OptionDefaults(recipe)
    return {key: value if defaults is None else defaults.parse(key, value) for key, value in options.items()}
