"""Random recipe files: which rule serves, and which never does, against small functions that say it
another way."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava.errors import OptionError
from ottava.recipes import QuantizerRole
from ottava_custom.files import FileFactory


@settings(max_examples=50)
@given(st.text(alphabet="ab.=[]{}\"'#\n 1,-:&*!?|>\\", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for suffix in ("yaml", "toml"):
        try:
            FileFactory(f"a.{suffix}", text)
        except OptionError as error:
            for line in re.findall(r"^a.\w+, line (\d+)", str(error)):
                assert 1 <= int(line) <= text.count("\n") + 1


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


@functools.cache
def reaches(name: str, pattern: str) -> bool:
    """Whether it fits a name, or the name of a module around it."""
    parts = name.split(".")
    return any(fits(".".join(parts[: count + 1]), pattern) for count in range(len(parts)))


COVERING = ["* a", "** *", "a a", "a a.b", "a a.*", "a.* a.*.b", "*.b a.?.b", "[ab] [ab]"]
APART = ["a *", "a ab", "a.b a", "? *", "a* *", "*.b *.c", "*] [a]", "*b* [ab]", "[ab] a*"]


@pytest.mark.parametrize("pair", [*COVERING, *APART])
def test_which_pattern_takes_all_layers_of_another(pair: str) -> None:
    rules = ", ".join(f"{{match: '{pattern}', all: identity}}" for pattern in pair.split())
    covers: Any = contextlib.nullcontext()
    if pair in COVERING:
        covers = pytest.raises(OptionError, match="'all' never serves, because line 2")
    with covers:
        FileFactory("a.yaml", f"default: identity\nlayers: [{rules}]")


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
        # A tensor of another kind is one of the forward pass.
        for role in (*ROLES, "of-another-kind"):
            place = factory.explain(QuantizerRole("linear", role, name)).place
            assert lines[int(place.removeprefix("line "))] == serving(rules, name, role)


@pytest.mark.parametrize("examples", [25, pytest.param(2000, marks=pytest.mark.slow)])
def test_the_rule_that_serves(examples: int) -> None:
    settings(max_examples=examples)(given(rules)(check_rules))()
