"""Tensors, storages and models in files, pickles and other processes: bytes stay what they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from ottava import QuantizedTensor
from ottava.checkpoint import (
    load_file,
    load_sharded,
    save_file,
    save_sharded,
)
from tests.cases import told
from tests.comparing import assert_same
from tests.copying import by_file, by_pickle
from tests.core.layouts.layouts import (
    DTYPES,
    EACH,
    EACH_OF_A_LAYER,
    LAYOUTS,
    QUANTIZERS,
    ROTATED_ONCE,
    USAGES,
    assert_directions,
    boundary,
    has_one_scale,
    inner,
    quantizer,
)
from tests.core.layouts.test_primary_weights import net
from tests.samples import wide

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPES: list[tuple[int, ...]] = [(), (5,), (0, 7), (7, 0), (33, 70), (2, 31, 65)]
ODD_SHAPES = [*SHAPES, (1, 1), (3, 17)]


WAYS: list[Callable[[Any], Any]] = [by_file, by_pickle]


def check_alike(one: Any, two: Any) -> None:
    """Bytes, kind, nominal dtype and layout."""
    assert type(one) is type(two)
    assert (one.dtype, one.layout_text) == (two.dtype, two.layout_text)
    assert_same(inner(one), inner(two))
    assert_same(one.dequantize(torch.float64), two.dequantize(torch.float64))


@EACH
def test_tensors_and_storages(name: str) -> None:
    for number, (shape, way) in enumerate(itertools.product(SHAPES, WAYS)):
        usages, internal = list(USAGES)[number % 3], number // 2 % 2 == 1
        with told(shape, way.__name__, usages, internal):
            make = quantizer(name, usages, internal=internal)
            q = make(wide(*shape, dtype=DTYPES[number % 3], sigma=1.0))
            loaded = way({"w": q})["w"]
            check_alike(loaded, q)
            assert loaded._quantizer == make
            # It works on.
            loaded.quantize_(wide(*shape, seed=1))
            assert_same(inner(loaded), inner(make(wide(*shape, seed=1))))


@pytest.mark.parametrize("way", WAYS)
@EACH
def test_views_and_parameters(name: str, way: Callable[[Any], Any]) -> None:
    rows = boundary(name)
    whole = QUANTIZERS[name](wide(3 * rows, 2 * rows))
    views = [whole[rows:], whole[:, rows:], whole.view(3, rows, -1)]
    if name not in ROTATED_ONCE:
        views += [whole.t(), whole[:, rows:].t()]
    for view in views:
        check_alike(way(view), view)
    if has_one_scale(name):
        # A part that shares a scale is loaded by itself.
        loaded, part = way([whole, whole[rows:]])
        part.copy_(torch.full(part.shape, 100.0))
        assert_same(loaded.dequantize(), whole.dequantize())
        expected = QUANTIZERS[name](torch.full(part.shape, 100.0))
        assert_same(part.dequantize(), expected.dequantize())
    same = way([whole, whole])
    assert same[0] is same[1]
    parameter = torch.nn.Parameter(QUANTIZERS[name](wide(33, 70)))
    parameter._high_precision_init_val = wide(33, 70)
    again = way(parameter)
    assert isinstance(again, torch.nn.Parameter)
    assert again.requires_grad
    check_alike(again.detach(), parameter.detach())
    assert_same(again.get_high_precision_init_val(), wide(33, 70))


def test_a_direction_that_was_made_of_the_other_shares_its_codes(tmp_path: Path) -> None:
    for name in (n for n, layout in LAYOUTS.items() if layout.square and not layout.one_buffer):
        q = quantizer(name, "rowwise")(wide(33, 70))
        q.update_usage(rowwise_usage=True, columnwise_usage=True)
        save_file({"w": q}, tmp_path / "state.safetensors")
        expected = QUANTIZERS[name](wide(33, 70))
        for made in (by_file(q), by_pickle(q), load_file(tmp_path / "state.safetensors")["w"]):
            check_alike(made, expected)


@pytest.mark.every_layout
def test_files_of_all_layouts(tmp_path: Path) -> None:
    """Bare storages, and views; without quantizers."""
    state: dict[str, Any] = {"plain": wide(3, 4, dtype=torch.bfloat16)}
    for name in QUANTIZERS:
        rows = boundary(name)
        bare = quantizer(name, internal=True)
        state[f"{name}, bare"] = bare(wide(33, 70, dtype=torch.float16, sigma=1.0))
        if name not in ROTATED_ONCE:
            state[f"{name}, transposed"] = QUANTIZERS[name](wide(33, 70)).t()
        state[f"{name}, part"] = QUANTIZERS[name](wide(2 * rows, 2 * rows))[rows:, :rows]
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    assert sorted(loaded) == sorted(state)
    assert_same(loaded.pop("plain"), state.pop("plain"))
    for key, value in state.items():
        with told(key):
            check_alike(loaded[key], value)
            assert loaded[key]._quantizer is None


def test_safetensors_saves_values(tmp_path: Path) -> None:
    state = {"w": QUANTIZERS["mxfp8"](wide(33, 70)), "plain": wide(3, 4)}
    state["turned"] = quantizer("1x128", "columnwise")(wide(33, 70))
    with pytest.warns(UserWarning, match="2 quantized tensors, 'w' first, are written in high"):
        safetensors.torch.save_file(state, tmp_path / "x")
    loaded = safetensors.torch.load_file(tmp_path / "x")
    assert_same(loaded.pop("plain"), state.pop("plain"))
    for name, value in state.items():
        assert_same(loaded[name], value.dequantize())


# -- models --


def through_torch(state: Any, like: Any, path: Path) -> Any:
    return by_file(state)


def through_dcp(state: Any, like: Any, path: Path) -> Any:
    dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
    dcp.load(like, checkpoint_id=path / "dcp", no_dist=True)
    return like


def through_safetensors(state: Any, like: Any, path: Path) -> Any:
    save_file(state, path / "state.safetensors")
    return load_file(path / "state.safetensors")


def through_sharded(state: Any, like: Any, path: Path) -> Any:
    save_sharded(state, path / "sharded")
    load_sharded(like, path / "sharded")
    return like


MODEL_WAYS = [through_torch, through_dcp, through_safetensors, through_sharded]


@pytest.mark.every_layout
@pytest.mark.parametrize("way", MODEL_WAYS)
def test_tensors_of_odd_shapes(way: Callable[..., Any], tmp_path: Path) -> None:
    """With all that their bytes do not tell: the shape, and amaxes of a second level."""
    state: dict[str, Any] = {}
    like: dict[str, Any] = {}
    for number, (name, shape) in enumerate(itertools.product(QUANTIZERS, ODD_SHAPES)):
        # Shards of squares are saved by their rows.
        usages = "both" if QUANTIZERS[name].layout.square else list(USAGES)[number % 3]
        make, key = quantizer(name, usages), f"{name}, {shape}"
        state[key] = make(wide(*shape, dtype=DTYPES[number % 3], sigma=1.0))
        like[key] = make(torch.zeros(shape, dtype=DTYPES[number % 3]))
    loaded = way(state, like, tmp_path)
    for key, q in state.items():
        with told(key):
            assert_directions(loaded[key], q)
            assert loaded[key].shape == q.shape
            assert_same(loaded[key].dequantize(), q.dequantize())
            # Values lie in memory as the tensor says: fused optimizers rely on it.
            assert loaded[key].dequantize().is_contiguous() is q.is_contiguous()


@EACH_OF_A_LAYER
def test_models_with_primary_weights(name: str, tmp_path: Path) -> None:
    """Training goes on as it would have."""
    model, x = net(name), wide(40, 70, sigma=1.0)

    def step(model: torch.nn.Module) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()

    step(model)
    loaded = []
    for way in MODEL_WAYS:
        with told(way.__name__):
            other = net(name, seed=1)
            state = way(model.state_dict(), other.state_dict(), tmp_path)
            for key, value in model.state_dict().items():
                if isinstance(value, QuantizedTensor):
                    assert_directions(state[key], value)
                else:
                    assert_same(state[key], value)
            other.load_state_dict(state, strict=True)
            loaded.append(other)
    step(model)
    for other in loaded:
        step(other)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)
            assert_same(mine.detach().dequantize(), theirs.detach().dequantize())
        assert other[0].weight._quantizer is not None
