"""Which rule serves, and which never does, against small functions that say it another way."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava.errors import OptionError
from ottava.recipes.patterns import fits as fits_a_layer
from ottava.recipes.role import QuantizerRole

sys.path.insert(0, str(Path(__file__).parent))

from file_plugins import recipe_file_packages  # noqa: F401

from ottava_custom.files import FileFactory
from ottava_custom.files.rules import covers

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


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab.", max_size=8), patterns)
def test_matching(name: str, pattern: str) -> None:
    assert fits_a_layer(name, pattern) == reaches(name, pattern)


@settings(max_examples=300, deadline=None)
@given(patterns, patterns)
def test_what_is_covered_has_no_name_of_its_own(wide: str, narrow: str) -> None:
    if covers(wide, narrow):
        assert not [name for name in NAMES if reaches(name, narrow) and not reaches(name, wide)]


def test_what_covers() -> None:
    for wide, narrow in (
        *(
            ("*", "a"),
            ("**", "*"),
            ("a", "a"),
            ("a", "a.b"),
            ("a", "a.*"),
            ("a.*", "a.*.b"),
            ("*.b", "a.?.b"),
        ),
        ("[ab]", "[ab]"),
    ):
        assert covers(wide, narrow), (wide, narrow)
    for wide, narrow in (
        *(
            ("a", "*"),
            ("a", "ab"),
            ("a.b", "a"),
            ("?", "*"),
            ("a*", "*"),
            ("*.b", "*.c"),
            ("*]", "[a]"),
            ("*b*", "[ab]"),
        ),
        ("[ab]", "a*"),
    ):
        assert not covers(wide, narrow), (wide, narrow)


keys = st.lists(
    st.sampled_from(["all", "forward", "backward", *ROLES]), min_size=1, max_size=3, unique=True
)
rules = st.lists(st.tuples(st.lists(patterns, min_size=1, max_size=2), keys), max_size=4)


def serving(
    rules: list[tuple[list[str], list[str]]], name: str, role: str
) -> tuple[int, str] | None:
    """Number of the rule and key that serve; None for the default."""
    for number, (patterns, keys) in enumerate(rules):
        if any(reaches(name, pattern) for pattern in patterns):
            for key in (role, "backward" if role.startswith("grad") else "forward", "all"):
                if key in keys:
                    return number, key
    return None


def check_rules(rules: list[tuple[list[str], list[str]]]) -> None:
    """Where rules are refused, the key that is named serves no layer."""
    lines: dict[int, tuple[int, str] | None] = {1: None}
    text = "default: identity\n"
    for number, (found, keys) in enumerate(rules):
        text += "layers:\n" * (not number) + f"- match: {json.dumps(found)}\n"
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
    for name in NAMES[::7]:
        for role in ROLES:
            place = factory.explain(QuantizerRole("linear", role, name)).place
            assert lines[int(place.removeprefix("line "))] == serving(rules, name, role)


@settings(max_examples=60, deadline=None)
@given(rules)
def test_the_rule_that_serves(rules: list[tuple[list[str], list[str]]]) -> None:
    check_rules(rules)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(rules)
def test_the_rules_that_serve_in_many_files(rules: list[tuple[list[str], list[str]]]) -> None:
    check_rules(rules)
