"""Imports go down: no circles in any package, and in core only from a room to those below it.

Every import counts: those under ``TYPE_CHECKING``, inside functions, and of modules that are found
by their names, too.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests import floors
from tests.core import forking
from tests.floors import CORE, ROOT, UPWARDS, graph

PACKAGES = ROOT / "packages"
SOURCES = sorted(path for path in PACKAGES.glob("*/src/*") if (path / "__init__.py").exists())


@cache
def graph_of(package: Path) -> dict[str, set[str]]:
    return graph(package)


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules that import one another, directly or through others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {name: reached(name) for name in edges}
    found: list[set[str]] = []
    for name in edges:
        together = {other for other in reach[name] if name in reach[other]}
        if name in together and together not in found:
            found.append(together)
    return found


def test_no_package_has_circles() -> None:
    assert {path.name: circles(graph_of(path)) for path in SOURCES if circles(graph_of(path))} == {}
    recipes = {"blockwise", "current", "delayed", "mxfp8", "rowwise", "custom"}
    others = {"testing", "demo", "bisect", "debug", "integrations"}
    names = {path.name for path in SOURCES}
    assert {"ottava"} | {f"ottava_{name}" for name in recipes | others} <= names
    assert len(graph_of(CORE)) > 60


PLANTED = {
    "at the top": "from planted.one import value\n",
    "relative": "from .one import value\n",
    "of a module": "from planted import one\n",
    "plain": "import planted.one\n",
    "under TYPE_CHECKING": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "    from planted.one import value\n",
    "inside a function": "def ask():\n    from planted.one import value\n    return value\n",
    "by its name": "import importlib\ndef ask():\n"
    "    return importlib.import_module('planted.one').value\n",
    "by its reference": "from pkgutil import resolve_name\ndef ask():\n"
    "    return resolve_name('planted.one:value')\n",
    "by the beginning of its name": "from importlib import import_module\n"
    "def ask(name):\n    return import_module(f'planted.{name}').value\n",
    "through the package": "def ask():\n    from planted import value\n    return value\n",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_circle_is_found(planted: str, tmp_path: Path) -> None:
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("from planted.one import value\n")
    (package / "one.py").write_text("from planted.two import ask\nvalue = 1\n")
    (package / "two.py").write_text("ask = None\n")
    assert circles(graph(package)) == []
    (package / "two.py").write_text(PLANTED[planted])
    (found,) = circles(graph(package))
    assert {"planted.one", "planted.two"} <= found


def test_rooms_of_core_import_what_is_below_them_as_the_pages_say() -> None:
    """If a page differs, ``python tests/floors.py --write`` writes it."""
    edges = {(name, other) for name, others in graph_of(CORE).items() for other in others}
    inner = [edge for edge in edges if "ottava" not in edge]
    assert [edge for edge in inner if floors.floor_of(edge[1]) > floors.floor_of(edge[0])] == []
    # The package itself, which names everything, is for the commands.
    assert {name.split(".")[1] for name, other in edges if other == "ottava"} <= {"cli"}
    names = [name for rooms in floors.FLOORS for name in rooms]
    assert sorted(names) == sorted(floors.rooms_of_code())
    text = floors.PAGE.read_text()
    assert text == floors.page(text)
    assert floors.DRAWING.read_text() == floors.drawing()


def test_one_module_finds_others_upwards_by_their_names_on_first_use() -> None:
    """As in a process that has not imported ``ottava.distributed``."""
    known = floors.modules(CORE)
    texts = {name: path.read_text(encoding="utf-8") for name, path in known.items()}
    found = {
        name
        for name, text in texts.items()
        if "import_module" in text or "resolve_name" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and floors.found_by_name(node, known)
    }
    assert found == UPWARDS
    asked = {name for text in texts.values() for name in re.findall(r'above\("(\w+)"\)', text)}
    assert asked == {"batches", "fsdp2", "hooks"}
    code = (
        "import sys, ottava.tensors; from ottava.tensors.slots import above\n"
        "assert not [name for name in sys.modules if name.startswith('ottava.distributed')]\n"
        f"print([above(name).__name__ for name in {sorted(asked)}])"
    )
    done = forking.python(code)
    assert done.stdout.strip() == str([f"ottava.distributed.{name}" for name in sorted(asked)]), (
        done.stderr
    )
