"""``benchmarks.mutants`` on a package of two functions: its mutants, and a suite that weakens."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed: nox -s mutants")

from benchmarks.mutants import __main__ as program
from benchmarks.mutants.source import mutants_of

ROOT = Path(__file__).parents[2]

TABLE = """
seed = "toy"
sample = 50
options = ["-x", "-q", "-p", "no:cacheprovider"]
operators = [
    "AddNot", "NumberReplacer", "RemoveCall", "RemoveDecorator", "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_BitOr_BitAnd", "ReplaceTrueWithFalse",
]
[rooms.toy]
sources = ["packages/toy/src/toy/*.py"]
exclude = ["packages/toy/src/toy/excluded.py"]
tests = ["tests/test_toy.py"]
"""
SOURCE = '''
"""1 + 1."""
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Number = int | float

__all__ = ["count"] + ["checked"]
Alias = int | list[int]


def count(end: "int | None") -> "int | None":
    number = 0
    while number < end:
        number += 1
    return number


def check(value):
    if value == 7:  # pragma: no mutate
        raise ValueError(f"{value + 1}")


@lru_cache(maxsize=1)
def checked(value):
    check(value)
    return value + value
'''
TEST = """
import pytest
import toy

def test_count():
    assert toy.count(3) == 3
    assert toy.count(0) == 0

def test_checked():
    assert toy.checked(3) == 6
    with pytest.raises(ValueError):
        toy.checked(7)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # pytest starts in half the time without the plugins that are installed.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    files = {
        "benchmarks/mutants/rooms.toml": TABLE,
        "packages/toy/src/toy/__init__.py": SOURCE,
        "packages/toy/src/toy/excluded.py": SOURCE,
        "tests/test_toy.py": TEST,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def table_of(root: Path) -> program.Table:
    path = root / program.FOLDER / "rooms.toml"
    return program.Table(**tomllib.loads(path.read_text(encoding="utf-8")))


def outcomes(root: Path) -> dict[tuple[str, str], list[str]]:
    """Outcomes by operator and text of the recorded mutants."""
    results = json.loads((root / program.FOLDER / "results.json").read_text(encoding="utf-8"))
    lines = SOURCE.splitlines()
    table: dict[tuple[str, str], list[str]] = {}
    for entry in results["rooms"]["toy"]["mutants"]:
        key = entry["operator"], lines[entry["line"] - 1].strip()
        table.setdefault(key, []).append(entry["outcome"])
    return {key: sorted(values) for key, values in table.items()}


def change(root: Path, name: str, before: str, after: str) -> None:
    path = root / name
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")


def test_what_cannot_matter_has_no_mutants(toy: Path) -> None:
    """Annotations, texts of errors, __all__, TYPE_CHECKING, pragmas, options of decorators."""
    mutants = mutants_of("toy.py", SOURCE, table_of(toy).operators)
    assert sorted((m.operator, m.scope, m.text) for m in mutants) == [
        ("AddNot", "count", "while number < end:"),
        *[("NumberReplacer", "count", "number += 1")] * 2,
        *[("NumberReplacer", "count", "number = 0")] * 2,
        ("RemoveCall", "checked", "check(value)"),
        ("ReplaceBinaryOperator_Add_Sub", "checked", "return value + value"),
    ]


@pytest.mark.slow
def test_a_weaker_suite_fails(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "packages/toy/src/toy/__init__.py"
    assert program.main(["--write"], toy) == 0
    assert outcomes(toy) == {
        ("AddNot", "while number < end:"): ["killed"],
        ("NumberReplacer", "number = 0"): ["killed", "survived"],
        ("NumberReplacer", "number += 1"): ["killed", "timed out"],
        ("RemoveCall", "check(value)"): ["killed"],
        ("ReplaceBinaryOperator_Add_Sub", "return value + value"): ["killed"],
    }
    assert (toy / source).read_text(encoding="utf-8") == SOURCE
    assert not list(toy.rglob("__pycache__"))

    # Without the test of the refusal the check could go; a line that is gone is not tried.
    change(toy, "tests/test_toy.py", "toy.checked(7)", "raise ValueError")
    change(toy, source, "number += 1", "number = number + 1")
    capsys.readouterr()
    assert program.main(["toy"], toy) == 1
    output = capsys.readouterr().out
    for words in ("-    check(value)", "3 of 5 killed; 1 that were killed before survive"):
        assert words in output
    assert "2 skipped" in output


def test_tests_that_fail_by_themselves_say_nothing(toy: Path) -> None:
    change(toy, "tests/test_toy.py", "== 6", "== 5")
    with pytest.raises(program.UnmutatedFails, match="assert 6 == 5"):
        program.main(["--write"], toy)


def test_a_sample_is_the_same_whatever_else_there_is(toy: Path) -> None:
    """In another file, and above in the same one."""
    before = [mutant.identity for mutant in table_of(toy).mutants("toy", toy)]
    other = toy / "packages/toy/src/toy/another.py"
    other.write_text("def two():\n    return 1 + 1\n", encoding="utf-8")
    change(toy, "packages/toy/src/toy/__init__.py", "def count", "ONE = 1 + 1\n\n\ndef count")
    after = [mutant.identity for mutant in table_of(toy).mutants("toy", toy)]
    assert len(after) == len(before) + 10
    assert [identity for identity in after if identity in before] == before


def test_rooms_have_files_and_tests() -> None:
    table = table_of(ROOT)
    for name, room in table.rooms.items():
        patterns = [*room["sources"], *room.get("exclude", [])]
        assert [p for p in patterns if not list(ROOT.glob(p))] == [], name
        paths = [argument for argument in room["tests"] if argument.startswith("tests/")]
        assert paths, name
        assert [p for p in paths if not (ROOT / p.split("::")[0]).exists()] == [], name
