"""What the documentation must have: every public name, option, session, hook and field. Its links
lead to pages and headings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import typer

import ottava
import ottava.errors
from ottava import FactorySpec, RecipeSpec
from ottava.cli.main import app
from ottava.recipes import hookspecs
from tests.pages import DOCS, ROOT

API = DOCS / "api"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)


# -- public names --

DIRECTIVE = re.compile(r"^\.\. (auto\w+|data):: ([\w.]+)\n((?:   :.*\n)*)", re.M)
PARTS = ("nn", "recipes", "tensors", "kernels", "distributed", "checkpoint", "debug")
#: Each states what is public in `__all__`.
MODULES = [
    *(path.parent.name for path in ROOT.glob("packages/*/src/ottava_*/__init__.py")),
    *("ottava", *(f"ottava.{part}" for part in PARTS)),
]
#: Bases for recipes; all members of these are documented.
EXTENSION_POINTS = [
    "ottava.Quantizer",
    "ottava.QuantizedTensor",
    "ottava.QuantizedTensorStorage",
    "ottava.Recipe",
    "ottava.recipes.RecipeState",
    "ottava.tensors.StorageSpec",
]


def public_names() -> set[str]:
    names = {f"ottava.errors.{n}" for n, v in vars(ottava.errors).items() if isinstance(v, type)}
    names |= {f"ottava.recipes.hookspecs.{name}" for name in HOOKS}
    for module in MODULES:
        exported = getattr(importlib.import_module(module), "__all__", ())
        names |= {f"{module}.{name}" for name in exported}
    return names | {"ottava.gemm.gemm"}


def documented_names() -> dict[str, str]:
    """Names with the options of their directives; members of a module are names of their own."""
    names: dict[str, str] = {}
    for page in API.glob("*.md"):
        for kind, name, options in DIRECTIVE.findall(page.read_text()):
            names[name] = options
            if kind == "automodule" and ":members:" in options:
                members = vars(importlib.import_module(name))
                names |= {f"{name}.{member}": "" for member in members if member[0] != "_"}
    return names


def test_the_api_pages_have_every_public_name_and_its_docstring() -> None:
    documented, public = documented_names(), public_names()
    assert {"ottava.errors.OttavaError", "ottava_custom.by_layer", "ottava.nn.Linear"} <= public
    values = {name: resolve_name(name) for name in documented}
    bare = {name for name, value in values.items() if callable(value) and not value.__doc__}
    assert bare <= {"ottava.hookimpl"}
    # The same object may be documented by another name.
    others = {id(value) for value in values.values() if callable(value) or isinstance(value, str)}
    missing = public - documented.keys()
    assert [name for name in missing if id(resolve_name(name)) not in others] == []


def test_the_api_pages_have_every_member_of_an_extension_point() -> None:
    documented, missing = documented_names(), []
    for name in EXTENSION_POINTS:
        assert re.search(r":members:\s*$", documented[name], re.M), name
        cls = resolve_name(name)
        for member, value in vars(cls).items():
            if member.startswith("_") or not callable(value) or isinstance(value, type):
                continue
            if not inspect.getdoc(getattr(cls, member)):
                missing.append(f"{name}.{member}")
    assert missing == []


# -- commands, sessions, packages --


def test_the_page_of_the_command_line_has_every_option() -> None:
    page = (API / "cli.md").read_text()
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    names = group.list_commands(context)
    assert "check-recipe" in names
    for name in names:
        section = re.search(rf"^## `ottava {name}`\n(.*?)(?=^## )", page, re.M | re.S)
        assert section, name
        for parameter in group.get_command(context, name).params:
            assert f"`{parameter.opts[0]}" in section[1], f"{name} {parameter.opts[0]}"


def test_the_building_page_has_every_session() -> None:
    page, noxfile = (DOCS / "building.md").read_text(), (ROOT / "noxfile.py").read_text()
    sessions = re.findall(r"^@nox\.session.*?\ndef (\w+)\(", noxfile, re.M | re.S)
    assert len(sessions) > 5
    assert [name for name in sessions if f"| `{name}` |" not in page] == []


def test_readme_and_quickstart_install_the_same_from_a_clone() -> None:
    pages = [page.read_text() for page in (ROOT / "README.md", DOCS / "quickstart.md")]
    assert all("pip install ./" in page for page in pages)
    (command,) = {found for page in pages for found in re.findall(r"^pip install .*$", page, re.M)}
    folders = command.removeprefix("pip install ").split()
    assert [folder for folder in folders if not (ROOT / folder / "pyproject.toml").exists()] == []


# -- hooks --

PLUGINS = (DOCS / "plugins.md").read_text()
HOOKS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "ottava_spec")}
#: What a hook returns a list of.
SPECS: dict[str, Any] = {
    "ottava_recipes": RecipeSpec,
    "ottava_quantizer_factories": FactorySpec,
}


def rows(text: str, columns: int) -> list[list[str]]:
    """The rows of the tables of so many columns, without code marks."""
    lines = re.findall(r"^\| (.*) \|$", text, re.M)
    cells = [re.split(r"(?<!\\)\|", line.replace("`", "")) for line in lines]
    table = [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]
    return [row for row in table if len(row) == columns and row[0] not in ("field", "---")]


@pytest.mark.parametrize("name", SPECS)
def test_a_hook_is_described_with_every_field_of_what_it_returns(name: str) -> None:
    assert re.findall(r"^### `(ottava_\w+)", PLUGINS, re.M) == list(HOOKS) == list(SPECS)
    signature = inspect.signature(HOOKS[name])
    heading = re.escape(f"### `{name}{signature}`".replace("'", ""))
    section = re.search(rf"^{heading}\n(.*?)(?=^###? )", PLUGINS, re.M | re.S)
    assert section, heading
    table = {row[0]: row[1] for row in rows(section[1], 2)}
    assert all(table.get(key) for key in ("arguments", "returns", "called", "must not"))
    assert all(word in table["arguments"] for word in list(signature.parameters) or ["none"])
    # The example returns what the hook is for.
    blocks = re.findall(r"^```python\n(.*?)^```", section[1], re.M | re.S)
    namespace: dict[str, Any] = {}
    exec(next(block for block in blocks if f"@hookimpl\ndef {name}(" in block), namespace)
    assert [type(spec) for spec in namespace[name]()] == [SPECS[name]]
    described = rows(section[1], 4)
    for field, row in zip(dataclasses.fields(SPECS[name]), described, strict=True):
        required = field.default is dataclasses.MISSING
        default = "required" if required else str(field.default)
        assert row[:3] == [field.name, str(field.type), default]
        assert row[3]


# -- links --

READERS = [
    *PAGES,
    *sorted(path for pattern in ("*.md", ".github/*.md") for path in ROOT.glob(pattern)),
    *sorted(ROOT.glob("packages/*/README.md")),
]
FENCE = re.compile(r"(`{3,})(.*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,3} (.+)$", re.M)
INCLUDE = re.compile(r"^```\{include\} (\S+)$", re.M)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.M | re.S)


def prose(page: Path) -> str:
    """The text of a page without its code, whose comments are no headings."""
    lines: list[str] = []
    end = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line)
        if end:
            end = "" if line.rstrip() == end else end
        elif fence and not fence[2].startswith("{container}"):
            end = fence[1] if fence[2].strip() else ""
        elif not fence:
            lines.append(line)
    return "\n".join(lines)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST name them, and those of a page that it
    includes."""
    texts = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page)))
    names = {text.replace(" ", "-") for text in texts}
    for path in INCLUDE.findall(page.read_text(encoding="utf-8")):
        names |= anchors((page.parent / path).resolve())
    return names


def broken_links(reader: Path) -> list[str]:
    links = []
    for link in LINK.findall(prose(reader)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (reader.parent / path).resolve() if path else reader
        if not target.exists() or (anchor and anchor not in anchors(target)):
            links.append(link)
    return links


def test_links_lead_to_files_and_headings(tmp_path: Path) -> None:
    broken = {reader: links for reader in READERS if (links := broken_links(reader))}
    assert broken == {}
    (tmp_path / "other.md").write_text("# Other\n\n## `main_grad`, and more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#main_grad-and-more) [c](none.md) [d](other.md#none)\n"
        "```text\n[e](none.md)\n```\n"
    )
    assert broken_links(page) == ["none.md", "other.md#none"]


def test_every_page_is_in_one_table_of_contents() -> None:
    entries = [
        (page.parent / f"{line.strip()}.md").resolve()
        for page in PAGES
        for toctree in TOCTREE.findall(page.read_text(encoding="utf-8"))
        for line in toctree.splitlines()
        if line.strip() and not line.startswith(":")
    ]
    assert sorted(entries) == [page for page in PAGES if page != DOCS / "index.md"]
