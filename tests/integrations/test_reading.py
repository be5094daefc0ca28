"""What tensors are read from: files and folders of other tools, files of torch.save, and sharded
checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import ottava
from ottava import checkpoint
from ottava.checkpoint.files import write_tensors
from ottava.cli.main import app
from ottava.cli.recipes import checkpoint_layers
from ottava.errors import CheckpointError, OttavaError, UsageError
from ottava.tensors import InnerTensor, QuantizedTensorStorage, StaticField
from ottava_integrations import convert_file, read_state, reading
from tests.integrations.files import same_tensors


def held(state: Any) -> dict[str, list[torch.Tensor]]:
    """All tensors of a state dict, those that quantized ones hold among them."""
    values = {
        n: v.inner_list() if isinstance(v, QuantizedTensorStorage) else [v]
        for n, v in state.items()
    }
    return {
        name: [t.detach() for t in tensors if t is not None] for name, tensors in values.items()
    }


def assert_equal(one: Any, two: Any) -> None:
    assert one.keys() == two.keys()
    for name, tensors in held(one).items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, held(two)[name], strict=True)), name


def test_an_index_of_many_files_is_read_in_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in looks at the index, of which a file for each tensor made as many as their
    square."""
    names = [f"{number}.weight" for number in range(40)]
    for name in names:
        safetensors.torch.save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    looks = 0

    class Counting(dict[str, str]):
        def __getitem__(self, name: str) -> str:
            nonlocal looks
            looks += 1
            return super().__getitem__(name)

    monkeypatch.setattr(
        reading.json, "loads", lambda text: {"weight_map": Counting(index["weight_map"])}
    )
    assert read_state(tmp_path)[0].keys() == set(names)
    assert looks <= 2 * len(names)


def test_an_index_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read: it is no regular file"):
        read_state(tmp_path)
    for name in ("ottava.json", "model.safetensors"):
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_state(tmp_path)


def test_a_folder_of_shards(recipe: Any, tmp_path: Path) -> None:
    foreign = {f"{n}.weight": torch.randn(3, n + 1) for n in range(5)} | {"weight": torch.randn(2)}
    safetensors.torch.save_file(foreign, tmp_path / "in")
    folder = tmp_path / "folder"
    folder.mkdir()
    names = sorted(foreign)
    where = {
        name: f"model-0000{1 + number % 2}-of-00002.safetensors"
        for number, name in enumerate(names)
    }
    for file in set(where.values()):
        shard = {name: foreign[name] for name in names if where[name] == file}
        safetensors.torch.save_file(shard, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    convert_file(folder, tmp_path / "sharded", recipe)
    convert_file(tmp_path / "in", tmp_path / "whole", recipe)
    same_tensors(tmp_path / "sharded", tmp_path / "whole")
    for text, said in (
        ("{", r"index\.json cannot be read"),
        ("[]", r"index\.json cannot be read"),
        ('{"weight_map": []}', r"index\.json cannot be read"),
        ('{"weight_map": {"a": 3}}', r"index\.json cannot be read"),
        ("[" * 100_000, r"index\.json cannot be read"),
        ('{"weight_map": {"a": "../in"}}', "same folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "same folder"),
        ('{"weight_map": {"a": "absent"}}', "absent cannot be read"),
        (json.dumps({"weight_map": where | {"more": where["weight"]}}), "no tensor 'more'"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=said):
            read_state(folder)
    index.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors, files by tensor in model\.safetensors\.index\.json, or ottava",
    ):
        read_state(folder)
    (tmp_path / "in").rename(folder / "model.safetensors")
    convert_file(folder, tmp_path / "single", recipe)
    same_tensors(tmp_path / "single", tmp_path / "whole")


def test_files_of_torch_save(recipe: Any, tmp_path: Path) -> None:
    with ottava.quantized_model_init(recipe):
        model = torch.nn.Sequential(
            OrderedDict(layer=ottava.nn.Linear(7, 5, recipe=recipe), norm=torch.nn.LayerNorm(5))
        )
    model.register_parameter("tied", model.norm.weight)
    for new in (True, False):
        torch.save(model.state_dict(), tmp_path / "state.pt", _use_new_zipfile_serialization=new)
        convert_file(tmp_path / "state.pt", tmp_path / "out", "fp32")
        read = checkpoint.load_file(tmp_path / "out")
        assert torch.equal(read["layer.weight"], model.layer.weight.dequantize())
        assert read.keys() == model.state_dict().keys()
        assert len(safetensors.torch.load_file(tmp_path / "out")) == len(read) - 1
    for value, said in (
        ([torch.ones(1)], "holds a list"),
        ({"model": model.state_dict(), "epoch": 3}, "'model' is a"),
        ({3: torch.ones(1)}, "3 is a Tensor"),
        ({"x": torch.eye(2).to_sparse()}, "'x' is on meta, sparse, nested or expanded"),
        (model, "weights_only|state dict of tensors"),
    ):
        torch.save(value, tmp_path / "state.pt")
        with pytest.raises(CheckpointError, match=said):
            convert_file(tmp_path / "state.pt", tmp_path / "never", "fp32")
    assert not (tmp_path / "never").exists()


def test_a_sharded_checkpoint_is_what_was_saved(recipe: Any, tmp_path: Path) -> None:
    with ottava.quantized_model_init(recipe):
        net = torch.nn.Sequential(
            ottava.nn.Linear(5, 33, recipe=recipe), ottava.nn.Linear(33, 3, recipe=recipe)
        )
    checkpoint.save_sharded(net.state_dict(), tmp_path / "saved")
    state, texts = read_state(tmp_path / "saved")
    assert texts == {}
    assert_equal(state, net.state_dict())
    tensors, metadata = checkpoint.flatten_state_dict(net.state_dict())
    assert checkpoint.flatten_state_dict(state)[1] == metadata
    assert_equal(checkpoint.unflatten_state_dict(tensors, metadata), state)


def test_a_damaged_sharded_checkpoint_is_refused(recipe: Any, tmp_path: Path) -> None:
    """Every byte of it counts, also where the damage is in what no name of the state asks for."""
    original, path, chance = tmp_path / "saved", tmp_path / "damaged", random.Random(0)
    checkpoint.save_sharded({"a": torch.arange(20), "b": {"weight": torch.randn(4, 4)}}, original)
    for file in sorted(entry.name for entry in original.iterdir()):
        data = (original / file).read_bytes()
        ways = [data[:-1], data + b"0", b""]
        for _ in range(100):
            changed = bytearray(data)
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            ways.append(bytes(changed))
        for way in ways:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(original, path)
            (path / file).write_bytes(way)
            with pytest.raises(CheckpointError, match=file):
                read_state(path)


class Runs:
    """Pickled as a call of a function that leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickles_run_nothing(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "pickle.pt"
    kinds = [pickle.dumps(Runs(trace), protocol) for protocol in range(6)]
    for new in (True, False):
        torch.save({"layer.weight": Runs(trace)}, path, _use_new_zipfile_serialization=new)
        kinds.append(path.read_bytes())
    for raw in kinds:
        path.write_bytes(raw)
        for read in (read_state, lambda path: convert_file(path, tmp_path / "out", "bf16")):
            with pytest.raises(OttavaError, match=r"pickle\.pt"):
                read(path)
        assert not trace.exists()
        assert not (tmp_path / "out").exists()
    # The test could fail.
    pickle.loads(kinds[0])
    assert trace.exists()


def test_damaged_files_of_torch_save(tmp_path: Path) -> None:
    path, chance = tmp_path / "state.pt", random.Random(2)
    torch.save({"a": torch.arange(6), "b.weight": torch.randn(4, 4)}, path)
    raw = path.read_bytes()
    refused = 0
    for _ in range(400):
        changed = bytearray(raw)
        for _ in range(chance.choice((1, 1, 8))):
            changed[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed[: chance.choice((len(raw), chance.randrange(len(raw))))])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert all(
                    isinstance(value, torch.Tensor) for value in read_state(path)[0].values()
                )
        except OttavaError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_jagged_tensors_are_refused(layout: Any, tmp_path: Path) -> None:
    value = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    torch.save({"x": value}, tmp_path / "x.pt")
    with pytest.raises(OttavaError):
        read_state(tmp_path / "x.pt")


class Loose(QuantizedTensorStorage):
    """A third party's storage, which checks nothing and has no nominal dtype."""

    inner_tensors = (
        InnerTensor("_codes", "codes", native="_element"),
        InnerTensor("_factor", "factor"),
    )
    static_fields = (StaticField("_element", "element"), StaticField("_sizes", "sizes"))

    def __init__(
        self, *, codes: Any, factor: Any, element: Any, sizes: Any, quantizer: Any = None
    ) -> None:
        self._codes, self._factor, self._quantizer = codes, factor, quantizer
        self._element, self._sizes = element, sizes

    def size(self, dim: int | None = None) -> Any:
        return self._sizes if dim is None else self._sizes[dim]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._codes.view(self._element).to(dtype) * self._factor.to(dtype)[:, None]


@pytest.mark.parametrize("field", ["element", "sizes"])
def test_a_class_that_checks_nothing_is_refused_by_name(field: str, tmp_path: Path) -> None:
    """Whatever the file says to it."""
    made = Loose(
        codes=torch.arange(6, dtype=torch.uint8).view(2, 3),
        factor=torch.rand(2),
        element=torch.float8_e5m2,
        sizes=(2, 3),
    )
    tensors, metadata = checkpoint.flatten_state_dict({"weight": made, "bias": torch.ones(2)})
    for value in (
        None,
        [],
        [2, 3],
        [-1, 3],
        "x",
        1,
        1.5,
        {},
        {"dtype": "float32"},
        {"dtype": "float8_e5m2"},
        [[2], 3],
    ):
        described = json.loads(metadata["ottava"])
        described["quantized"]["weight"]["static"][field] = value
        (tmp_path / "x").unlink(missing_ok=True)
        write_tensors(tmp_path / "x", tensors, {"ottava": json.dumps(described)})
        with pytest.raises(OttavaError, match=r"x: 'weight'"):
            convert_file(tmp_path / "x", tmp_path / "never", "fp32")
    assert not (tmp_path / "never").exists()


def test_recipes_explain_asks_about_the_layers_of_a_checkpoint(recipe: Any, tmp_path: Path) -> None:
    """Matrices named weight: those that are quantized, and those that share another's values, as
    well."""
    with ottava.quantized_model_init(recipe):
        quantized = ottava.nn.Linear(32, 16, recipe=recipe)
    plain, tied = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)
    tied.weight = plain.weight
    body = {"first.up": quantized, "norm": torch.nn.LayerNorm(8), "second": plain, "tied": tied}
    state = {
        f"{name}.{key}": tensor
        for name, module in body.items()
        for key, tensor in module.state_dict().items()
    }
    state |= {"table": torch.zeros(4, 4), "third.weight_scale": torch.zeros(2, 2)}
    checkpoint.save_file(state, tmp_path / "model.safetensors")
    for place in (tmp_path / "model.safetensors", tmp_path):
        assert sorted(checkpoint_layers(place)) == ["first.up", "second", "tied"]
    asked = ["recipes", "--explain", "current", "--json", "--checkpoint"]
    found = json.loads(CliRunner().invoke(app, [*asked, str(tmp_path), "--layer", "more"]).stdout)
    assert sorted({row["layer"] for row in found["layers"]}) == [
        "first.up",
        "more",
        "second",
        "tied",
    ]
    checkpoint.save_file({"a.bias": torch.zeros(3)}, tmp_path / "none.safetensors")
    with pytest.raises(UsageError, match=r"none.safetensors has no matrix named \*.weight"):
        checkpoint_layers(tmp_path / "none.safetensors")
    absent = CliRunner().invoke(app, [*asked, str(tmp_path / "absent")])
    assert absent.exit_code == 2
    assert "absent cannot be read" in absent.output
