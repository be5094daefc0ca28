"""State dicts with quantized tensors as plain tensors and as safetensors files, for any storage that is declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ottava
from ottava import checkpoint
from ottava.errors import DeviceError, DTypeError, OttavaError, UsageError
from ottava.tensors import Float8Tensor, InnerTensor, QuantizedTensorStorage, StaticField


class Rows(QuantizedTensorStorage):
    """A third party's storage: nothing but its declaration."""

    inner_tensors = (InnerTensor("_codes", "codes", native="_element"), InnerTensor("_factor", "factor"))
    static_fields = (StaticField("_element", "element"), StaticField("_sizes", "sizes"))

    def __init__(self, *, codes: Any, factor: Any, element: torch.dtype, sizes: Any, quantizer: Any = None) -> None:
        self._codes, self._factor, self._quantizer = codes, factor, quantizer
        self._element, self._sizes = element, sizes


def rows() -> Rows:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    return Rows(codes=codes, factor=torch.rand(3), element=torch.float8_e5m2, sizes=(3, (4, None), "x", 0.5, True))


@pytest.fixture
def state(quantizer: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "layer.weight": quantizer(torch.randn(5, 7)),
        "layer.bias": torch.randn(5).bfloat16(),
        "rows": rows(),
        "step": torch.tensor(3),
    }


def test_tensors_have_the_dtypes_of_their_bytes(state: dict[str, Any], tmp_path: Path) -> None:
    """Another tool, which knows nothing of Ottava, reads the values."""
    path = tmp_path / "model.safetensors"
    checkpoint.save_file(state, path)
    plain = safetensors.torch.load_file(path)
    assert plain["layer.weight.data"].dtype == torch.float8_e4m3fn
    values = plain["layer.weight.data"].float() * plain["layer.weight.fp8_scale_inv"]
    assert torch.equal(values, state["layer.weight"].dequantize())
    assert plain["rows.codes"].dtype == torch.float8_e5m2
    assert set(plain) == {
        "layer.weight.data",
        "layer.weight.fp8_scale_inv",
        "layer.bias",
        "rows.codes",
        "rows.factor",
        "step",
    }


def test_round_trip(state: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.save_file(state, path)
    read = checkpoint.load_file(path)
    assert set(read) == set(state)
    assert torch.equal(read["layer.bias"], state["layer.bias"])
    for name in ("layer.weight", "rows"):
        assert type(read[name]) is type(state[name])
        assert read[name].flatten_storage()[1].static == state[name].flatten_storage()[1].static
        for mine, theirs in zip(read[name].inner_list(), state[name].inner_list(), strict=True):
            assert mine is None if theirs is None else torch.equal(mine, theirs) and mine.dtype == theirs.dtype
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_into_a_model(recipe: Any, tmp_path: Path) -> None:
    with ottava.quantized_model_init(recipe):
        first, second = (ottava.nn.Linear(16, 8, recipe=recipe) for _ in range(2))
    checkpoint.save_file(first.state_dict(), tmp_path / "layer.safetensors")
    second.load_state_dict(checkpoint.load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(first.weight._data, second.weight._data)
    assert torch.equal(first.weight._scale_inv, second.weight._scale_inv)
    assert second.weight._quantizer is not None


def test_files_of_other_tools_are_plain_tensors(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a.b": torch.ones(3)}, tmp_path / "other.safetensors", {"format": "pt"})
    read = checkpoint.load_file(tmp_path / "other.safetensors")
    assert torch.equal(read["a.b"], torch.ones(3))


def edited(state: dict[str, Any], change: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors, metadata = checkpoint.flatten_state_dict(state)
    described = json.loads(metadata["ottava"])
    change(tensors, described)
    return tensors, {"ottava": json.dumps(described)}


def _set(*path: str, to: Any) -> Any:
    def change(tensors: Any, described: Any) -> None:
        entry = described
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = to

    return change


WEIGHT = ("quantized", "layer.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, _: tensors.pop("layer.weight.data"), "'layer.weight.data' is missing"),
        (_set("version", to=2), "version 2"),
        (_set("quantized", to=[]), "damaged"),
        (_set("quantized", to={"w": {}}), "damaged"),
        (_set(*WEIGHT, "class", to="os:system"), "not installed"),
        (_set(*WEIGHT, "class", to="ottava.tensors.storage:StorageSpec"), "not installed"),
        (_set(*WEIGHT, "static", "fp8_dtype", to={"dtype": "save"}), "cannot be restored"),
        (_set(*WEIGHT, "static", to={}), "cannot be restored"),
        (_set(*WEIGHT, "static", "shape", to=[7, 5]), r"'layer.weight'.*\(7, 5\)"),
        (_set(*WEIGHT, "static", "fp8_dtype", to={"dtype": "float32"}), "'layer.weight'"),
        (lambda tensors, _: tensors.update({"layer.weight.fp8_scale_inv": torch.ones(2)}), "one element"),
        (lambda tensors, _: tensors.update({"layer.weight.data": torch.ones(())}), "'data' is of torch.float32"),
        (lambda tensors, _: tensors.update({"layer.weight.data": torch.ones(5, 7).to(torch.float8_e5m2)}), "e5m2"),
        (_set(*WEIGHT, "tensors", to=[]), "has no tensors"),
    ],
)
def test_damage_is_named(state: dict[str, Any], change: Any, message: str) -> None:
    tensors, metadata = edited(state, change)
    with pytest.raises(OttavaError, match=message):
        checkpoint.unflatten_state_dict(tensors, metadata)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', "[" * 100_000])
def test_metadata_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="damaged"):
        checkpoint.unflatten_state_dict({}, {"ottava": text})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (("cut", b"\x10\x00\x00"), ("text", b"not a file of tensors"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=name):
            checkpoint.load_file(tmp_path / name)
    with pytest.raises(UsageError, match="absent"):
        checkpoint.load_file(tmp_path / "absent")


def test_what_cannot_be_written(state: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DTypeError, match="'x' is a int"):
        checkpoint.save_file({"x": 3}, tmp_path / "x")
    with pytest.raises(UsageError, match=r"two tensors would have the name 'layer\.weight\.data'"):
        checkpoint.save_file(state | {"layer.weight.data": torch.ones(1)}, tmp_path / "x")
    for value in (torch.ones(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(DTypeError, match="meta or sparse"):
            checkpoint.save_file({"x": value}, tmp_path / "x")
    with pytest.raises(DTypeError, match="3 is a Tensor"):
        checkpoint.save_file({3: torch.ones(1)}, tmp_path / "x")  # type: ignore[dict-item]
    with pytest.raises(DTypeError, match="state dict is a list"):
        checkpoint.save_file([torch.ones(1)], tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be written"):
        checkpoint.save_file(state, tmp_path / "absent" / "x")
    for wrong in (checkpoint.load_file, lambda path: checkpoint.save_file(state, path)):
        with pytest.raises(DTypeError, match="path"):
            wrong(None)
    with pytest.raises(DeviceError, match="nope"):
        checkpoint.load_file(tmp_path / "x", device="nope")

    class Sharded(torch.Tensor):
        def to_local(self) -> None: ...

    with pytest.raises(DTypeError, match=r"'x' is sharded.*full_state_dict"):
        checkpoint.save_file({"x": torch.ones(2).as_subclass(Sharded)}, tmp_path / "x")
    cleared = rows()
    cleared.clear()
    with pytest.raises(UsageError, match="'rows' holds no data"):
        checkpoint.save_file({"rows": cleared}, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.save_file(state, path)
    before = path.read_bytes()

    def fails(tensors: Any, target: Path, metadata: Any) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(UsageError, match="cannot be written: no space"):
        checkpoint.save_file(state, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_shared_and_conjugated_memory(state: dict[str, Any], tmp_path: Path) -> None:
    base = torch.randn(4, 4)
    values = {"a": base, "b": base, "part": base[1:], "c": torch.randn(3, dtype=torch.complex64).conj()}
    checkpoint.save_file(values | {"v": state["rows"], "w": state["rows"]}, tmp_path / "x")
    read = checkpoint.load_file(tmp_path / "x")
    for name, value in values.items():
        assert torch.equal(read[name], value)
    assert torch.equal(read["v"]._codes, read["w"]._codes)


def test_a_transposed_copy_is_saved_with_its_tensor(quantizer: Any, tmp_path: Path) -> None:
    from ottava.tensors import columnwise_layout

    with columnwise_layout("transpose"):
        weight = quantizer(torch.randn(4, 6))
        checkpoint.save_file({"w": weight}, tmp_path / "w")
        read = checkpoint.load_file(tmp_path / "w")["w"]
        assert isinstance(read, Float8Tensor)
        assert torch.equal(read._transpose, weight._transpose)
