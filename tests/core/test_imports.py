"""Imports go down: no circles in any package, and in core only from a room to those below it.

Every import counts: those under ``TYPE_CHECKING``, inside functions, and of modules that are found
by their names, too.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import floors
import forking
import pytest
from floors import CORE, ROOT, UPWARDS, graph

PACKAGES = ROOT / "packages"
SOURCES = sorted(path for path in PACKAGES.glob("*/src/*") if (path / "__init__.py").exists())


@cache
def graph_of_core() -> dict[str, set[str]]:
    return graph(CORE)


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


@pytest.mark.parametrize("package", SOURCES, ids=lambda path: path.name)
def test_there_are_no_circles(package: Path) -> None:
    assert circles(graph(package)) == []


def test_every_package_is_counted() -> None:
    assert {
        "ottava",
        "ottava_blockwise",
        "ottava_current",
        "ottava_delayed",
        "ottava_mxfp8",
        "ottava_rowwise",
        "ottava_custom",
        "ottava_testing",
        "ottava_demo",
        "ottava_bisect",
        "ottava_debug",
        "ottava_integrations",
    } <= {path.name for path in SOURCES}
    assert len(graph_of_core()) > 60


PLANTED = {
    "at the top": "from planted.one import value\n",
    "relative": "from .one import value\n",
    "of a module": "from planted import one\n",
    "plain": "import planted.one\n",
    "under TYPE_CHECKING": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from "
    "planted.one import value\n",
    "inside a function": "def ask():\n    from planted.one import value\n    return value\n",
    "by its name": "import importlib\ndef ask():\n    return "
    "importlib.import_module('planted.one').value\n",
    "by its reference": "from pkgutil import resolve_name\ndef ask():\n    return "
    "resolve_name('planted.one:value')\n",
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


def test_rooms_of_core_import_what_is_below_them() -> None:
    edges = {
        (name, other)
        for name, others in graph_of_core().items()
        for other in others
        if "ottava" not in (name, other)
    }
    assert [edge for edge in edges if floors.floor_of(edge[1]) > floors.floor_of(edge[0])] == []
    # The package itself, which names everything, is for the commands.
    users = {name for name, others in graph_of_core().items() if "ottava" in others}
    assert {name.split(".")[1] for name in users} <= {"cli"}


def test_the_floors_are_those_of_the_code() -> None:
    names = [name for rooms in floors.FLOORS for name in rooms]
    assert sorted(names) == sorted(floors.rooms_of_code())


def test_the_written_floors_are_todays() -> None:
    """If not, ``python tests/floors.py --write`` writes them."""
    text = floors.PAGE.read_text()
    assert text == floors.page(text)
    assert floors.DRAWING.read_text() == floors.drawing()


def test_one_module_finds_another_upwards_by_its_name() -> None:
    """Elsewhere a name that is imported at run time is one of the module's own room, or of another
    package."""
    known = floors.modules(CORE)
    calls = [
        (name, node)
        for name, path in known.items()
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    found = {
        name
        for name, node in calls
        if isinstance(node, ast.Call) and floors.found_by_name(node, known)
    }
    assert found == UPWARDS


def test_what_tensors_find_upwards_is_imported_on_first_use() -> None:
    """In a process that has not imported ``ottava.distributed``, as a recipe of its own would
    have."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(CORE.rglob("*.py"))]
    asked = {name for text in sources for name in re.findall(r'above\("(\w+)"\)', text)}
    assert asked == {"batches", "fsdp2", "hooks"}
    code = (
        "import sys, ottava.tensors; from ottava.tensors.slots import above\n"
        "assert not [name for name in sys.modules if name.startswith('ottava.distributed')]\n"
        f"print([above(name).__name__ for name in {sorted(asked)}])"
    )
    done = forking.python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([f"ottava.distributed.{name}" for name in sorted(asked)])


#: Sources that look at their callers, with the reason.
LOOKS = {
    "torch_private.py": "torch.distributed.pipelining tells a model neither its stage nor the "
    "microbatch"
}
#: What asks who calls: the code, or the frames, of callers. (The ``stacklevel`` of warnings asks
#: nothing.)
CALLERS = re.compile(
    r"\b(_getframe\w*|_current_frames|currentframe|f_back|tb_frame|getouterframes|getinnerframes"
    r"|extract_stack|walk_stack)\b"
    r"|\binspect\.(stack|trace)\b|\bfrom inspect import\b[^\n]*\bstack\b"
)


@pytest.mark.parametrize(
    "planted",
    [
        "import sys\nname = sys._getframe(1).f_globals",
        "from sys import _getframe as f",
        "getattr(sys, '_getframe')()",
        "import inspect\ncaller = inspect.stack()[1]",
        "from inspect import isclass, stack",
        "frame = inspect.currentframe()",
        "while frame:\n    frame = frame.f_back",
        "traceback.extract_stack()",
    ],
)
def test_a_planted_look_at_the_caller_is_found(planted: str) -> None:
    assert CALLERS.search(planted)
    assert not CALLERS.search(
        "warnings.warn('x', stacklevel=2); torch.stack(pair); regions.stack; inspect.isclass(c)"
    )


def test_nothing_is_decided_by_who_calls() -> None:
    """No source looks at its callers; one that had to would be named here, with the reason."""
    sources = [
        path
        for package in SOURCES
        for path in package.rglob("*")
        if path.suffix in (".py", ".pyi", ".tmpl")
    ]
    others = [path for path in sources if path.name not in LOOKS]
    found = [
        f"{path}: {match[0]}"
        for path in others
        for match in CALLERS.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert len(sources) > 150
