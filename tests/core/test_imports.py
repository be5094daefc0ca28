"""Imports go down: no circles in any package, and in core only from a room to those below it, as
CONTRIBUTING.md says.

Every import counts: those under ``TYPE_CHECKING``, inside functions, and of modules that are found
by their names, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import floors as drawn
from tests.core import forking

# The sources are read once.
pytestmark = pytest.mark.xdist_group("forked processes")

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for p in ROOT.glob("packages/*/src/*") if (p / "__init__.py").exists())
CORE = ROOT / "packages" / "core" / "src" / "ottava"
#: The one module that finds another by its name, upwards; the package itself, which has every
#: public name, does too.
UPWARDS = {"ottava", "ottava.tensors.slots"}
COMPILED = ("_cpu", "_cuda")
#: Functions that take the name of a module.
FINDERS = ("import_module", "__import__", "resolve_name")


def modules(package: Path) -> dict[str, Path]:
    """The modules of a package by name."""
    paths = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def found_by_name(call: ast.Call, known: Iterable[str]) -> list[str]:
    """The modules that a call may import, by a name that the file spells out, or of which it has
    the beginning."""
    if ast.unparse(call.func).rpartition(".")[2] not in FINDERS or not call.args:
        return []
    argument = call.args[0]
    start = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
    if not isinstance(start, ast.Constant) or not isinstance(start.value, str):
        return []
    if start is not argument:
        return [name for name in known if name.startswith(start.value)]
    return [name for name in known if name == start.value.partition(":")[0]]


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What a module imports of its own package, wherever in it the import stands."""
    text = path.read_text(encoding="utf-8")
    finds = name not in UPWARDS and any(finder in text for finder in FINDERS)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".") + ["__init__"] * (path.name == "__init__.py")
            above = parents[: -node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                if inner in known:
                    yield inner
                elif origin in known and alias.name not in COMPILED:
                    yield origin
        elif finds and isinstance(node, ast.Call):
            yield from found_by_name(node, known)


@cache
def graph(package: Path) -> dict[str, set[str]]:
    """Module -> the modules of its own package that it imports."""
    known = modules(package)
    return {name: set(imported(name, path, known)) - {name} for name, path in known.items()}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, if there are any."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.mark.parametrize("package", SOURCES, ids=lambda package: package.name)
def test_no_package_has_circles(package: Path) -> None:
    assert circle(graph(package)) == []
    assert len(graph(package)) > (60 if package == CORE else 1)


PLANTED = [
    "from planted.one import value\n",
    "from .one import value\n",
    "from planted import one\n",
    "import planted.one\n",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.one import value\n",
    "def ask():\n    from planted import value\n",
    "import importlib\ndef ask():\n    importlib.import_module('planted.one')\n",
    "from pkgutil import resolve_name\ndef ask():\n    resolve_name('planted.one:value')\n",
    "from importlib import import_module\ndef ask(name):\n    import_module(f'planted.{name}')\n",
]


@pytest.mark.parametrize("source", ["ask = None\n", *PLANTED])
def test_a_planted_circle_is_found(source: str, tmp_path: Path) -> None:
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("from planted.one import value\n")
    (package / "one.py").write_text("from planted.two import ask\nvalue = 1\n")
    (package / "two.py").write_text(source)
    found = circle(graph(package))
    assert ({"planted.one", "planted.two"} <= set(found)) == (source in PLANTED)


def test_rooms_of_core_import_what_is_below_them_as_the_pages_say() -> None:
    floors = {room: floor for floor, rooms in drawn.floors().items() for room in rooms}
    edges = {(name, other) for name, others in graph(CORE).items() for other in others}
    rooms = {
        (one.split(".")[1], two.split(".")[1]) for one, two in edges if "ottava" not in (one, two)
    }
    assert [edge for edge in rooms if floors[edge[1]] > floors[edge[0]]] == []
    # The package itself, which names everything, is for the commands.
    assert {name.split(".")[1] for name, other in edges if other == "ottava"} <= {"cli"}
    assert set(floors) == {name.split(".")[1] for name in modules(CORE) if name != "ottava"}
    assert drawn.drawing() == drawn.DRAWING.read_text(), "run python tests/floors.py"


def test_one_module_finds_others_upwards_by_their_names_on_first_use() -> None:
    """As in a process that has not imported ``ottava.distributed``."""
    known = modules(CORE)
    texts = {name: path.read_text(encoding="utf-8") for name, path in known.items()}
    found = {
        name
        for name, text in texts.items()
        if "import_module" in text or "resolve_name" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and found_by_name(node, known)
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
    expected = str([f"ottava.distributed.{name}" for name in sorted(asked)])
    assert done.stdout.strip() == expected, done.stderr
