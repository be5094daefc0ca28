"""``FileFactory``: the quantizer factory that a recipe file describes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ottava.errors import DTypeError, OptionError
from ottava.recipes.role import Explanation, QuantizerRole, RecipeRule
from ottava_custom.files.expressions import Served
from ottava_custom.files.rules import Rules
from ottava_custom.files.schema import Schema
from ottava_custom.files.source import Place, check_size, read_text
from ottava_custom.files.toml_file import parse_toml
from ottava_custom.files.yaml_file import parse_yaml

_LANGUAGES = {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": parse_toml}
#: Suffixes of recipe files.
SUFFIXES = tuple(_LANGUAGES)

# Files that are being read: a recipe in one may be read from another.
_reading: ContextVar[tuple[str, ...]] = ContextVar("_reading", default=())


@dataclass(frozen=True)
class FileFactory:
    """The quantizer factory that the text of a recipe file describes.

    Factories are equal when their paths and texts are. A pickle has both, and looks the recipes up
    again.

    Args:
        path: the path for messages. Its suffix names the language.
        text: what the file holds.

    Raises:
        OptionError: something in the text is wrong; the message names the place.
        RecipeNotFoundError, PluginError: a recipe or a factory that the file names is not
            installed, or fails; the message names the place.
    """

    path: str
    text: str = field(repr=False)
    _rules: Rules = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        file = os.path.abspath(self.path)
        if file in _reading.get():
            raise OptionError(
                f"{self.path} is read from itself",
                expected="files that do not lead back to themselves",
            )
        check_size(self.path, len(self.text.encode()))
        parse = _LANGUAGES[_suffix(self.path)]
        token = _reading.set((*_reading.get(), file))
        try:
            root = parse(self.path, self.text)
            if root is None or root.value is None:
                raise Place(self.path).error("the file is empty", "the keys default and layers")
            object.__setattr__(self, "_rules", Schema().rules(root))
        finally:
            _reading.reset(token)

    def __call__(self, role: QuantizerRole | str) -> Served:
        """What serves a role: a quantizer, or a request for the quantizer of a recipe.

        Raises:
            OptionError: nothing serves the role.
        """
        _, _, served = self._rules.resolve(QuantizerRole.of(role))
        return served

    def explain(self, role: QuantizerRole | str) -> Explanation:
        """What serves a role, in words, with the place and the rule that say so.

        Raises:
            OptionError: nothing serves the role.
        """
        role = QuantizerRole.of(role)
        rule, entry, _ = self._rules.resolve(role)
        rowwise, columnwise = entry.expression.words(role)
        rule_text = None if rule is None else rule.listed()
        return Explanation(rowwise, columnwise, rule_text, entry.place.short)

    def check_layers(self, names: Sequence[str]) -> None:
        """Refuse a pattern that fits none of the names of a model's layers.

        Raises:
            OptionError: the message names the place, and the nearest pattern that would fit.
        """
        self._rules.check_layers(names)

    def rules(self) -> tuple[RecipeRule, ...]:
        """The rules, in the order of the file."""
        return tuple(rule.listed() for rule in self._rules.rules)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileFactory, (self.path, self.text)

    def __deepcopy__(self, memo: dict[int, Any]) -> FileFactory:
        # Nothing of it changes.
        return self


def load_factory(path: str | os.PathLike[str]) -> FileFactory:
    """The quantizer factory that a recipe file describes, in YAML or TOML by its suffix.

    Raises:
        DTypeError: ``path`` is no path.
        OptionError: the file cannot be read, or something in it is wrong; the message names the
            place.
        RecipeNotFoundError, PluginError: a recipe or a factory that the file names is not
            installed, or fails; the message names the place.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise DTypeError(
            f"the path is a {type(path).__name__}", expected="the path of a recipe file"
        )
    file = os.fspath(path)
    _suffix(file)
    return FileFactory(file, read_text(file))


def _suffix(path: str) -> str:
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _LANGUAGES:
        raise OptionError(
            f"{path} has the suffix {suffix!r}", expected=f"one of {', '.join(SUFFIXES)}"
        )
    return suffix
