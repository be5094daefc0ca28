"""Every field of a spec is checked when the spec is made, whatever type it has."""

from __future__ import annotations

import pytest

from ottava import FactorySpec, RecipeSpec
from ottava.errors import OptionError

RIGHT = {"name": "mine", "summary": "s", "factory": "a.b:C"}
COMMON = [
    ("name", "Mine"),
    ("name", ""),
    ("name", None),
    ("summary", object()),
    ("summary", "two\nlines"),
    ("summary", "\x1b[31mred"),
    ("factory", "a.b"),
    ("factory", "a..b:C"),
    ("factory", "a.b:C()"),
    ("factory", dict),
    ("api_version", "1"),
    ("api_version", True),
    ("api_version", 0),
]
OF_RECIPES = [
    ("stateful", 1),
    ("needs_reduction", None),
    ("block_size", 32),
    ("block_size", (1, 0)),
    ("block_size", (1, True)),
    ("block_size", (1, 2, 3)),
    ("block_size", "ab"),
    ("formats", None),
    ("formats", "E4M3"),
    ("formats", (1, 2)),
    ("formats", ("",)),
    ("fake_quant_formats", ["E4M3"]),
    ("fake_quant_formats", (None,)),
    ("block_size", (None, None)),
    ("block_size", (1, -1)),
    ("relative_error", 0),
    ("relative_error", -0.1),
    ("relative_error", float("nan")),
    ("relative_error", float("inf")),
    ("relative_error", True),
    ("relative_error", "0.1"),
    ("quantized_weights", 1),
    ("deterministic", None),
    ("compiles", "yes"),
    ("file_suffixes", ".yaml"),
    ("file_suffixes", ("yaml",)),
    ("file_suffixes", (".YAML",)),
    ("file_suffixes", (1,)),
]


@pytest.mark.parametrize(("field", "value"), [*COMMON, *OF_RECIPES])
def test_a_recipe_spec_checks_its_fields(field: str, value: object) -> None:
    with pytest.raises(OptionError, match=field):
        RecipeSpec(**{**RIGHT, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), COMMON)
def test_a_factory_spec_checks_its_fields(field: str, value: object) -> None:
    with pytest.raises(OptionError, match=field):
        FactorySpec(**{**RIGHT, field: value})  # type: ignore[arg-type]


def test_right_fields_are_taken() -> None:
    full = RecipeSpec(
        **RIGHT,
        stateful=True,
        block_size=(1, 128),
        formats=("E4M3",),
        needs_reduction=True,
        fake_quant_formats=("X",),
    )
    assert full.capabilities == ("E4M3", "block 1x128", "stateful", "reduces amax")
    assert RecipeSpec(**RIGHT).capabilities == ("per tensor", "stateless")
    assert FactorySpec(**RIGHT).api_version == 1


@pytest.mark.parametrize(
    ("block", "word"),
    [
        (None, "per tensor"),
        ((1, None), "per row"),
        ((None, 1), "per column"),
        ((32, 32), "block 32x32"),
        ((2, None), "block 2xall"),
    ],
)
def test_what_shares_a_scale_is_listed(block: object, word: str) -> None:
    assert word in RecipeSpec(**RIGHT, block_size=block).capabilities  # type: ignore[arg-type]
