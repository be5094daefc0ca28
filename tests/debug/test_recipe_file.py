"""Recipe files that keep something in high precision say exactly what was asked for."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import ottava
from ottava.errors import OptionError, RecipeNotFoundError
from ottava.formats import Format
from ottava_custom import CustomRecipe
from ottava_custom.files.source import MAX_BYTES
from ottava_debug import Keep, write_recipe_file
from ottava_debug.recipe_file import recipe_text
from tests.debug.by_hand import (
    BY_COLUMN,
    ROLES,
    TENSORS,
    assert_results,
    inputs,
    layer_of,
    passes,
    products,
    quantized,
)

E4M3, E5M2, IDENTITY = ("current E4M3",) * 2, ("current E5M2",) * 2, ("identity",) * 2
CURRENT = {"input": E4M3, "weight": E4M3, "grad_output": E5M2}
KEPT = dict.fromkeys(CURRENT, IDENTITY)


def served(recipe: CustomRecipe, layer: str) -> dict[str, tuple[str, str]]:
    """Role -> what serves its rows and its columns."""
    explained = {
        role: recipe.explain(ottava.QuantizerRole("linear", role, layer)) for role in CURRENT
    }
    return {role: (each.rowwise, each.columnwise) for role, each in explained.items()}


def test_layers_roles_and_directions_are_kept_and_nothing_else(tmp_path: Path) -> None:
    keeps = [
        Keep("blocks.0.up", "SQNR 12.3 dB"),
        Keep("blocks.1.up", "underflow", role="grad_output"),
        Keep("blocks.2.up", "an outlier", role="weight", direction="columnwise"),
        Keep("blocks.2.up", "and one more", role="input", direction="rowwise"),
        Keep("blocks.3.up", "first", role="weight", direction="columnwise"),
        Keep("blocks.3.up", "second", role="weight", direction="rowwise"),
    ]
    path = tmp_path / "kept.yaml"
    recipe = write_recipe_file(path, keeps, about="Found by a search.\nTwo lines.")
    assert recipe == CustomRecipe.from_file(path)
    assert served(recipe, "blocks.0.up") == KEPT
    assert served(recipe, "blocks.1.up") == CURRENT | {"grad_output": IDENTITY}
    sides = {"weight": ("current E4M3", "identity"), "input": ("identity", "current E4M3")}
    assert served(recipe, "blocks.2.up") == CURRENT | sides
    assert served(recipe, "blocks.3.up") == CURRENT | {"weight": IDENTITY}
    assert served(recipe, "blocks.0.down") == served(recipe, "blocks.00.up") == CURRENT
    text = path.read_text()
    assert text.startswith("# Found by a search.\n# Two lines.\ndefault: current\n")
    assert all(f"# {keep.reason}\n" in text for keep in keeps)
    assert [rule.text for rule in recipe.rules()] == [f"blocks.{n}.up" for n in range(4)]
    assert recipe_text([], "mxfp8") == "default: mxfp8\n"


RANDOM = random.Random(0)
CHARACTERS = "".join(map(chr, range(0x20, 0x250))) + "\n\t\x00\x85\u2028\ufeff\ufffd一😀"
NAMES = [
    *["", "null", "True", "1e4", "0o17", "~", "a: b", "#a", "it's", '"', "\\", "[x]*?", "é😀"],
    *["a\nb", "-", " a "],
    *("".join(RANDOM.choices(CHARACTERS, k=length)) for length in range(1, 13)),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_taken_character_by_character(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kept.yaml"
    recipe = write_recipe_file(path, [Keep(name, f"because of {name}\n- match: x\x00")])
    assert served(recipe, name) == KEPT
    assert served(recipe, "another") == (CURRENT if name else KEPT)
    assert yaml.safe_load(path.read_text()).keys() == {"default", "layers"}


def test_a_module_inside_a_kept_one_may_be_kept_too(tmp_path: Path) -> None:
    roles = {"a": "weight", "a.b": None, "a.b.c": None}
    keeps = [Keep(name, "x", role=role) for name, role in roles.items()]
    # The model itself contains all of them.
    keeps.insert(0, Keep("", "x", role="input", direction="rowwise"))
    rows = {"input": ("identity", "current E4M3")}
    recipe = write_recipe_file(tmp_path / "kept.yml", keeps)
    assert served(recipe, "a.b.c") == served(recipe, "a.b") == KEPT
    assert served(recipe, "a.c") == CURRENT | {"weight": IDENTITY} | rows
    assert served(recipe, "d") == CURRENT | rows


def test_options_and_files_serve_the_rest(tmp_path: Path) -> None:
    keeps = [Keep("a", "x", role="weight", direction="rowwise")]
    file, options = tmp_path / "first.yaml", {"fp8_format": Format.E4M3}
    first = write_recipe_file(file, keeps, "current", options)
    assert served(first, "b") == dict.fromkeys(CURRENT, E4M3)
    assert served(first, "a") == served(first, "b") | {"weight": ("identity", "current E4M3")}
    second = write_recipe_file(tmp_path / "second.yaml", [Keep("b", "y")], str(file))
    of_first = served(first, "a").items()
    expected = {role: tuple(f"{side}, file={file}" for side in sides) for role, sides in of_first}
    assert served(second, "a") == expected
    assert served(second, "b") == KEPT


@pytest.mark.parametrize("base", ["delayed", "hybrid.yaml"])
def test_one_direction_of_a_role_is_kept_where_it_can_be(tmp_path: Path, base: str) -> None:
    """A recipe with state serves whole roles."""
    hybrid = tmp_path / "hybrid.yaml"
    hybrid.write_text("default: {rowwise: mxfp8, columnwise: current}\n")
    of = str(hybrid) if base == hybrid.name else base
    keeps = [Keep("a", "x", role="weight", direction="rowwise")]
    recipe = write_recipe_file(tmp_path / "kept.yaml", keeps, of)
    others = served(recipe, "b")
    columns = others["weight"][1] if base == hybrid.name else "identity"
    assert served(recipe, "a") == others | {"weight": ("identity", columns)}
    told = "Only rowwise data need it" in (tmp_path / "kept.yaml").read_text()
    assert told is (base == "delayed")


OPERANDS = [(gemm, tensor) for gemm, tensors in TENSORS.items() for tensor in tensors[:2]]


@pytest.mark.parametrize(("gemm", "tensor"), OPERANDS)
def test_a_kept_operand_is_in_high_precision_in_its_product_alone(
    tmp_path: Path, gemm: str, tensor: str
) -> None:
    keep = Keep.of_operand("layer", "x", gemm, tensor)
    layer = layer_of(write_recipe_file(tmp_path / "kept.yaml", [keep]))
    x, dy = inputs()

    def operand(of: str, name: str, values: torch.Tensor) -> Any:
        # The products of one direction share an operand.
        by_column = (of, name) in BY_COLUMN
        if name == tensor and by_column is ((gemm, tensor) in BY_COLUMN):
            return values
        return quantized("current", of, name, values)

    assert keep.role == ROLES[tensor]
    assert_results(passes(layer, x, dy), products(layer, x, dy, operand))


def test_a_file_too_large_to_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "kept.yaml"
    write_recipe_file(path, [Keep("a", "x")])
    before = path.read_bytes()
    for name in ("kept.yaml", "new.yaml"):
        with pytest.raises(OptionError, match=rf"is larger than {MAX_BYTES} bytes.*fewer patterns"):
            write_recipe_file(tmp_path / name, [], about=f"{'x' * 97}\n" * 2700)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.yaml"]


def test_what_is_refused_writes_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for arguments, error, words in (
        (("kept.toml", []), OptionError, r"\.yaml or \.yml"),
        (("kept.yaml", [], "nothing-such"), RecipeNotFoundError, "nothing-such"),
        (("none/kept.yaml", []), OptionError, "cannot be written"),
        # Nobody has the other end of the pipe: to open it would wait for ever.
        (("pipe.yaml", []), OptionError, "no regular file"),
    ):
        with pytest.raises(error, match=words):
            write_recipe_file(tmp_path / arguments[0], *arguments[1:])
    for options, words in (
        ({"role": "bias"}, "role is 'bias'"),
        ({"role": "weight", "direction": "up"}, "direction is 'up'"),
        ({"direction": "rowwise"}, "of no role"),
    ):
        with pytest.raises(OptionError, match=words):
            Keep("a", "x", **options)
    with pytest.raises(OptionError, match="fprop activation"):
        Keep.of_operand("a", "x", "fprop", "gradient")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe.yaml"]
