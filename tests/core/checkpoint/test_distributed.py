"""Sharded checkpoints of one process and of several: round trips, and what is refused."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import VARIABLE

import ottava
from ottava.checkpoint import (
    flatten_state_dict,
    latest_checkpoint,
    load_sharded,
    save_sharded,
    save_step,
    storage,
)
from ottava.checkpoint.flatten import sharded_rows
from ottava.errors import CheckpointError, DTypeError, OptionError, ShapeError, UsageError
from ottava.tensors import InnerTensor

WORKER = Path(__file__).with_name("distributed_worker.py")
INTERRUPTED = Path(__file__).with_name("interrupted_worker.py")
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def inner(value: Any) -> dict[str, bytes]:
    """The bytes of a tensor, or of everything that a quantized one holds."""
    if isinstance(value, ottava.QuantizedTensorStorage):
        held = [(i.argument, getattr(value, i.attribute)) for i in value.inner_tensors]
        return {name: raw(tensor) for name, tensor in held if tensor is not None}
    return {"": raw(value)}


def contents(state: Any) -> Any:
    """A nested state with bytes in the place of tensors."""
    if isinstance(state, torch.Tensor):
        return inner(state)
    if isinstance(state, dict):
        return {key: contents(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(contents(value) for value in state)
    return ("float", repr(state)) if isinstance(state, float) else (type(state), state)


def model(recipe: Any, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe):
        return torch.nn.Sequential(
            ottava.nn.Linear(5, 33, recipe=recipe), ottava.nn.Linear(33, 3, recipe=recipe)
        )


def training(recipe: Any, seed: int = 0) -> dict[str, Any]:
    """Weights, an optimizer that has made a step, and what else belongs to a training."""
    net = model(recipe, seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * (seed + 1))
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": seed,
        "loss": math.nan,
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(DTYPES),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.tuples(inside, inside)
        | st.dictionaries(st.text() | st.integers(), inside, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    made = torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    return made.reshape(shape)


@settings(deadline=None, max_examples=15)
@given(values=json_values, parts=st.dictionaries(st.text(max_size=4), tensors(), max_size=4))
def test_anything_saved_is_loaded_bit_for_bit(
    values: Any, parts: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "saved"
    state = {"values": values, "tensors": parts, "nested": [{"values": values}, parts.copy()]}
    save_sharded(state, path)
    targets = [
        {name: torch.zeros_like(part.reshape(-1).view(torch.uint8)) for name, part in parts.items()}
        for _ in range(2)
    ]
    shaped = [
        {
            name: flat.view(parts[name].dtype).reshape(parts[name].shape)
            for name, flat in target.items()
        }
        for target in targets
    ]
    loaded = load_sharded(
        {"values": 3, "tensors": shaped[0], "nested": [{"values": None}, shaped[1]]}, path
    )
    assert contents(loaded) == contents(state)
    assert all(loaded["tensors"][name] is shaped[0][name] for name in parts)
    reader = storage.FolderReader(path)
    assert {name: raw(reader.whole(name)) for name in reader.index.tensors} == {
        f"{prefix}.{name}": raw(part)
        for prefix in ("tensors", "nested.1")
        for name, part in parts.items()
    }


def test_a_training_is_loaded_in_place(recipe: Any, tmp_path: Path) -> None:
    saved, target = training(recipe, 1), training(recipe, 2)
    save_sharded(saved, tmp_path / "new" / "folder")
    before = {name: value.data_ptr() for name, value in target["optimizer"]["state"][0].items()}
    loaded = load_sharded(target, tmp_path / "new" / "folder")
    assert contents(loaded) == contents(saved)
    assert contents(target["model"]) == contents(saved["model"])
    assert {
        name: value.data_ptr() for name, value in target["optimizer"]["state"][0].items()
    } == before
    assert loaded["model"]["0.weight"] is target["model"]["0.weight"]


def test_writes_reach_the_layer_and_what_derives_from_it(recipe: Any, tmp_path: Path) -> None:
    a, b = model(recipe, 1), model(recipe, 2)
    with ottava.tensors.columnwise_layout("transpose"):
        c = model(recipe, 3)
        c[0].weight.update_usage(columnwise_usage=True)
        assert c[0].weight._transpose is not None
        save_sharded(a.state_dict(), tmp_path / "a")
        for net in (b, c):
            net(torch.ones(2, 5))
            load_sharded(net.state_dict(), tmp_path / "a")
            outs, grads = [], []
            for each in (net, a):
                x = torch.ones(2, 5, requires_grad=True)
                outs.append(each(x))
                grads += torch.autograd.grad(outs[-1].square().sum(), x)
            assert torch.equal(*outs)
            assert torch.equal(*grads)
    # A backward pass that saved the old codes refuses to run.
    out = b(torch.ones(2, 5, requires_grad=True))
    load_sharded(dict(b.named_parameters()), tmp_path / "a")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_files_are_safetensors(recipe: Any, tmp_path: Path) -> None:
    import safetensors.torch

    save_sharded(model(recipe).state_dict(), tmp_path / "saved")
    held = safetensors.torch.load_file(
        *(tmp_path / "saved").glob("rank-00000-of-00001-*.safetensors")
    )
    tensors, _ = flatten_state_dict(model(recipe).state_dict())
    assert {name: (t.dtype, raw(t)) for name, t in held.items()} == {
        n: (t.dtype, raw(t)) for n, t in tensors.items()
    }


# -- what is refused --


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "'a.b' is a object"),
        (b"x", "'a.b' is a bytes"),
        ({1}, "'a.b' is a set"),
        ({None: 1}, "'a.b' has the key None"),
        ({True: 1}, "'a.b' has the key True"),
        (torch.ones(2, device="meta"), "'a.b' is on meta"),
        (torch.eye(2).to_sparse(), "'a.b' is of layout torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex128), "'a.b' is of torch.complex128"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DTypeError, match=message):
        save_sharded({"a": {"b": value}}, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(DTypeError, match="too deep"):
        save_sharded({"x": deep}, tmp_path / "saved")
    for state in ([torch.ones(1)], None):
        with pytest.raises(DTypeError, match="the state is a"):
            save_sharded(state, tmp_path / "saved")  # type: ignore[arg-type]
    for call in (save_sharded, load_sharded):
        with pytest.raises(DTypeError, match="path"):
            call({}, 3)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no process group"):
            call({}, tmp_path / "x", group="some")
        for group in (object(), 3):
            with pytest.raises(OptionError, match=r"the group is .*new_group\(\)"):
                call({}, tmp_path / "x", group=group)
    with pytest.raises(UsageError, match=r"'a\.b'"):
        save_sharded({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "saved")
    for step in (-1, True, 1.0):
        with pytest.raises(OptionError, match="step"):
            save_step({}, tmp_path, step)  # type: ignore[arg-type]
    for keep in (0, True, "1"):
        with pytest.raises(OptionError, match="keep"):
            save_step({}, tmp_path, 1, keep=keep)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shape", "block", "local", "offset", "expected"),
    [
        ((64, 5), None, 16, 16, (64, 16)),
        ((64, 5), 1, 16, 48, (64, 48)),
        ((64, 5), 8, 16, 48, (8, 6)),
        ((60, 5), 8, 16, 48, (8, 6)),
        ((60, 5), 8, 12, 48, (8, 6)),
        ((60, 5), 8, 0, 60, (8, 8)),
        ((3, 4, 5), 8, 2, 0, (2, 0)),
        ((64, 5), 8, 12, 48, "rows 48 to 60 of 64, which cut the blocks of 's'"),
        ((64, 5), 8, 16, 12, "cut the blocks"),
        ((64, 5), 8, 12, 52, "cut the blocks"),
        ((3, 4, 5), 8, 1, 0, "rows 0 to 1 of 3, which cut"),
    ],
)
def test_blocks_of_rows_are_shards_where_they_are_whole(
    shape: Any, block: int | None, local: int, offset: int, expected: Any
) -> None:
    each = math.prod(shape[1:-1])
    rows = local if block is None else -(-local * each // block)
    inner, part = InnerTensor("_s", "s", gather=True, block_rows=block), torch.empty(rows, 5)
    arguments = ("w", inner, part, (local, *shape[1:]), shape, (offset, *[0] * (len(shape) - 1)))
    if isinstance(expected, str):
        with pytest.raises(ShapeError, match=f"'w' has .*{expected}|{expected}"):
            sharded_rows(*arguments)
        return
    assert sharded_rows(*arguments) == expected
    with pytest.raises(ShapeError, match="sharded in columns"):
        sharded_rows("w", inner, part, (local, 2), shape[-2:], (offset, 1))
    with pytest.raises(ShapeError, match="rows"):
        sharded_rows("w", inner, torch.empty(rows + 1, 5), *arguments[3:])


def test_names_that_differ_are_listed(tmp_path: Path) -> None:
    x, y = torch.ones(2), torch.zeros(2)
    save_sharded({"a": {"x": x, "n": 1}, "l": [x, 2]}, tmp_path / "s")
    cases: list[tuple[Any, str]] = [
        ({"a": {"x": y, "y": y, "n": 0}, "l": [y, 0]}, "misses 'a.y'"),
        ({"a": {"x": y, "n": 0, "m": 5}, "l": [y, 0]}, "misses 'a.m'"),
        ({"a": {"n": 0}, "l": [y, 0]}, "no place for 'a.x'"),
        ({"a": {"x": y, "n": 0}, "l": [y, 0, y]}, "misses 'l.2'"),
        ({"a": {"x": y, "n": y}, "l": [y, 0]}, "misses 'a.n'"),
        ({"a": {"x": 1, "n": 0}, "l": [y, 0]}, "misses 'a.x'"),
        ({"a": [y]}, "misses 'a.0'"),
        ({}, "no place for 'a.x', 'l.0'"),
    ]
    for target, message in cases:
        with pytest.raises(CheckpointError, match=message):
            load_sharded(target, tmp_path / "s")
        assert not y.any()
    z = torch.full((3,), 7.0)
    loaded = load_sharded(
        {"a": {"x": y, "m": 5, "z": z}, "more": {"z": 1}}, tmp_path / "s", strict=False
    )
    assert loaded["a"]["z"] is z
    assert (z == 7).all()
    assert loaded["a"]["n"] == 1
    assert loaded["a"]["m"] == 5
    assert loaded["more"] == {"z": 1}
    assert torch.equal(y, x)
    for target in ({"a": {"x": torch.zeros(3)}}, {"a": {"x": torch.zeros(2, dtype=torch.float64)}}):
        with pytest.raises(
            CheckpointError, match=r"'a.x' of .* has shape \(2,\) and dtype float32"
        ):
            load_sharded(target, tmp_path / "s", strict=False)


def test_kinds_that_differ_are_named(recipe: Any, quantizer: Any, tmp_path: Path) -> None:
    weight = quantizer(torch.randn(4, 4))
    save_sharded({"w": weight}, tmp_path / "q")
    save_sharded({"w": torch.randn(4, 4)}, tmp_path / "p")
    plain = torch.zeros(4, 4)
    with pytest.raises(CheckpointError, match=r"'w' of .* is quantized.*Expected: not quantized"):
        load_sharded({"w": plain}, tmp_path / "q")
    with pytest.raises(CheckpointError, match=r"'w' of .* is not quantized.*Expected: quantized"):
        load_sharded({"w": weight}, tmp_path / "p")
    other = type(quantizer)(torch.float8_e5m2)(torch.randn(4, 4))
    for value in (other, quantizer(torch.randn(4, 4).bfloat16())):
        with pytest.raises(CheckpointError, match="as in the state"):
            load_sharded({"w": value}, tmp_path / "q")
    # A part of a tensor has the scale of the whole, which is not its own to change.
    part = quantizer(torch.randn(8, 4))[:4]
    with pytest.raises(UsageError, match="'w' is a view"):
        load_sharded({"w": part}, tmp_path / "q")
    saved = contents({"w": weight})
    copied = quantizer(torch.zeros(4, 4))
    load_sharded({"w": copied}, tmp_path / "q")
    assert contents({"w": copied}) == saved


def test_a_name_is_taken_only_once(tmp_path: Path) -> None:
    one, two, zero = {"x": torch.ones(2)}, {"x": torch.full((2,), 2.0)}, {"x": torch.zeros(2)}
    path = tmp_path / "saved"
    save_sharded(one, path)
    with pytest.raises(CheckpointError, match=r"saved exists.*overwrite=True"):
        save_sharded(two, path)
    assert load_sharded(zero, path)["x"][0] == 1
    save_sharded(two, path, overwrite=True)
    assert load_sharded(zero, path)["x"][0] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    for name in ("file", "folder", "link"):
        with pytest.raises(
            CheckpointError, match="is not a sharded checkpoint and is not replaced"
        ):
            save_sharded(two, tmp_path / name, overwrite=True)
    assert (tmp_path / "folder" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_sharded(two, tmp_path / "file" / "below")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder", "link", "saved"]


def test_steps_are_found_and_pruned(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    for step in (7, 100, 20):
        assert (
            save_step({"n": step}, tmp_path / "run", step) == tmp_path / "run" / f"step-{step:07d}"
        )
    for name in ("step-0000999", ".step-0000998-a.b.partial", "step-x", "other"):
        (tmp_path / "run" / name).mkdir()
    shutil.copytree(tmp_path / "run" / "step-0000100", tmp_path / "run" / "step-0000200")
    (tmp_path / "run" / "step-0000200" / "ottava.json").unlink()
    shutil.copytree(
        tmp_path / "run" / "step-0000100", tmp_path / "run" / ".step-0000300-a.b.partial"
    )
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-0000100"
    save_step({"n": 30}, tmp_path / "run", 30, keep=2)
    left = {entry.name for entry in (tmp_path / "run").iterdir()}
    # Those two, and what is no checkpoint of anybody's.
    whole = {"step-0000100", "step-0000030"}
    assert left == whole | {"step-0000999", "step-0000200", "step-x", "other"}
    assert load_sharded({}, latest_checkpoint(tmp_path / "run")) == {"n": 100}


@pytest.mark.parametrize(
    ("worker", "every"),
    [(WORKER, ""), (INTERRUPTED, ""), pytest.param(WORKER, "1", marks=pytest.mark.slow)],
    ids=["ranks", "kills", "every rank"],
)
def test_ranks_and_kills(worker: Path, every: str, tmp_path: Path) -> None:
    """Cases under FSDP2 on four processes; saves killed at every call that changes the disk."""
    command = [sys.executable, "-W", "ignore", str(worker), str(tmp_path)]
    environment = os.environ | {VARIABLE: every}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        env=environment,
    )
    assert done.returncode == 0, done.stdout
