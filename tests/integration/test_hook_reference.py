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
SPECS: dict[str, Any] = {
    "ottava_recipes": RecipeSpec,
    "ottava_quantizer_factories": FactorySpec,
}


def section(name: str) -> str:
    """The text below a hook's heading, which has its signature."""
    signature = name + str(inspect.signature(HOOKS[name])).replace("'", "")
    found = re.search(rf"^### `{re.escape(signature)}`\n(.*?)(?=^###? )", PAGE, re.M | re.S)
    assert found, f"no heading {signature}"
    return found[1]


def rows(text: str, cells: int) -> list[list[str]]:
    """The rows of the tables of so many columns in a text, without code marks."""
    lines = re.findall(r"^\| (.*) \|$", text, re.M)
    table = [
        [cell.strip().replace("`", "").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)]
        for line in lines
    ]
    return [row for row in table if len(row) == cells and row[0] not in ("field", "---")]


def test_the_page_has_the_hooks_and_no_others() -> None:
    assert re.findall(r"^### `(ottava_\w+)", PAGE, re.M) == list(HOOKS)
    assert set(HOOKS) == set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_a_hook_is_described(name: str) -> None:
    text, parameters = section(name), list(inspect.signature(HOOKS[name]).parameters)
    table = {row[0]: row[1] for row in rows(text, 2)}
    for key in ("arguments", "returns", "called", "must not"):
        assert table.get(key), key
    assert all(parameter in table["arguments"] for parameter in parameters)
    assert parameters or table["arguments"] == "none"
    # The example returns what the hook is for.
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    namespace: dict[str, Any] = {}
    exec(next(block for block in blocks if f"@hookimpl\ndef {name}(" in block), namespace)
    assert [type(spec) for spec in namespace[name]()] == [SPECS[name]]


@pytest.mark.parametrize("name", SPECS)
def test_every_field_is_described_as_it_is_declared(name: str) -> None:
    described = rows(section(name), 4)
    for field, row in zip(dataclasses.fields(SPECS[name]), described, strict=True):
        required = field.default is dataclasses.MISSING
        assert row[:3] == [
            field.name,
            str(field.type),
            "required" if required else str(field.default),
        ]
        assert row[3]
