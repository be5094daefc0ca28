"""Conversion between recipes and to high precision."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ottava import checkpoint
from ottava.errors import (
    CheckpointError,
    DTypeError,
    OptionError,
    OttavaError,
    RecipeNotFoundError,
    UsageError,
)
from ottava.tensors import Float8Tensor
from ottava_integrations import Conversion, convert_file
from tests.integrations.files import same_tensors


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A file that another tool has written."""
    torch.manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(6, 4).bfloat16(),
        "layer.weight": torch.randn(3, 40),
        "layer.bias": torch.randn(3),
        "norm.weight": torch.randn(4).half(),
        "weight": torch.randn(2, 2),
        "layer.weights": torch.randn(2, 2),
        "ids.weight": torch.arange(6).view(2, 3),
        "conv.weight": torch.randn(2, 2, 3),
        "double.weight": torch.randn(2, 2).double(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "in", {"tool": "another", "format": "pt"})
    return tensors


def quantized_names(path: Path) -> set[str]:
    return {
        name
        for name, value in checkpoint.load_file(path).items()
        if isinstance(value, Float8Tensor)
    }


def test_a_foreign_file(foreign: dict[str, torch.Tensor], recipe: Any, tmp_path: Path) -> None:
    done = convert_file(tmp_path / "in", tmp_path / "out", recipe)
    read = checkpoint.load_file(tmp_path / "out")
    chosen = {"layer.weight", "weight"}
    assert done.skipped == ("embed.weight",)
    assert set(done.quantized) == quantized_names(tmp_path / "out") == chosen
    assert set(done.copied) == set(foreign) - chosen
    assert read.keys() == foreign.keys()
    for name, value in foreign.items():
        if name in chosen:
            expected = recipe.quantizer("weight")(value)
            assert torch.equal(read[name]._data, expected._data)
            assert torch.equal(read[name]._scale_inv, expected._scale_inv)
            assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape)
        else:
            assert torch.equal(read[name], value)
            assert read[name].dtype == value.dtype
    assert done.bytes_before == sum(t.nbytes for t in foreign.values())
    plain = safetensors.torch.load_file(tmp_path / "out")
    assert done.bytes_after == sum(t.nbytes for t in plain.values()) < done.bytes_before
    with safetensors.safe_open(tmp_path / "out", "pt") as file:
        assert file.metadata()["tool"] == "another"


def test_the_same_recipe_makes_the_same_bytes(
    foreign: dict[str, torch.Tensor], recipe: Any, tmp_path: Path
) -> None:
    convert_file(tmp_path / "in", tmp_path / "out", recipe)
    convert_file(tmp_path / "out", tmp_path / "again", recipe)
    same_tensors(tmp_path / "out", tmp_path / "again")
    # In place, and of a loaded state dict that was saved again.
    checkpoint.save_file(checkpoint.load_file(tmp_path / "out"), tmp_path / "saved")
    convert_file(tmp_path / "saved", tmp_path / "saved", recipe)
    same_tensors(tmp_path / "out", tmp_path / "saved")
    described = []
    for name in ("out", "saved"):
        with safetensors.safe_open(tmp_path / name, "pt") as file:
            described.append(json.loads(file.metadata()["ottava"]))
    assert described[0] == described[1]
    assert set(described[0]["quantized"]["weight"]) == {"class", "tensors", "static"}


def test_another_option_quantizes_again(
    foreign: dict[str, torch.Tensor], recipe: Any, tmp_path: Path
) -> None:
    """The class, its fields and the name of the recipe are the same: only the option is another."""
    convert_file(tmp_path / "in", tmp_path / "out", recipe)

    class Halved(type(recipe.quantizer("weight"))):  # type: ignore[misc]
        def __init__(self, factor: float) -> None:
            super().__init__(torch.float8_e4m3fn)
            self.factor = factor

        def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
            return super().quantize_impl(tensor * self.factor, dtype)

    class Option(type(recipe)):  # type: ignore[misc]
        def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
            return Halved(0.5)

    done = convert_file(tmp_path / "out", tmp_path / "half", Option())
    assert set(done.quantized) == {"layer.weight", "weight"}
    before, after = checkpoint.load_file(tmp_path / "out"), checkpoint.load_file(tmp_path / "half")
    assert torch.equal(
        after["weight"].dequantize(),
        recipe.quantizer("weight")(before["weight"].dequantize() * 0.5).dequantize(),
    )


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_to_high_precision(
    foreign: dict[str, torch.Tensor], recipe: Any, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    convert_file(tmp_path / "in", tmp_path / "out", recipe)
    quantized = checkpoint.load_file(tmp_path / "out")
    done = convert_file(tmp_path / "out", tmp_path / "plain", name)
    # Any tool reads it.
    plain = safetensors.torch.load_file(tmp_path / "plain")
    assert set(done.dequantized) == {"layer.weight", "weight"}
    for key, value in quantized.items():
        if isinstance(value, Float8Tensor):
            expected = value._data.view(torch.float8_e4m3fn).double() * value._scale_inv.double()
            assert torch.equal(plain[key], expected.float().to(dtype))
        elif value.dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert torch.equal(plain[key], value.to(dtype))
        else:
            assert torch.equal(plain[key], value)
            assert key in done.copied
    assert not convert_file(tmp_path / "plain", tmp_path / "x", name).cast


def test_patterns(foreign: dict[str, torch.Tensor], recipe: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"

    def chosen(start: Path = source, **patterns: Any) -> set[str]:
        convert_file(start, out, recipe, **patterns)
        return quantized_names(out)

    assert chosen(include=["layer.*"]) == {"layer.weight", "layer.bias", "layer.weights"}
    assert chosen(include=["layer.*"], exclude=["*.bias"]) == {"layer.weight", "layer.weights"}
    assert chosen(include=["conv.weight", "norm.*"]) == {"conv.weight", "norm.weight"}
    assert chosen(exclude=["embed*", "layer*"]) == {"weight"}
    convert_file(source, tmp_path / "quantized", recipe)
    # What was quantized and is not to be converted: high precision of its nominal dtype.
    assert chosen(tmp_path / "quantized", exclude=["embed*"]) == {"layer.weight", "weight"}
    assert checkpoint.load_file(out)["embed.weight"].dtype == torch.bfloat16
    convert_file(tmp_path / "quantized", out, "fp16", include=["layer.*"])
    dtypes = {name: value.dtype for name, value in checkpoint.load_file(out).items()}
    assert quantized_names(out) == set()
    assert (dtypes["layer.weight"], dtypes["layer.bias"]) == (torch.float16, torch.float16)
    assert (dtypes["embed.weight"], dtypes["weight"]) == (torch.bfloat16, torch.float32)
    for wrong in (
        {"include": ["nope*"]},
        {"exclude": ["ids.weight"]},
        {"include": ["double.weight"]},
    ):
        with pytest.raises(OptionError, match=r"in: pattern .* fits no tensor"):
            chosen(**wrong)
    for value in ("layer.*", 3, [3]):
        with pytest.raises(DTypeError, match="include"):
            chosen(include=value)


def test_scaling_state_of_another_recipe_is_dropped(recipe: Any, tmp_path: Path) -> None:
    state = {
        "l.weight": torch.randn(2, 4),
        "l.recipe_state.scale": torch.ones(3),
        "recipe_state.scale": torch.ones(3),
    }
    checkpoint.save_file(state, tmp_path / "in")
    for target in (recipe, "bf16"):
        done = convert_file(tmp_path / "in", tmp_path / "out", target)
        assert set(done.dropped) == {"l.recipe_state.scale", "recipe_state.scale"}
        assert set(checkpoint.load_file(tmp_path / "out")) == {"l.weight"}


def test_tied_tensors_stay_tied(recipe: Any, tmp_path: Path) -> None:
    weight = torch.randn(4, 8)
    checkpoint.save_file({"a.weight": weight, "b.weight": weight, "c": weight}, tmp_path / "in")
    for target, stored in ((recipe, 2 + 1), ("bf16", 1)):
        convert_file(tmp_path / "in", tmp_path / "out", target)
        assert len(safetensors.torch.load_file(tmp_path / "out")) == stored
        read = checkpoint.load_file(tmp_path / "out")
        assert set(read) == {"a.weight", "b.weight", "c"}
        assert torch.equal(read["a.weight"].float(), read["b.weight"].float())
        assert torch.equal(read["c"], weight if target is recipe else weight.bfloat16())
    convert_file(tmp_path / "in", tmp_path / "q", recipe, include=["a.weight", "b.weight", "c"])
    assert len(safetensors.torch.load_file(tmp_path / "q")) == 2
    convert_file(tmp_path / "q", tmp_path / "out", recipe, exclude=["b.weight"])
    assert quantized_names(tmp_path / "out") == {"a.weight", "c"}


def test_damage_is_found_on_the_way(
    foreign: dict[str, torch.Tensor], recipe: Any, tmp_path: Path
) -> None:
    convert_file(tmp_path / "in", tmp_path / "out", recipe)
    raw = bytearray((tmp_path / "out").read_bytes())
    (tmp_path / "target").write_bytes(b"old")
    for place in range(len(raw) - 200, len(raw)):
        raw[place] ^= 1
        (tmp_path / "damaged").write_bytes(raw)
        for target in (recipe, "bf16"):
            with pytest.raises(CheckpointError, match=r"damaged is damaged: its checksum"):
                convert_file(tmp_path / "damaged", tmp_path / "target", target)
        raw[place] ^= 1
    assert (tmp_path / "target").read_bytes() == b"old"
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out", "target", "damaged"}


def test_what_is_refused(foreign: dict[str, torch.Tensor], recipe: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    refusals: list[tuple[Any, dict[str, Any], type[OttavaError]]] = [
        ("nonesuch", {}, RecipeNotFoundError),
        (3, {}, DTypeError),
        ("bf16", {"options": {"a": 1}}, OptionError),
        (recipe, {"options": {"a": 1}}, OptionError),
    ]
    for target, more, error in refusals:
        with pytest.raises(error):
            convert_file(source, out, target, **more)
    for wrong in ((None, out), (source, None)):
        with pytest.raises(DTypeError, match="path"):
            convert_file(*wrong, "bf16")
    for name, said in (
        ("folder", "it is a folder"),
        ("/dev/null", "no regular file"),
        ("absent/x", "absent is no|absent'"),
    ):
        (tmp_path / "folder").mkdir(exist_ok=True)
        # Before anything is read.
        with pytest.raises(UsageError, match=rf"cannot be written: .*({said})") as caught:
            convert_file(tmp_path / "no source", tmp_path / name, "bf16")
        assert "partial" not in str(caught.value)
    checkpoint.save_file(
        {"w.weight": torch.ones(2, 2), "w.weight.data": torch.ones(1)}, tmp_path / "twice"
    )
    with pytest.raises(UsageError, match=r"two tensors would have the name 'w\.weight\.data'"):
        convert_file(tmp_path / "twice", out, recipe)

    class Broken(type(recipe.quantizer("weight"))):  # type: ignore[misc]
        def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
            raise ZeroDivisionError("inside")

    bad = type(recipe)()
    bad.set_quantizer_factory(lambda role: Broken(torch.float8_e4m3fn))
    with pytest.raises(UsageError, match="cannot be quantized: ZeroDivisionError: inside"):
        convert_file(source, out, bad)
    assert not out.exists()


def test_progress(recipe: Any, tmp_path: Path) -> None:
    tensors = {f"{n}.weight": torch.randn(100, 100) for n in range(20)}
    safetensors.torch.save_file(tensors, tmp_path / "in")
    seen: list[tuple[int, int]] = []
    convert_file(
        tmp_path / "in", tmp_path / "out", recipe, progress=lambda *bytes: seen.append(bytes)
    )
    assert seen == [(40_000 * n, 800_000) for n in range(21)]


def test_the_summary_is_data() -> None:
    fields = {field.name for field in dataclasses.fields(Conversion)}
    assert {
        "quantized",
        "dequantized",
        "cast",
        "copied",
        "dropped",
        "bytes_before",
        "bytes_after",
    } < fields
