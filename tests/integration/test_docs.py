"""The API pages have every public name, the command line's page every option, the building page
every session."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import typer

import ottava
import ottava.errors
import ottava_bisect
import ottava_blockwise
import ottava_current
import ottava_custom
import ottava_debug
import ottava_delayed
import ottava_integrations
import ottava_mxfp8
import ottava_rowwise
import ottava_testing
from ottava.cli.main import app
from ottava.recipes import hookspecs

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
DIRECTIVE = re.compile(r"^\.\. (auto\w+|data):: ([\w.]+)\n((?:   :.*\n)*)", re.M)

# What authors of recipes build on, besides what the packages export: every member of these is
# documented.
EXTENSION_POINTS = [
    "ottava.Quantizer",
    "ottava.QuantizedTensor",
    "ottava.QuantizedTensorStorage",
    "ottava.Recipe",
    "ottava.recipes.RecipeState",
    "ottava.tensors.StorageSpec",
]
HOOKS = [
    f"ottava.recipes.hookspecs.{name}" for name in vars(hookspecs) if name.startswith("ottava_")
]
ERRORS = [
    f"ottava.errors.{name}"
    for name, value in vars(ottava.errors).items()
    if isinstance(value, type)
]


def directives() -> dict[str, str]:
    """Documented name -> the options of its directive; the members of a module are names of their
    own."""
    found: dict[str, str] = {}
    for page in API.glob("*.md"):
        for kind, name, options in DIRECTIVE.findall(page.read_text()):
            found[name] = options
            if kind == "automodule" and ":members:" in options:
                members = vars(importlib.import_module(name))
                found.update(
                    {f"{name}.{member}": "" for member in members if not member.startswith("_")}
                )
    return found


def resolve(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for attribute in parts[count:]:
            value = getattr(value, attribute)
        return value
    raise AssertionError(f"{name} cannot be imported")


DOCUMENTED = directives()


def exported(module: Any) -> list[str]:
    return [f"{module.__name__}.{name}" for name in module.__all__]


PACKAGES = [
    f"ottava.{name}"
    for name in ("nn", "recipes", "tensors", "kernels", "distributed", "checkpoint", "debug")
]
PUBLIC = sorted(
    {
        *exported(ottava),
        *exported(ottava_bisect),
        *exported(ottava_blockwise),
        *exported(ottava_current),
        *exported(ottava_custom),
        *exported(ottava_debug),
        *exported(ottava_delayed),
        *exported(ottava_integrations),
        *exported(ottava_mxfp8),
        *exported(ottava_rowwise),
        *exported(ottava_testing),
        *(name for package in PACKAGES for name in exported(importlib.import_module(package))),
        *HOOKS,
        *ERRORS,
        "ottava.gemm.gemm",
    }
)


def test_hooks_and_errors_are_found() -> None:
    assert len(HOOKS) == 2
    assert "ottava.errors.OttavaError" in ERRORS


def test_public_names_are_in_the_api_pages() -> None:
    # The same object may be documented by another name.
    others = {
        id(value) for value in map(resolve, DOCUMENTED) if callable(value) or isinstance(value, str)
    }
    assert [
        name for name in PUBLIC if name not in DOCUMENTED and id(resolve(name)) not in others
    ] == []


def test_what_is_documented_exists_and_has_a_docstring() -> None:
    values = {name: resolve(name) for name in DOCUMENTED if not name.endswith("hookimpl")}
    assert len(values) > 100
    assert [name for name, value in values.items() if callable(value) and not value.__doc__] == []


def test_extension_points_have_all_their_members() -> None:
    left_out = []
    for name in EXTENSION_POINTS:
        assert re.search(r":members:\s*$", DOCUMENTED[name], re.M), name
        own = {key: value for key, value in vars(resolve(name)).items() if not key.startswith("_")}
        for key, value in own.items():
            if callable(value) and not isinstance(value, type):
                documented = any(
                    getattr(getattr(base, key, None), "__doc__", None)
                    for base in resolve(name).__mro__
                )
                left_out += [] if documented else [f"{name}.{key}"]
    assert left_out == []


def test_every_page_is_in_the_contents() -> None:
    listed = (API / "index.md").read_text()
    assert all(
        re.search(rf"^{page.stem}$", listed, re.M)
        for page in API.glob("*.md")
        if page.stem != "index"
    )


def test_the_command_lines_page_has_every_option() -> None:
    page = (API / "cli.md").read_text()
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    names = group.list_commands(context)
    assert "check-recipe" in names
    for name in names:
        command = group.get_command(context, name)
        section = re.search(rf"^## `ottava {name}`\n(.*?)(?=^## )", page, re.M | re.S)
        assert section, name
        for parameter in command.params:
            assert f"`{parameter.opts[0]}" in section[1], f"{name} {parameter.opts[0]}"


def test_the_building_page_has_every_session() -> None:
    page = (ROOT / "docs" / "building.md").read_text()
    sessions = re.findall(
        r"^@nox\.session.*?\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(), re.M | re.S
    )
    assert len(sessions) > 5
    assert [name for name in sessions if f"| `{name}` |" not in page] == []


def test_readme_and_quickstart_install_the_same_from_a_clone() -> None:
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md")]
    assert all("pip install ./" in page for page in pages)
    (command,) = {found for page in pages for found in re.findall(r"^pip install .*$", page, re.M)}
    folders = command.removeprefix("pip install ").split()
    assert [folder for folder in folders if not (ROOT / folder / "pyproject.toml").exists()] == []
