"""Quantized tensors and models in files and in other processes: bytes stay what they are."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp

import ottava
from ottava.checkpoint import flatten_state_dict, load_file, save_file, unflatten_state_dict
from ottava.errors import OttavaError, ShapeError, UsageError
from ottava.nn import Linear
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
KINDS = ("both", "rowwise", "columnwise", "square")
SHAPES = [(), (5,), (0, 7), (7, 0), (33, 70), (2, 31, 65)]


def wide(shape: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(10 * torch.randn(tuple(shape), generator=random)).clamp(1e-30, 1e30)
    return (torch.randn(tuple(shape), generator=random).sign() * magnitudes).to(dtype)


def quantizer(kind: str = "both", fp8_dtype: torch.dtype = E4M3) -> MXFP8Quantizer:
    return MXFP8Quantizer(
        fp8_dtype,
        rowwise=kind != "columnwise",
        columnwise=kind != "rowwise",
        with_2d_quantization=kind == "square",
        scale_rounding="floor",
    )


def check_alike(one: Any, two: Any) -> None:
    """Bytes, kind, nominal dtype and what else makes the values."""
    assert type(one) is type(two)
    assert one.dtype == two.dtype
    assert one._fp8_dtype == two._fp8_dtype
    assert one.rowwise_serves_columnwise == two.rowwise_serves_columnwise
    for name in INNER:
        mine, theirs = getattr(one, name), getattr(two, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.shape == theirs.shape
            assert torch.equal(mine, theirs), name
    assert torch.equal(
        one.dequantize(torch.float64).nan_to_num(7.0), two.dequantize(torch.float64).nan_to_num(7.0)
    )


def by_torch(value: Any, **options: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way", [by_torch, lambda q: pickle.loads(pickle.dumps(q))], ids=["torch", "pickle"]
)
def test_tensors_and_storages(way: Callable[[Any], Any], kind: str) -> None:
    for number, shape in enumerate(SHAPES):
        for internal in (False, True):
            make = quantizer(kind, E5M2 if number % 2 else E4M3)
            make.internal = internal
            q = make(wide(shape, dtype=torch.bfloat16))
            loaded = way({"w": q})["w"]
            check_alike(loaded, q)
            assert loaded._quantizer == make
            # It works on.
            loaded.quantize_(wide(shape, seed=1))
            check_alike(
                loaded.detach() if not internal else loaded,
                make(wide(shape, seed=1), dtype=torch.bfloat16),
            )


@pytest.mark.parametrize(
    "way", [by_torch, lambda q: pickle.loads(pickle.dumps(q))], ids=["torch", "pickle"]
)
def test_views_and_parameters(way: Callable[[Any], Any]) -> None:
    whole = quantizer()(wide((96, 64)))
    for op in (
        lambda t: t[32:],
        lambda t: t.t(),
        lambda t: t[:, 32:].t(),
        lambda t: t.view(2, 48, 64),
    ):
        check_alike(way(op(whole)), op(whole))
    pair = way([whole, whole[32:64]])
    before = pair[0].dequantize()
    pair[1].clone().zero_()
    assert torch.equal(pair[0].dequantize(), before)
    parameter = torch.nn.Parameter(quantizer()(wide((33, 70))))
    parameter._high_precision_init_val = wide((33, 70))
    loaded = way(parameter)
    check_alike(loaded.detach(), parameter.detach())
    assert loaded.requires_grad
    assert isinstance(loaded, torch.nn.Parameter)
    assert torch.equal(loaded.get_high_precision_init_val(), wide((33, 70)))
    same = way([whole, whole])
    assert same[0] is same[1]


# A file is read before anything imported the recipe, in a fork: reading it imports whatever is
# installed.
ELSEWHERE = """
import os, sys, torch
from ottava.checkpoint import load_file
if not os.fork():
    w = load_file(sys.argv[1])["w"]
    assert type(w).__name__ == "MXFP8Tensor", type(w)
    torch.save(w.dequantize(torch.float64), sys.argv[3])
    sys.exit()
assert os.wait()[1] == 0
from ottava_mxfp8 import MXFP8BlockScaling
loaded = torch.load(sys.argv[2], weights_only=True)
wide = lambda q: q.dequantize(torch.float64)
found = {name: [wide(q), wide(q.quantize_(q.dequantize() * 2))] for name, q in loaded.items()}
torch.save(found, sys.argv[4])
assert not any(name.startswith("ottava_current") for name in sys.modules)
"""


def test_another_process_where_only_the_recipe_is_installed(tmp_path: Path) -> None:
    saved = {kind: quantizer(kind)(wide((33, 70), dtype=torch.bfloat16)) for kind in KINDS}
    one = quantizer()(wide((33, 70)))
    save_file({"w": one}, tmp_path / "state.safetensors")
    torch.save(saved, tmp_path / "saved.pt")
    paths = [
        str(tmp_path / name) for name in ("state.safetensors", "saved.pt", "w.pt", "values.pt")
    ]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *paths], check=True, timeout=120)
    assert torch.equal(torch.load(paths[2], weights_only=True), one.dequantize(torch.float64))
    values = torch.load(paths[3], weights_only=True)
    for kind, q in saved.items():
        assert torch.equal(values[kind][0], q.dequantize(torch.float64)), kind
        q.quantize_(q.dequantize() * 2)
        assert torch.equal(values[kind][1], q.dequantize(torch.float64)), kind


def test_shared_memory_reaches_another_process() -> None:
    """What a forked child writes is seen here."""
    q = quantizer()(wide((64, 70)))
    check_alike(q.share_memory_(), quantizer()(wide((64, 70))))
    context = torch.multiprocessing.get_context("fork")
    child = context.Process(target=_write, args=(q,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    check_alike(q, quantizer()(_written()))


def _written() -> torch.Tensor:
    x = wide((64, 70))
    x[32:] = wide((32, 70), seed=1)
    return x


def _write(q: MXFP8Tensor) -> None:
    # One thread: a forked child has no pool of them.
    torch.set_num_threads(1)
    q[32:].copy_(_written()[32:])


# Models


def net_of(recipe: Any = None, seed: int = 0, primary: bool = True) -> torch.nn.Sequential:
    recipe = recipe or MXFP8BlockScaling()
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe, enabled=primary):
        return torch.nn.Sequential(
            Linear(70, 64, recipe=recipe), torch.nn.GELU(), Linear(64, 33, recipe=recipe)
        )


def through_torch(state: Any, like: Any, tmp_path: Path) -> Any:
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


def through_dcp(state: Any, like: Any, tmp_path: Path) -> Any:
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp.load(like, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return like


def through_safetensors(state: Any, like: Any, tmp_path: Path) -> Any:
    save_file(state, tmp_path / "state.safetensors")
    return load_file(tmp_path / "state.safetensors")


def through_dcp_flat(state: Any, like: Any, tmp_path: Path) -> Any:
    tensors, metadata = flatten_state_dict(state)
    dcp.save(tensors, checkpoint_id=tmp_path / "flat", no_dist=True)
    read = {
        name: torch.zeros_like(t.view(torch.uint8)).view(t.dtype)
        if t.dtype.itemsize == 1
        else torch.zeros_like(t)
        for name, t in tensors.items()
    }
    dcp.load(read, checkpoint_id=tmp_path / "flat", no_dist=True)
    return unflatten_state_dict(read, metadata)


WAYS = [through_torch, through_dcp, through_safetensors, through_dcp_flat]


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_models_with_primary_weights(way: Callable[..., Any], square: bool, tmp_path: Path) -> None:
    recipe = MXFP8BlockScaling(with_2d_quantization=square)
    net, other = net_of(recipe), net_of(recipe, seed=1)
    x = torch.randn(40, 70)
    net(x).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    net.zero_grad()
    state = way(net.state_dict(), other.state_dict(), tmp_path)
    for i in (0, 2):
        check_alike(state[f"{i}.weight"], net[i].weight.detach())
        assert torch.equal(state[f"{i}.bias"], net[i].bias)
    other.load_state_dict(state, strict=True)
    for i in (0, 2):
        check_alike(other[i].weight, net[i].weight)
        assert other[i].weight._quantizer is not None
        assert isinstance(other[i].weight, torch.nn.Parameter)
    # Training goes on as it would have.
    for model in (net, other):
        model(x).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    check_alike(other[0].weight, net[0].weight)
    # The file is nobody's memory.
    assert (
        not torch.equal(state["0.weight"].dequantize(), net[0].weight.dequantize())
        or way is through_dcp
    )


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_one_direction(way: Callable[..., Any], tmp_path: Path) -> None:
    net, other = net_of(), net_of(seed=1)
    for model in (net, other):
        model[0].weight.update_usage(columnwise_usage=False)
        model[2].weight.update_usage(rowwise_usage=False)
    state = way(net.state_dict(), other.state_dict(), tmp_path)
    for i in (0, 2):
        check_alike(state[f"{i}.weight"], net[i].weight.detach())


def test_dcp_with_the_optimizer(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(steps: int, seed: int = 0) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
        net = net_of(seed=seed)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(steps):
            train(net, optimizer, step)
        return net, optimizer

    def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        net(
            torch.randn(40, 70, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        optimizer.step()

    net, optimizer = trained(2)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    other, fresh = trained(1, seed=5)
    model_state, optimizer_state = get_state_dict(other, fresh)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(
        other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    check_alike(other[0].weight, net[0].weight)
    train(net, optimizer, 7)
    train(other, fresh, 7)
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    check_alike(other[2].weight, net[2].weight)


@pytest.mark.parametrize("primary", [False, True])
def test_whole_models_are_pickled_and_copied(primary: bool) -> None:
    net, x = net_of(primary=primary), torch.randn(40, 70)
    expected = net(x)
    for made in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert torch.equal(made(x), expected)
        made(x).sum().backward()
        torch.optim.SGD(made.parameters(), lr=1.0).step()
        assert not torch.equal(made(x), expected)
        assert torch.equal(net(x), expected)
    # A recipe without state leaves nothing of itself in a state dict.
    assert sorted(net.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]


# safetensors


def test_other_tools_read_the_tensors_of_a_file(tmp_path: Path) -> None:
    net = net_of(MXFP8BlockScaling(fp8_format=ottava.Format.E5M2))
    save_file(net.state_dict(), tmp_path / "state.safetensors")
    with safetensors.safe_open(tmp_path / "state.safetensors", framework="pt") as file:
        names = sorted(file.keys())
        read = {name: file.get_tensor(name) for name in names}
        metadata = file.metadata()
    arguments = ["columnwise_data", "columnwise_scale_inv", "rowwise_data", "rowwise_scale_inv"]
    expected = [f"{i}.weight.{argument}" for i in (0, 2) for argument in arguments]
    assert names == sorted([*expected, "0.bias", "2.bias"])
    weight = net[0].weight.detach()
    for argument, dtype in (("data", E5M2), ("scale_inv", torch.float8_e8m0fnu)):
        for direction in ("rowwise", "columnwise"):
            tensor = read[f"0.weight.{direction}_{argument}"]
            assert tensor.dtype == dtype
            assert torch.equal(
                tensor.view(torch.uint8), getattr(weight, f"_{direction}_{argument}")
            )
    # By the format's own arithmetic.
    values = read["0.weight.rowwise_data"].double()
    powers = read["0.weight.rowwise_scale_inv"].double().repeat_interleave(32, 1)[:, :70]
    assert torch.equal(values * powers, weight.dequantize(torch.float64))
    assert all(isinstance(text, str) for text in metadata.values())


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_any_shape(kind: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        f"t{i}": quantizer(kind)(wide(shape, i)) for i, shape in enumerate(SHAPES)
    }
    bare = quantizer(kind)
    bare.internal = True
    state["bare"] = bare(wide((33, 70), dtype=torch.float16))
    state["transposed"] = quantizer(kind)(wide((33, 70))).t()
    state["part"] = quantizer(kind)(wide((96, 64)))[32:, :32]
    state["plain"] = wide((3, 4), dtype=torch.bfloat16)
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    assert sorted(loaded) == sorted(state)
    for name, value in state.items():
        if name == "plain":
            assert torch.equal(loaded[name], value)
        else:
            check_alike(loaded[name], value)
            assert isinstance(loaded[name], MXFP8TensorStorage)
            assert loaded[name]._quantizer is None


def test_squares_whose_directions_share_their_codes(tmp_path: Path) -> None:
    """A direction that was made of the other has its codes."""
    make = quantizer("square")
    q = make.with_usage(True, False)(wide((33, 70)))
    q.update_usage(rowwise_usage=True, columnwise_usage=True)
    for way in (by_torch, lambda q: pickle.loads(pickle.dumps(q)), copy.deepcopy):
        check_alike(way(q), make(wide((33, 70))))
    save_file({"w": q}, tmp_path / "state.safetensors")
    check_alike(load_file(tmp_path / "state.safetensors")["w"], make(wide((33, 70))))


def test_tied_weights_are_saved_or_refused(tmp_path: Path) -> None:
    q = quantizer()(wide((96, 64)))
    for state in ({"w": q, "tied": q}, {"w": q, "part": q[32:]}):
        try:
            save_file(state, tmp_path / "state.safetensors")
        except OttavaError:
            continue
        for name, loaded in load_file(tmp_path / "state.safetensors").items():
            check_alike(loaded, state[name])


def test_damaged_files_are_refused() -> None:
    q = quantizer()(wide((33, 70)))
    tensors, metadata = flatten_state_dict({"w": q})
    missing = {name: t for name, t in tensors.items() if name != "w.rowwise_scale_inv"}
    with pytest.raises(UsageError, match=r"rowwise_scale_inv.*missing"):
        unflatten_state_dict(missing, metadata)
    padded = dict(tensors)
    padded["w.rowwise_scale_inv"] = torch.zeros(128, 4, dtype=torch.uint8).view(
        torch.float8_e8m0fnu
    )
    with pytest.raises(ShapeError, match=r"'w'.*\(128, 4\).*\(33, 3\)"):
        unflatten_state_dict(padded, metadata)
    for change in (
        {"fp8_dtype": {"dtype": "float16"}},
        {"fp8_dtype": {"dtype": "nonesuch"}},
        {"fp8_dtype": "e4m3"},
        {"with_2d_quantization": "yes"},
        {"values_from_columns": 1},
        {"dtype": {"dtype": "float64"}},
        {"shape": [33, 71]},
    ):
        described = json.loads(metadata["ottava"])
        described["quantized"]["w"]["static"].update(change)
        with pytest.raises(OttavaError, match="'w'"):
            unflatten_state_dict(tensors, {"ottava": json.dumps(described)})
    q.clear()
    with pytest.raises(UsageError, match="'w' holds no data"):
        flatten_state_dict({"w": q})
