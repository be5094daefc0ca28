"""Places of keys and values: lines and columns of YAML, paths of keys in TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava_custom.files.source import Node, Place
from ottava_custom.files.toml_file import parse_toml
from ottava_custom.files.yaml_file import parse_yaml


def walk(node: Node) -> Iterator[tuple[str, Place, Place]]:
    """Every key, its place and that of its value."""
    if isinstance(node.value, dict):
        for key, inner in node.value.items():
            yield key, node.keys[key], inner.place
            yield from walk(inner)
    elif isinstance(node.value, list):
        for inner in node.value:
            yield from walk(inner)


TOML = """
one = {two = [1, {three = 2}]}
four.five.six = "x"
"a b"."c.d" = 3
[[tables]]
name = 4
[[tables]]
[tables.inner]
name-2 = [[5]]
"""


def test_the_places_of_toml_are_the_paths_of_keys() -> None:
    root = parse_toml("a.toml", TOML)
    assert root is not None
    assert root.plain() == tomllib.loads(TOML)
    found = list(walk(root))
    assert all(key == value for _, key, value in found)
    assert {(key, place.position) for key, place, _ in found} == {
        *[("one", "one"), ("two", "one.two"), ("three", "one.two[1].three")],
        *[("four", "four"), ("five", "four.five"), ("six", "four.five.six")],
        *[("a b", "'a b'"), ("c.d", "'a b'.'c.d'")],
        *[("tables", "tables"), ("name", "tables[0].name"), ("inner", "tables[1].inner")],
        ("name-2", "tables[1].inner.name-2"),
    }
    assert all(place.line is None for _, place, _ in found)


names = st.integers(0, 10**6).map(lambda number: f"key{number}x")
leaves = st.one_of(
    st.integers(-9, 9),
    st.booleans(),
    st.sampled_from(["a", "b: c", "# d", "- e", "", "é", "x\ny"]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(names, trees, min_size=1, max_size=4),
    st.sampled_from([None, True, False]),
    st.booleans(),
)
def test_the_places_of_yaml(tree: dict[str, Any], flow: bool | None, unicode: bool) -> None:
    text = yaml.safe_dump(
        tree, default_flow_style=flow, allow_unicode=unicode, width=40, sort_keys=False
    )
    root = parse_yaml("a.yaml", text)
    assert root is not None
    assert root.plain() == tree
    counts: dict[str, list[str]] = {}
    for key, place, _ in walk(root):
        counts.setdefault(key, []).append(place.position)
    for key, places in counts.items():
        # Keys stand nowhere else, and are found in the order of the text.
        starts = [at for at in range(len(text)) if text.startswith(key, at)]
        columns = [(text[:at].count("\n") + 1, at - text.rfind("\n", 0, at)) for at in starts]
        assert places == [f"line {line}, column {column}" for line, column in columns]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab.=[]{}\"'#\n 1,-:&*!?|>\\", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    from ottava.errors import OptionError

    for suffix, parse in (("yaml", parse_yaml), ("toml", parse_toml)):
        try:
            root = parse(f"a.{suffix}", text)
        except OptionError as error:
            for line in re.findall(r"^a.\w+, line (\d+)", str(error)):
                assert 1 <= int(line) <= text.count("\n") + 1
        else:
            for _, *places in walk(root) if root is not None else ():
                lines = [place.line for place in places]
                assert (
                    lines == [None, None]
                    if suffix == "toml"
                    else all(line is not None for line in lines)
                )
