"""Random recipe files: places of keys, which rule serves, and which never does, against small
functions that say it another way."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava.errors import OptionError
from ottava.recipes import QuantizerRole
from ottava_custom.files import FileFactory
from ottava_custom.files.rules import covers
from ottava_custom.files.source import Node, Place
from ottava_custom.files.toml_file import parse_toml
from ottava_custom.files.yaml_file import parse_yaml

pytestmark = pytest.mark.usefixtures("published_for_files")

# -- places --


def places(node: Node) -> Iterator[tuple[str, Place, Place]]:
    """Every key, its place and that of its value."""
    if isinstance(node.value, dict):
        for key, inner in node.value.items():
            yield key, node.keys[key], inner.place
            yield from places(inner)
    elif isinstance(node.value, list):
        for inner in node.value:
            yield from places(inner)


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
    assert {place.position for _, place, _ in places(root)} == {
        *("one", "one.two", "one.two[1].three", "four", "four.five", "four.five.six"),
        *("'a b'", "'a b'.'c.d'", "tables", "tables[0].name", "tables[1].inner"),
        "tables[1].inner.name-2",
    }
    assert all(key == value and key.line is None for _, key, value in places(root))


names = st.integers(0, 10**6).map(lambda number: f"key{number}x")
leaves = st.sampled_from([7, True, "a", "b: c", "# d", "- e", "", "é", "x\ny"])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.dictionaries(names, trees, min_size=1, max_size=4), st.sampled_from([None, True, False]))
def test_the_places_of_yaml_are_lines_and_columns(tree: dict[str, Any], flow: bool | None) -> None:
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True, width=40)
    root = parse_yaml("a.yaml", text)
    assert root is not None
    assert root.plain() == tree
    found: dict[str, list[str]] = {}
    for key, place, _ in places(root):
        found.setdefault(key, []).append(place.position)
    for key, positions in found.items():
        # Keys stand nowhere else, and are found in the order of the text.
        starts = [at for at in range(len(text)) if text.startswith(key, at)]
        columns = [(text[:at].count("\n") + 1, at - text.rfind("\n", 0, at)) for at in starts]
        assert positions == [f"line {line}, column {column}" for line, column in columns]


@settings(max_examples=100)
@given(st.text(alphabet="ab.=[]{}\"'#\n 1,-:&*!?|>\\", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for suffix in ("yaml", "toml"):
        try:
            FileFactory(f"a.{suffix}", text)
        except OptionError as error:
            for line in re.findall(r"^a.\w+, line (\d+)", str(error)):
                assert 1 <= int(line) <= text.count("\n") + 1


# -- rules --

NAMES = ["".join(letters) for size in range(6) for letters in itertools.product("a.b", repeat=size)]
ROLES = ("input", "weight", "output", "grad_output", "grad_input")
patterns = st.text(alphabet="ab.**?", min_size=1, max_size=5)


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern of letters, * and ? fits all of a name."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(fits(name[at:], pattern[1:]) for at in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and fits(name[1:], pattern[1:])


def reaches(name: str, pattern: str) -> bool:
    """Whether it fits a name, or the name of a module around it."""
    parts = name.split(".")
    return any(fits(".".join(parts[: count + 1]), pattern) for count in range(len(parts)))


@settings(max_examples=100)
@given(patterns, patterns)
def test_a_pattern_that_is_covered_has_no_name_of_its_own(wide: str, narrow: str) -> None:
    if covers(wide, narrow):
        assert not [name for name in NAMES if reaches(name, narrow) and not reaches(name, wide)]


COVERING = ["* a", "** *", "a a", "a a.b", "a a.*", "a.* a.*.b", "*.b a.?.b", "[ab] [ab]"]
APART = ["a *", "a ab", "a.b a", "? *", "a* *", "*.b *.c", "*] [a]", "*b* [ab]", "[ab] a*"]


@pytest.mark.parametrize("pair", [*COVERING, *APART])
def test_which_pattern_covers_another(pair: str) -> None:
    wide, narrow = pair.split()
    assert covers(wide, narrow) is (pair in COVERING)


keys = st.lists(
    st.sampled_from(["all", "forward", "backward", *ROLES]), min_size=1, max_size=3, unique=True
)
rules = st.lists(st.tuples(st.lists(patterns, min_size=1, max_size=2), keys), max_size=4)
RandomRules = list[tuple[list[str], list[str]]]


def serving(rules: RandomRules, name: str, role: str) -> tuple[int, str] | None:
    """Number of the rule and key that serve; None for the default."""
    for number, (patterns, keys) in enumerate(rules):
        if any(reaches(name, pattern) for pattern in patterns):
            for key in (role, "backward" if role.startswith("grad") else "forward", "all"):
                if key in keys:
                    return number, key
    return None


def check_rules(rules: RandomRules) -> None:
    """Each role is served as above; where rules are refused, the key that is named serves none."""
    lines: dict[int, tuple[int, str] | None] = {1: None}
    text = "default: identity\n"
    for number, (patterns, keys) in enumerate(rules):
        text += "layers:\n" * (not number) + f"- match: {json.dumps(patterns)}\n"
        for key in keys:
            text += f"  {key}: identity\n"
            lines[text.count("\n")] = (number, key)
    refusal = ""
    try:
        factory = FileFactory("a.yaml", text)
    except OptionError as error:
        refusal = str(error)
    if refusal:
        refused = re.search(r"a.yaml, line (\d+), column 3: '(\w+)' never serves", refusal)
        assert refused, refusal
        never: Any = lines[int(refused[1])]
        assert never[1] == refused[2]
        assert never not in [serving(rules, name, role) for name in NAMES for role in ROLES]
        return
    for name in NAMES[::17]:
        for role in ROLES:
            place = factory.explain(QuantizerRole("linear", role, name)).place
            assert lines[int(place.removeprefix("line "))] == serving(rules, name, role)


@settings(max_examples=25)
@given(rules)
def test_the_rule_that_serves(rules: RandomRules) -> None:
    check_rules(rules)


@pytest.mark.slow
@settings(max_examples=2000)
@given(rules)
def test_the_rules_that_serve_in_many_files(rules: RandomRules) -> None:
    check_rules(rules)
