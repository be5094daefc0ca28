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
from ottava_custom.files.source import Place, Source, check_size, read_text
from ottava_custom.files.toml_file import parse_toml
from ottava_custom.files.yaml_file import parse_yaml

_LANGUAGES = {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": parse_toml}
#: Suffixes of recipe files.
SUFFIXES = tuple(_LANGUAGES)

# Files that are being read: a recipe in one may be read from another.
_reading: ContextVar[tuple[str, ...]] = ContextVar("_reading", default=())


def _suffix(path: str) -> str:
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _LANGUAGES:
        raise OptionError(
            f"{path} has the suffix {suffix!r}", expected=f"one of {', '.join(SUFFIXES)}"
        )
    return suffix


@dataclass(frozen=True)
class FileFactory:
    """A quantizer factory from the text of a recipe file.

    Factories are equal when their paths and texts are. A pickle has both, and looks the recipes up
    again.

    Args:
        path: for messages; its suffix names the language.
        text: what the file holds.

    Raises:
        OptionError: something in the text is wrong; the message names the place.
        RecipeNotFoundError, PluginError: a recipe or a factory that it names cannot be had; the
            same.
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
        token = _reading.set((*_reading.get(), file))
        try:
            check_size(self.path, len(self.text.encode(errors="surrogatepass")))
            source = Source(self.path, self.text)
            root = _LANGUAGES[_suffix(self.path)](source)
            if root is None or root.value is None:
                raise source.error(
                    Place(""), "the file is empty", expected="the keys default and layers"
                )
            object.__setattr__(self, "_rules", Schema(source).rules(root))
        finally:
            _reading.reset(token)

    def __call__(self, role: QuantizerRole | str) -> Served:
        """What serves a role: a quantizer, or a request for that of a recipe.

        Raises:
            OptionError: nothing does.
        """
        return self._rules.chosen(QuantizerRole.of(role))[2]

    def explain(self, role: QuantizerRole | str) -> Explanation:
        """What serves a role, in words, with the place and the rule that say so.

        Raises:
            OptionError: nothing serves it.
        """
        role = QuantizerRole.of(role)
        rule, entry, _ = self._rules.chosen(role)
        rowwise, columnwise = entry.expression.words(role)
        described = None if rule is None else rule.described()
        return Explanation(rowwise, columnwise, described, entry.place.short)

    def check_layers(self, names: Sequence[str]) -> None:
        """Refuse a pattern that fits none of the names of a model's layers.

        Raises:
            OptionError: the message names the place, and the nearest pattern that would fit.
        """
        self._rules.check_layers(names)

    def rules(self) -> tuple[RecipeRule, ...]:
        """The rules, in the order of the file."""
        return tuple(rule.described() for rule in self._rules.rules)

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
        RecipeNotFoundError, PluginError: a recipe or a factory that it names cannot be had; the
            same.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise DTypeError(
            f"the path is a {type(path).__name__}", expected="the path of a recipe file"
        )
    name = str(os.fspath(path))
    _suffix(name)
    return FileFactory(name, read_text(name))
