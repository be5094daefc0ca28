"""The floors of core: which room may import which, and the drawing and the table that show it.

``python tests/floors.py --write`` writes both. ``tests/core/test_imports.py`` compares the imports
of the code with the floors, and the floors with what is written.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages" / "core" / "src" / "ottava"
PAGE = ROOT / "CONTRIBUTING.md"
DRAWING = ROOT / "docs" / "_static" / "floors.svg"

#: Each floor's rooms (modules and packages of core) with what they hold, from the top. A room may
#: import rooms of its own floor and of those below.
FLOORS: tuple[dict[str, str], ...] = (
    {"cli": "the command `ottava`: recipes and doctor"},
    {"checkpoint": "state dicts and files of quantized tensors"},
    {"debug": "fake quantization, a hook for inspectors"},
    {"distributed": "ranks: shards, amaxes, FSDP2"},
    {"nn": "Linear, its plan, convert"},
    {"recipes": "Recipe, steps, regions, plugins"},
    {"gemm": "operands, and the table of products"},
    {"tensors": "quantizers, storages, quantized tensors"},
    {"kernels": "operations: reference, CPU, CUDA"},
    {
        "layout": "elements, and scales on a grid, as data",
        "formats": "E4M3, E5M2, E8M0",
        "collectives": "all-reduce and all-gather for any caller",
        "filesystem": "files that appear whole or not at all",
        "torch_private": "private names of torch, with fallbacks",
        "errors": "the errors that every room may raise",
    },
)
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


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What a module imports of its own package, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = (
                name.split(".")[: -node.level + (path.name == "__init__.py") or None]
                if node.level
                else []
            )
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                if inner in known:
                    yield inner
                elif origin in known and alias.name not in COMPILED:
                    yield origin
        elif isinstance(node, ast.Call) and name not in UPWARDS:
            yield from found_by_name(node, known)


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


def graph(package: Path) -> dict[str, set[str]]:
    """Module -> the modules of its own package that it imports."""
    known = modules(package)
    return {name: set(imported(name, path, known)) - {name} for name, path in known.items()}


def room(module: str) -> str:
    """The room of core that a module belongs to."""
    return module.split(".")[1]


def floor_of(module: str) -> int:
    """The number of a module's floor, 0 for the ground floor."""
    numbers = [n for n, rooms in enumerate(reversed(FLOORS)) if room(module) in rooms]
    if not numbers:
        raise ValueError(f"{module}: its room is on no floor; add it to FLOORS in {__file__}")
    return numbers[0]


def rooms_of_code() -> set[str]:
    """The rooms that core has. The package itself is none."""
    return {room(name) for name in modules(CORE) if name != "ottava"}


def table() -> str:
    """The rooms in Markdown."""
    rows = ["| floor | room | what it holds |", "|---|---|---|"]
    for number, rooms in zip(reversed(range(len(FLOORS))), FLOORS, strict=True):
        rows += [f"| {number} | `{name}` | {content} |" for name, content in rooms.items()]
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """The text of a page whose table, between two comments, is today's."""
    start, end = "<!-- floors: written by tests/floors.py -->\n", "<!-- end of floors -->"
    pattern = re.compile(f"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.S)
    changed, count = pattern.subn(lambda _: f"\n{table()}\n", text)
    if count != 1:
        raise ValueError(f"{count} places for the table; expected one, between {start!r} and {end}")
    return changed


WIDTH, MARGIN, LINE, ROW = 426, 44, 17, 36


def drawing() -> str:
    """The floors as SVG, with a recipe package beside them."""
    boxes, names, contents = [], [], []
    y = 20
    for floor in FLOORS:
        # A floor of several rooms has their names alone, three a line.
        rooms = list(floor)
        lines = [" · ".join(rooms[i : i + 3]) for i in range(0, len(rooms), 3)]
        height = ROW + LINE * (len(lines) - 1)
        boxes.append(f'<rect x="{MARGIN}" y="{y}" width="{WIDTH}" height="{height}"/>')
        for number, line in enumerate(lines):
            names.append(f'<text x="58" y="{y + 23 + LINE * number}">{line}</text>')
        if len(rooms) == 1:
            content = floor[rooms[0]].replace("`", "")
            contents.append(f'<text x="164" y="{y + 23}">{content}</text>')
        y += height + 6
    bottom = y - 6
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {bottom + 38}" \
font-family="sans-serif" font-size="14">
<title>The floors of core, and a recipe package beside them</title>
<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0L10 5L0 10z" fill="#555"/></marker></defs>
<rect width="760" height="{bottom + 38}" fill="#ffffff"/>
<g fill="#eef3fb" stroke="#3566a8">{"".join(boxes)}</g>
<g font-weight="bold">{"".join(names)}</g>
<g fill="#444">{"".join(contents)}</g>
<rect x="560" y="146" width="180" height="162" rx="6" fill="#fdf0e2" stroke="#c06a15"/>
<g text-anchor="middle"><text x="650" y="182" font-weight="bold">a recipe package</text>\
<text x="650" y="218">a quantizer</text><text x="650" y="244">a recipe</text>\
<text x="650" y="270">an entry point</text></g>
<g stroke="#555" fill="none" stroke-width="1.5" marker-end="url(#a)"><path d="M560 292H474"/>\
<path d="M24 20V{bottom}"/></g>
<path d="M470 240H558" stroke="#c06a15" fill="none" stroke-width="1.5" stroke-dasharray="5 4"/>
<g font-size="12" text-anchor="middle"><text x="517" y="284" fill="#555">imports</text>\
<text x="517" y="232" fill="#8a4a0c">finds</text></g>
<g font-size="12" fill="#555"><text x="20" y="{bottom + 24}">imports only go down</text></g>
<g font-size="12" fill="#444"><text x="560" y="334">Core finds it by its entry point</text>\
<text x="560" y="351">and knows no recipe by name</text><text x="560" y="368">or type.</text></g>
</svg>
"""


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/floors.py --write")
    PAGE.write_text(page(PAGE.read_text()))
    DRAWING.write_text(drawing())
