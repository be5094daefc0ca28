"""What is saved is loaded bit for bit, by Ottava and by the library of the format."""

from __future__ import annotations

import math
import tempfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ottava
from ottava import checkpoint
from ottava.errors import CheckpointError
from ottava.tensors import columnwise_layout
from tests.core.checkpoint.files import Parts, checksum, contents, forge, lines_of, rows, zeros_like

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32]
DTYPES += [torch.int32, torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
# All that UTF-8 has, which hypothesis would take a second to find by itself.
CHARACTERS = st.characters(exclude_categories=["Cs"])
NAMES = st.text(CHARACTERS, max_size=8).filter("__metadata__".__ne__)
TEXTS = st.text(CHARACTERS)


def filled(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bytes; of booleans, those that exist."""
    generator = torch.Generator().manual_seed(seed)
    count, most = math.prod(shape) * dtype.itemsize, 2 if dtype == torch.bool else 256
    raw = torch.randint(0, most, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


SHAPES = st.lists(st.integers(0, 5), max_size=4)
TENSORS = st.builds(filled, st.sampled_from(DTYPES), SHAPES, st.integers(0, 2**32))
STATES = st.dictionaries(NAMES, TENSORS, max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from(DTYPES),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.tuples(inside, inside)
        | st.dictionaries(TEXTS | st.integers(), inside, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=20)
@given(STATES)
@example({"longer than what is read at once": filled(torch.float32, [300_000], 0)})
def test_the_library_reads_a_file_with_the_documented_checksum(
    state: dict[str, torch.Tensor],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        checkpoint.save_file(state, path)
        for read in (safetensors.torch.load_file(path), checkpoint.load_file(path)):
            assert contents(read) == contents(state)
        metadata = Parts(path.read_bytes()).metadata
        expected, entries = metadata.pop("ottava.crc32"), {}
        for name, (dtype, shape, raw) in contents(state).items():
            entries[name] = [str(dtype)[6:], shape, zlib.crc32(raw)]
        assert expected == checksum(metadata, entries)
        assert metadata["format"] == "pt"


@settings(max_examples=10)
@given(STATES, st.none() | st.dictionaries(NAMES.map("its {}".format), TEXTS, min_size=1))
def test_files_of_the_library_are_read(
    state: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        try:
            safetensors.torch.save_file({n: t.clone() for n, t in state.items()}, path, metadata)
        except (UnicodeEncodeError, safetensors.SafetensorError):
            return
        assert contents(checkpoint.load_file(path)) == contents(state)


@settings(max_examples=20)
@given(VALUES, STATES)
def test_a_nested_state_is_loaded_in_place(values: Any, tensors: dict[str, torch.Tensor]) -> None:
    values = [values, math.nan, -math.inf, torch.bfloat16]
    state = {"values": values, "tensors": tensors, "nested": [{"v": values}, tensors.copy()]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        checkpoint.save_sharded(state, path)
        targets = zeros_like(tensors), zeros_like(tensors)
        target = {"values": 3, "tensors": targets[0], "nested": [{"v": None}, targets[1]]}
        loaded = checkpoint.load_sharded(target, path)
        assert contents(loaded) == contents(state)
        assert all(loaded["tensors"][name] is targets[0][name] for name in tensors)
        stored = {}
        for file in path.glob("rank-00000-of-00001-*.safetensors"):
            stored = safetensors.torch.load_file(file)
        names = {"tensors": tensors, "nested.1": tensors}
        flat = {f"{prefix}.{name}": t for prefix, of in names.items() for name, t in of.items()}
        assert contents(stored) == contents(flat)


# -- quantized tensors --


@pytest.fixture
def state(quantizer: Any) -> dict[str, Any]:
    wide = rows((2, (3, None), "x", 0.5, True))
    plain = {"layer.bias": torch.randn(5).bfloat16(), "step": torch.tensor(3)}
    return {"layer.weight": quantizer(torch.randn(5, 7)), "rows": wide} | plain


def test_a_quantized_tensor_is_plain_tensors_to_other_tools(state: Any, tmp_path: Path) -> None:
    checkpoint.save_file(state, tmp_path / "file")
    checkpoint.save_sharded(state, tmp_path / "folder")
    tensors, metadata = checkpoint.flatten_state_dict(state)
    (rank_file,) = (tmp_path / "folder").glob("*.safetensors")
    for path in (tmp_path / "file", rank_file):
        plain = safetensors.torch.load_file(path)
        assert contents(plain) == contents(tensors)
        parts = {"layer.weight.data", "layer.weight.fp8_scale_inv", "rows.codes", "rows.factor"}
        assert {*plain} == {*parts, "layer.bias", "step"}
        assert plain["layer.weight.data"].dtype == torch.float8_e4m3fn
        assert plain["rows.codes"].dtype == torch.float8_e5m2
        values = plain["layer.weight.data"].float() * plain["layer.weight.fp8_scale_inv"]
        assert torch.equal(values, state["layer.weight"].dequantize())
    file = checkpoint.load_file(tmp_path / "file")
    for read in (file, checkpoint.unflatten_state_dict(tensors, metadata)):
        assert contents(read) == contents(state)
        for name in ("layer.weight", "rows"):
            assert type(read[name]) is type(state[name])
            mine, theirs = (of[name].flatten_storage()[1].static for of in (read, state))
            assert mine == theirs


def test_derived_data_is_saved(quantizer: Any, tmp_path: Path) -> None:
    with columnwise_layout("transpose"):
        whole = quantizer(torch.randn(8, 6))
        checkpoint.save_file({"whole": whole}, tmp_path / "x")
        read = checkpoint.load_file(tmp_path / "x")
    assert whole._transpose is not None
    assert contents(read["whole"]) == contents(whole)


def test_memory_that_is_shared_is_stored_once(state: Any, tmp_path: Path) -> None:
    big, weight = torch.randn(100, 100), state["layer.weight"]
    tied = {"a": big, "b": big, "c": big.t(), "part": big[99:], "v": weight, "w": weight.detach()}
    tied |= {"conj": torch.randn(3, dtype=torch.complex64).conj(), "expanded": big[0].expand(2, -1)}
    tied |= {"none": big[:0], "scalar": torch.ones(()), "inner": big[1:3, 1:3]}
    z = torch.randn(3, dtype=torch.complex64)
    tied |= {"bits": big.view(torch.int32), "imag": z.imag, "negated": z.conj().imag}
    tied |= {"z": z, "z conj": z.conj(), "one negated": z[1:2].conj().imag}
    checkpoint.save_file(tied, tmp_path / "x")
    stored = {*safetensors.torch.load_file(tmp_path / "x")}
    assert stored == {*tied, "v.data", "v.fp8_scale_inv"} - {"b", "v", "w"}
    read = checkpoint.load_file(tmp_path / "x")
    assert contents(read) == contents(tied)
    checkpoint.save_file(dict(sorted(read.items())), tmp_path / "y")
    assert {*safetensors.torch.load_file(tmp_path / "y")} == stored


def test_texts_that_look_like_the_checksum(tmp_path: Path) -> None:
    entry = '"ottava.crc32":"00000000"'
    state = {entry: torch.ones(2), "ottava.crc32": torch.ones(1)}
    checkpoint.save_file(state, tmp_path / "x", metadata={entry: entry})
    assert contents(checkpoint.load_file(tmp_path / "x")) == contents(state)
    assert Parts((tmp_path / "x").read_bytes()).metadata[entry] == entry


def test_booleans_are_0_and_1(tmp_path: Path) -> None:
    """Any other byte is undefined behaviour in torch."""
    header = b'{"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}'
    for last in range(3):
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes([1, last]))
        if last < 2:
            assert checkpoint.load_file(tmp_path / "x")["a"].tolist() == [True, bool(last)]
            continue
        with pytest.raises(CheckpointError, match="'a' has values besides 0 and 1"):
            checkpoint.load_file(tmp_path / "x")


# -- layers go on --


def test_what_derives_from_loaded_bytes_is_made_again(recipe: Any, tmp_path: Path) -> None:
    """A layer computes with what was loaded, and a backward pass with the old bytes is refused."""

    def layers() -> torch.nn.Module:
        with ottava.quantized_model_init(recipe):
            sizes = ((5, 9), (9, 5))
            return torch.nn.Sequential(*(ottava.nn.Linear(*s, recipe=recipe) for s in sizes))

    saved = layers()
    checkpoint.save_sharded(saved.state_dict(), tmp_path / "saved")
    for layout in ("shared", "transpose"):
        with columnwise_layout(layout):
            net = layers()
            net(torch.ones(2, 5, requires_grad=True)).sum().backward()
            checkpoint.load_sharded(net.state_dict(), tmp_path / "saved")
            gradients = []
            for each in (net, saved):
                x = torch.ones(2, 5, requires_grad=True)
                y = each(x)
                gradients.append((y, *torch.autograd.grad(y.square().sum(), x)))
            assert contents(gradients[0]) == contents(gradients[1])
    y = net(torch.ones(2, 5, requires_grad=True))
    checkpoint.load_sharded(dict(net.named_parameters()), tmp_path / "saved")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- many shards --


def in_rows(folder: Path, number: int) -> None:
    """A checkpoint of ``x``, ``[number, 2]``, with a shard for each row."""
    state = {f"x@{row}": torch.full((1, 2), float(row)) for row in range(number)}
    checkpoint.save_sharded(state, folder)

    def merge(body: dict[str, Any]) -> None:
        tensors = body["tensors"]
        shards = [tensors[name]["shards"][0] for name in state]
        for row, shard in enumerate(shards):
            shard["offsets"] = [row, 0]
        body["tensors"] = {"x": {"dtype": "float32", "shape": [number, 2], "shards": shards}}
        body["description"]["state"] = {"dict": [["x", {"tensor": "x"}]]}

    forge(folder, merge)


def test_a_tensor_of_many_shards_is_loaded_in_linear_time(tmp_path: Path) -> None:
    """A search through all shards for each one takes minutes for large models."""
    lines = []
    for number in (20, 160):
        path, target = tmp_path / str(number), {"x": torch.zeros(number, 2)}
        in_rows(path, number)
        lines.append(lines_of(partial(checkpoint.load_sharded, target, path)))
        assert target["x"][:, 0].tolist() == list(range(number))
    assert lines[1] < 10 * lines[0]
