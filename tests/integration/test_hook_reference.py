"""The page on writing recipes has every hook with its signature, and every field of what hooks
return."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from ottava import FactorySpec, RecipeSpec
from ottava.recipes import hookspecs

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
HOOKS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "ottava_spec")}
SPECS = {"ottava_recipes": RecipeSpec, "ottava_quantizer_factories": FactorySpec}


def signature(name: str) -> str:
    """A hook as its heading has it, without the quotes of annotations that are evaluated late."""
    return name + str(inspect.signature(HOOKS[name])).replace("'", "")


def section(name: str) -> str:
    """The text below a hook's heading."""
    found = re.search(rf"^### `{re.escape(signature(name))}`\n(.*?)(?=^###? )", PAGE, re.M | re.S)
    assert found, f"no heading {signature(name)}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, without code marks."""
    found = re.findall(r"^\| (.*) \|$", text, re.M)
    return [
        [cell.strip().replace("`", "").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", r)]
        for r in found
    ]


def declared(spec: Any) -> list[tuple[str, str, str]]:
    """Name, type and default of every field."""
    return [
        (f.name, str(f.type), "required" if f.default is dataclasses.MISSING else str(f.default))
        for f in dataclasses.fields(spec)
    ]


def test_the_hooks_are_found() -> None:
    assert set(HOOKS) == set(SPECS)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_described(name: str) -> None:
    text = section(name)
    table = {row[0]: row[1] for row in rows(text) if len(row) == 2}
    for key in ("arguments", "returns", "called", "must not"):
        assert table.get(key), f"{name}: {key}"
    parameters = list(inspect.signature(HOOKS[name]).parameters)
    assert all(parameter in table["arguments"] for parameter in parameters)
    assert parameters or table["arguments"] == "none"
    assert re.search(rf"^```python\n(?:.*\n)*?@hookimpl\ndef {name}\(", text, re.M), (
        f"{name} has no example"
    )


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_returns_what_the_hook_is_for(name: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", section(name), re.M | re.S)
    namespace: dict[str, Any] = {}
    exec(next(block for block in blocks if f"def {name}(" in block), namespace)
    made = namespace[name]()
    assert [type(spec) for spec in made] == [SPECS[name]]


@pytest.mark.parametrize("name", HOOKS)
def test_every_field_is_described_as_it_is_declared(name: str) -> None:
    described = [
        tuple(row[:3])
        for row in rows(section(name))
        if len(row) == 4 and row[0] not in ("field", "---")
    ]
    assert described == declared(SPECS[name])
    assert all(row[3] for row in rows(section(name)) if len(row) == 4)


def test_no_hook_is_described_that_is_not_there() -> None:
    headings = re.findall(r"^### `(ottava_\w+)", PAGE, re.M)
    assert headings == list(HOOKS)
