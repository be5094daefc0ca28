"""Places of keys and values, for documents of any form, against the text that was written."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava_custom.files.nodes import Node
from ottava_custom.files.source import Source
from ottava_custom.files.toml_file import parse_toml
from ottava_custom.files.toml_places import find_places
from ottava_custom.files.yaml_file import parse_yaml

# Texts that look like something else, were they not texts or comments.
DECOYS = ("k1 = 1", "[k2]", "[[k3]]", "]", "}", "#", "{ k4 = 1 }", "", "=", "k5.k6", '"', "'", "\\", "é\u2028")
SCALARS = [
    *("1", "-0.5e3", "true", "inf", "0xff", "1979-05-27", "1979-05-27 07:32:00", "1979-05-27T07:32:00Z", "07:32:00.5"),
    *(
        '""',
        "''",
        '"""x"""',
        "''''a'''",
        "'''a'''''",
        '""""a"""""',
        "'''\n]\n'''",
        '"""\nk7 = 1\n\\"\\"\\"\n[[k8]]\n"""',
        r'"\\"',
        r'"\""',
    ),
]


@dataclass
class Written:
    """A TOML document as it is written, with the place of each key that is written for the first time."""

    text: str = ""
    numbers: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)

    def add(self, text: str) -> None:
        self.text += text

    def key(self, quoted: int, name: str | None = None) -> str:
        """Write a key that is nowhere else, or one that is known; its name."""
        if name is None:
            self.numbers += 1
            name = f"key{self.numbers}" + (" .=é#" if quoted else "")
        self.keys.setdefault(name, len(self.text))
        if quoted or not name.isalnum():
            self.add(json.dumps(name, ensure_ascii=False) if quoted != 1 else f"'{name}'")
        else:
            self.add(name)
        return name


def space(draw: Any, out: Written, *, lines: bool) -> None:
    """Blanks, and where several lines are allowed comments that look like keys."""
    for _ in range(draw(st.integers(0, 2))):
        decoy = draw(st.sampled_from(DECOYS))
        out.add(draw(st.sampled_from([" ", "\t", *(["\n", f"# {decoy}\n"] if lines else [])])))


def value(draw: Any, out: Written, depth: int) -> None:
    kind = draw(st.integers(0, 3 if depth < 3 else 1))
    if kind == 0:
        out.add(draw(st.sampled_from(SCALARS)))
    elif kind == 1:
        text = draw(st.sampled_from(DECOYS))
        out.add(json.dumps(text, ensure_ascii=False))
    elif kind == 2:
        out.add("[")
        for number in range(draw(st.integers(0, 3))):
            if number:
                out.add(",")
            space(draw, out, lines=True)
            value(draw, out, depth + 1)
            space(draw, out, lines=True)
        out.add("]")
    else:
        out.add("{")
        for number in range(draw(st.integers(0, 3))):
            if number:
                out.add(",")
            space(draw, out, lines=False)
            pair(draw, out, depth + 1)
            space(draw, out, lines=False)
        out.add("}")


def pair(draw: Any, out: Written, depth: int) -> None:
    name = ""
    for number in range(draw(st.integers(1, 3))):
        if number:
            out.add(draw(st.sampled_from([".", " . ", "\t."])))
        name = out.key(draw(st.integers(0, 2)))
    out.add(draw(st.sampled_from(["=", " = ", "\t=  "])))
    out.values[name] = len(out.text)
    value(draw, out, depth)


@st.composite
def documents(draw: Any) -> Written:
    out = Written()
    arrays: list[str] = []
    tables: list[str] = []
    # Tables that only stand in front of a dot so far.
    implied: list[str] = []
    for _ in range(draw(st.integers(0, 6))):
        space(draw, out, lines=True)
        if out.text and not out.text.endswith("\n"):
            out.add("\n")
        kind = draw(st.integers(0, 3))
        opening, closing = ("[[", "]]") if kind >= 2 else ("[", "]")
        if kind:
            out.add(opening)
            space(draw, out, lines=False)
            if kind == 1 and implied and draw(st.booleans()):
                name = implied.pop()
                out.keys[name] = len(out.text)
                out.key(0, name)
            elif kind == 1 and draw(st.integers(0, 3)) == 0:
                implied.append(out.key(0))
                out.add(" . ")
                out.key(2)
            elif kind == 3 and arrays and draw(st.booleans()):
                out.key(draw(st.sampled_from([0, 2])), draw(st.sampled_from(arrays)))
            else:
                above = [*arrays, *tables]
                if above and draw(st.booleans()):
                    out.key(0, draw(st.sampled_from(above)))
                    out.add(".")
                    made = None
                else:
                    made = arrays if kind >= 2 else tables
                name = out.key(draw(st.sampled_from([0, 2])))
                if made is not None and name.isalnum():
                    made.append(name)
            space(draw, out, lines=False)
            out.add(closing)
            out.add(draw(st.sampled_from(["", " ", " # [a]"])))
            out.add("\n")
        for _ in range(draw(st.integers(0, 3))):
            pair(draw, out, 0)
            out.add(draw(st.sampled_from(["\n", " # k9 = 1\n", "\n\n"])))
    return out


def walk(node: Node) -> Iterator[tuple[str, int, int]]:
    """Every key, its place and that of its value."""
    if isinstance(node.value, dict):
        for key, inner in node.value.items():
            yield key, node.keys[key], inner.index
            yield from walk(inner)
    elif isinstance(node.value, list):
        for inner in node.value:
            yield from walk(inner)


def check_places_of_toml(out: Written) -> None:
    values = tomllib.loads(out.text)  # the document is right
    source = Source("a.toml", out.text)
    root = parse_toml(source)
    assert find_places(out.text).twice is None
    if root is None:
        assert not values
        return
    assert root.plain() == values
    found = list(walk(root))
    assert {key for key, _, _ in found} == set(out.keys)
    for key, index, at in found:
        assert index == out.keys[key]
        assert at == out.values.get(key, at)
        line, column = source.place(index)
        assert (line, column) == (out.text[:index].count("\n") + 1, index - out.text.rfind("\n", 0, index))


@settings(max_examples=100, deadline=None)
@given(documents())
def test_the_places_of_toml(out: Written) -> None:
    check_places_of_toml(out)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(documents())
def test_the_places_of_many_documents(out: Written) -> None:
    check_places_of_toml(out)


names = st.integers(0, 10**6).map(lambda number: f"key{number}x")
leaves = st.one_of(
    st.integers(-9, 9), st.booleans(), st.sampled_from(["a", "b: c", "# d", "- e", "", "é\u2028", "x\ny"])
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, trees, min_size=1, max_size=4), st.sampled_from([None, True, False]), st.booleans())
def test_the_places_of_yaml(tree: dict[str, Any], flow: bool | None, unicode: bool) -> None:
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=unicode, width=40, sort_keys=False)
    root = parse_yaml(Source("a.yaml", text))
    assert root is not None
    assert root.plain() == tree
    counts: dict[str, list[int]] = {}
    for key, index, _ in walk(root):
        assert text.startswith(key, index)
        counts.setdefault(key, []).append(index)
    for key, places in counts.items():
        # Keys stand nowhere else, and are found in the order of the text.
        assert places == [at for at in range(len(text)) if text.startswith(key, at)]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab.=[]{}\"'#\n 1,-:&*!?|>\\", max_size=60))
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    from ottava.errors import OptionError

    for suffix, parse in (("yaml", parse_yaml), ("toml", parse_toml)):
        try:
            root = parse(Source(f"a.{suffix}", text))
        except OptionError as error:
            line = int(str(error).split(", line ")[1].split(",")[0])
            assert 1 <= line <= text.count("\n") + 1
        else:
            for _, index, at in walk(root) if root is not None else ():
                assert 0 <= index <= len(text)
                assert 0 <= at <= len(text)
