"""State dicts with quantized tensors as plain tensors and as safetensors files, for any storage
that is declared."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import forking
import pytest
import safetensors.torch
import torch

import ottava
from ottava import checkpoint
from ottava.errors import CheckpointError, DeviceError, DTypeError, OttavaError, UsageError
from ottava.tensors import Float8Tensor, InnerTensor, QuantizedTensorStorage, StaticField


class Rows(QuantizedTensorStorage):
    """A third party's storage: nothing but its declaration."""

    inner_tensors = (
        InnerTensor("_codes", "codes", native="_element"),
        InnerTensor("_factor", "factor"),
    )
    static_fields = (StaticField("_element", "element"), StaticField("_sizes", "sizes"))

    def __init__(
        self, *, codes: Any, factor: Any, element: torch.dtype, sizes: Any, quantizer: Any = None
    ) -> None:
        self._codes, self._factor, self._quantizer = codes, factor, quantizer
        self._element, self._sizes = element, sizes


def rows() -> Rows:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    return Rows(
        codes=codes,
        factor=torch.rand(3),
        element=torch.float8_e5m2,
        sizes=(3, (4, None), "x", 0.5, True),
    )


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
            assert (
                mine is None
                if theirs is None
                else torch.equal(mine, theirs) and mine.dtype == theirs.dtype
            )
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
    safetensors.torch.save_file(
        {"a.b": torch.ones(3)}, tmp_path / "other.safetensors", {"format": "pt"}
    )
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
        (
            _set(*WEIGHT, "class", to="os:system"),
            "not installed.*install the package that has the module 'os'",
        ),
        (_set(*WEIGHT, "class", to="ottava.tensors.storage:StorageSpec"), "not installed"),
        (_set(*WEIGHT, "static", "fp8_dtype", to={"dtype": "save"}), "cannot be restored"),
        (_set(*WEIGHT, "static", to={}), "cannot be restored"),
        (_set(*WEIGHT, "static", "more", to=1), "cannot be restored.*'more'"),
        (_set("aliases", to={"x": 1}), "damaged"),
        (_set("aliases", to={"x": "nothing"}), "'x' is said to be 'nothing'"),
        (_set("aliases", to={"step": "layer.bias"}), "'step' is said to be"),
        (
            lambda tensors, _: tensors.update({"layer.weight": torch.ones(1)}),
            "both a tensor and a quantized one",
        ),
        (
            _set(*WEIGHT, "tensors", to=["data", "fp8_scale_inv", "more"]),
            "'layer.weight.more' is missing",
        ),
        (_set(*WEIGHT, "static", "shape", to=[7, 5]), r"'layer.weight'.*\(7, 5\)"),
        (_set(*WEIGHT, "static", "fp8_dtype", to={"dtype": "float32"}), "'layer.weight'"),
        (
            lambda tensors, _: tensors.update({"layer.weight.fp8_scale_inv": torch.ones(2)}),
            "one element",
        ),
        (
            lambda tensors, _: tensors.update({"layer.weight.data": torch.ones(())}),
            "'data' is of torch.float32",
        ),
        (
            lambda tensors, _: tensors.update(
                {"layer.weight.data": torch.ones(5, 7).to(torch.float8_e5m2)}
            ),
            "e5m2",
        ),
        (_set(*WEIGHT, "tensors", to=[]), r"has the tensors \[\]"),
    ],
)
def test_damage_is_named(state: dict[str, Any], change: Any, message: str) -> None:
    tensors, metadata = edited(state, change)
    with pytest.raises(OttavaError, match=message):
        checkpoint.unflatten_state_dict(tensors, metadata)


def test_what_other_versions_say_besides_is_left_out(state: dict[str, Any]) -> None:
    tensors, metadata = edited(
        state, lambda _, described: described["quantized"]["layer.weight"].update(more=1)
    )
    read = checkpoint.unflatten_state_dict(tensors, metadata)
    assert torch.equal(read["layer.weight"]._data, state["layer.weight"]._data)
    assert checkpoint.flatten_state_dict(read)[1] == checkpoint.flatten_state_dict(state)[1]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', "[" * 100_000])
def test_metadata_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="damaged"):
        checkpoint.unflatten_state_dict({}, {"ottava": text})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (
        ("cut", b"\x10\x00\x00"),
        ("text", b"not a file of tensors"),
        ("empty", b""),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=name):
            checkpoint.load_file(tmp_path / name)
    with pytest.raises(CheckpointError, match="absent"):
        checkpoint.load_file(tmp_path / "absent")


def test_what_a_file_looks_like_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    looks = [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS"),
        (b"GGUF" + bytes(100), "GGUF"),
        (pickle.dumps({"a": 1}), "a pickle"),
        (bytes(100), "no safetensors file"),
    ]
    for content, said in looks:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load_file(path)
    torch.save({"a": torch.ones(1)}, path)
    with pytest.raises(
        CheckpointError, match=r"file: this looks like a file of torch\.save.*weights_only=True"
    ):
        checkpoint.load_file(path)
    with pytest.raises(CheckpointError, match="is a folder"):
        checkpoint.load_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        checkpoint.load_file(tmp_path / "pipe")


def test_what_cannot_be_written(state: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DTypeError, match="'x' is a int"):
        checkpoint.save_file({"x": 3}, tmp_path / "x")
    with pytest.raises(UsageError, match=r"two tensors would have the name 'layer\.weight\.data'"):
        checkpoint.save_file(state | {"layer.weight.data": torch.ones(1)}, tmp_path / "x")
    for value in (torch.ones(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(DTypeError, match=r"on meta|of layout"):
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

    for function in ("fsync", "replace"):
        for error, raised in (
            (OSError("no space"), UsageError),
            (KeyboardInterrupt(), KeyboardInterrupt),
        ):

            def fails(*arguments: Any, error: BaseException = error) -> None:
                assert len(list(tmp_path.iterdir())) == 2
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(os, function, fails)
                with pytest.raises(
                    raised, match="cannot be written: no space" if raised is UsageError else None
                ):
                    checkpoint.save_file(state, path)
            assert path.read_bytes() == before
            assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_full_disk(tmp_path: Path) -> None:
    """The file may not grow beyond 100 kB: what was written is removed, the old file stays."""
    program = (
        "import resource, signal, sys, torch; from ottava import checkpoint; from ottava.errors "
        "import UsageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, "
        "(100_000,) * 2)\n"
        "checkpoint.save_file({'small': torch.ones(10)}, sys.argv[1])\n"
        "try: checkpoint.save_file({'large': torch.ones(1_000_000)}, sys.argv[1])\n"
        "except UsageError as error: print(error)"
    )
    path = tmp_path / "x"
    done = forking.python(program, path)
    assert "cannot be written: Error while serializing: I/O error: File too large" in done.stdout, (
        done.stderr
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert torch.equal(checkpoint.load_file(path)["small"], torch.ones(10))


def test_tied_tensors_are_stored_once(state: dict[str, Any], tmp_path: Path) -> None:
    big = torch.randn(100, 100)
    tied = {
        "a": big,
        "b": big,
        "c": big.t(),
        "v": state["layer.weight"],
        "w": state["layer.weight"].detach(),
    }
    checkpoint.save_file(tied, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 2 * big.nbytes + 3000
    assert set(safetensors.torch.load_file(tmp_path / "x")) == {
        "a",
        "c",
        "v.data",
        "v.fp8_scale_inv",
    }
    read = checkpoint.load_file(tmp_path / "x")
    assert set(read) == set(tied)
    for name in "abc":
        assert torch.equal(read[name], tied[name])
    for name in "vw":
        assert torch.equal(read[name]._data, tied[name]._data)
        assert torch.equal(read[name]._scale_inv, tied[name]._scale_inv)
    # The same tensors make the same file, in whatever order they come.
    checkpoint.save_file(dict(sorted(read.items())), tmp_path / "y")
    plain = [safetensors.torch.load_file(tmp_path / name) for name in "xy"]
    assert plain[0].keys() == plain[1].keys()


def test_shared_and_conjugated_memory(state: dict[str, Any], tmp_path: Path) -> None:
    base = torch.randn(4, 4)
    values = {
        "a": base,
        "b": base,
        "part": base[1:],
        "c": torch.randn(3, dtype=torch.complex64).conj(),
    }
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
