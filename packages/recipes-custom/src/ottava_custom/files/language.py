"""The languages of recipe files, by suffix."""

from __future__ import annotations

import os

from ottava.errors import OptionError
from ottava_custom.files.nodes import Node
from ottava_custom.files.source import Place, Source
from ottava_custom.files.toml_file import parse_toml
from ottava_custom.files.yaml_file import parse_yaml

_LANGUAGES = {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": parse_toml}
#: Suffixes of recipe files.
SUFFIXES = tuple(_LANGUAGES)


def check_suffix(path: str) -> str:
    """The suffix of a recipe file.

    Raises:
        OptionError: it is that of another kind of file.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _LANGUAGES:
        raise OptionError(f"{path} has the suffix {suffix!r}", expected=f"one of {', '.join(SUFFIXES)}")
    return suffix


def parse(source: Source) -> Node:
    """What a recipe file says.

    Raises:
        OptionError: it is not what its suffix says, or it is empty.
    """
    root = _LANGUAGES[check_suffix(source.path)](source)
    if root is None or root.value is None:
        raise source.error(Place(""), "the file is empty", expected="the keys default and layers")
    return root
