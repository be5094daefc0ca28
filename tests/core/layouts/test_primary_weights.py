"""Weights that are kept quantized: their start, optimizers, state dicts, copies, master weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava import QuantizedTensor
from ottava.distributed import quantize_master_weights, replace_raw_data
from ottava.errors import ShapeError, UsageError
from ottava.nn import Linear
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    EACH,
    EACH_OF_A_LAYER,
    LAYOUTS,
    QUANTIZERS,
    USAGES,
    OneQuantizer,
    assert_directions,
    boundary,
    inner,
    quantizer,
)
from tests.samples import wide


def net(name: str, *, primary: bool = True, seed: int = 0) -> torch.nn.Sequential:
    recipe = OneQuantizer(row=name)
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layers = Linear(70, 64, recipe=recipe), Linear(64, 33, recipe=recipe)
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(inplace=True), layers[1])


def passes(run: Any, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@EACH_OF_A_LAYER
def test_they_hold_the_quantized_initial_values(name: str) -> None:
    """And compute as layers that quantize these values in every step, checkpointed or not."""
    model, twin, x = net(name), net(name, primary=False), wide(40, 70, sigma=1.0)
    for i in (0, 2):
        weight = model[i].weight
        initial = weight.get_high_precision_init_val()
        assert isinstance(weight, torch.nn.Parameter)
        assert isinstance(weight, QuantizedTensor)
        assert type(initial) is torch.Tensor
        assert_same(inner(weight), inner(QUANTIZERS[name](initial)))
        with torch.no_grad():
            twin[i].weight.copy_(initial)
            twin[i].bias.copy_(model[i].bias)
    expected = passes(twin, twin, x)
    assert_same(passes(model, model, x), expected)
    for use_reentrant in (False, True):
        again = passes(lambda x, r=use_reentrant: checkpoint(model, x, use_reentrant=r), model, x)
        assert_same(again, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    with ottava.autocast(enabled=False):
        weight = model[0].weight.dequantize()
        assert_same(model[0](x), torch.nn.functional.linear(x, weight, model[0].bias))
    model[0].weight.clear_high_precision_init_val()
    assert model[0].weight.get_high_precision_init_val() is None


@EACH_OF_A_LAYER
def test_weights_made_under_no_grad_have_columns_when_these_are_asked_for(name: str) -> None:
    def layer() -> Linear:
        recipe = OneQuantizer(row=name)
        torch.manual_seed(0)
        with torch.no_grad(), ottava.quantized_model_init(recipe):
            return Linear(70, 64, recipe=recipe)

    layout, full, weight = QUANTIZERS[name].layout, net(name)[0], layer().weight
    if not layout.one_buffer:
        assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    weight.update_usage(columnwise_usage=True)
    assert_same(inner(weight), inner(full.weight))
    # A backward pass asks for them.
    lazy, x = layer(), wide(40, 70)
    assert_same(passes(lazy, lazy, x), passes(full, full, x))
    if not layout.square:
        assert lazy.weight.get_usages() == {"rowwise": True, "columnwise": True}
    # Where the values are gone, those of the rows would be others.
    for forget in (
        lambda w: w.clear_high_precision_init_val(),
        lambda w: w.mul_(2.0),
        lambda w: w.copy_(torch.ones_like(w)),
    ):
        lazy = layer()
        with torch.no_grad():
            forget(lazy.weight)
        y = lazy(x.requires_grad_())
        if layout.square:
            y.sum().backward()
            continue
        said = r"no columnwise data.*made under no_grad.*update_usage\(columnwise_usage=True\)"
        with pytest.raises(UsageError, match=said):
            y.sum().backward()
        with pytest.raises(UsageError, match=said):
            lazy.weight.update_usage(columnwise_usage=True)
        assert lazy.weight.get_usages() == {"rowwise": True, "columnwise": False}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Weight decay would be an operation of its own, rounded by itself.
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
}


@EACH
def test_an_optimizer_takes_the_steps_of_plain_weights(name: str) -> None:
    """Each step is the update of the dequantized values, quantized; moments are plain. Rows of the
    table take turns with optimizers."""
    number = list(QUANTIZERS).index(name)
    for what, make in [*OPTIMIZERS.items(), *OPTIMIZERS.items()][number % 5 :][:2]:
        with told(what):
            weight = torch.nn.Parameter(QUANTIZERS[name](wide(64, 70, sigma=1.0)))
            twin = torch.nn.Parameter(weight.dequantize().detach().clone())
            mine, theirs = make([weight]), make([twin])
            for step in range(3):
                weight.grad = wide(64, 70, seed=10 * number + step, sigma=1.0)
                twin.grad = weight.grad.clone()
                mine.step()
                theirs.step()
                expected = QUANTIZERS[name](twin.detach())
                assert_same(weight.detach().dequantize(), expected.dequantize())
                assert_directions(weight, expected)
                twin.data.copy_(expected.dequantize())
            moments = [v for v in mine.state[weight].values() if isinstance(v, torch.Tensor)]
            assert all(type(v) is torch.Tensor for v in moments)
            again = make([weight])
            again.load_state_dict(copy.deepcopy(mine.state_dict()))
            assert_same(
                [v for v in again.state[weight].values() if isinstance(v, torch.Tensor)], moments
            )


@EACH_OF_A_LAYER
def test_state_dicts(name: str) -> None:
    """Values of plain weights are quantized, and plain weights take the values; test_saving has
    those of quantized weights."""
    model, x = net(name), wide(5, 70)
    plain = torch.nn.Sequential(
        torch.nn.Linear(70, 64), torch.nn.ReLU(), torch.nn.Linear(64, 33)
    ).bfloat16()
    plain.load_state_dict(model.state_dict())
    assert_same(plain[0].weight, model[0].weight.dequantize(torch.bfloat16))
    assigned = net(name, seed=4)
    assigned.load_state_dict(model.state_dict(), assign=True)
    assert isinstance(assigned[0].weight, QuantizedTensor)
    assert_same(assigned(x), model(x))
    assigned.load_state_dict(plain.state_dict())
    assert_same(inner(assigned[0].weight), inner(QUANTIZERS[name](plain[0].weight.detach())))
    assert assigned[0].weight.dtype == torch.float32


@EACH_OF_A_LAYER
def test_a_weight_of_one_direction_serves_what_it_can(name: str) -> None:
    """An evaluation needs rows only; squares serve both."""
    model, x = net(name), wide(5, 70)
    expected = passes(model, model, x)
    model[0].weight.update_usage(columnwise_usage=False)
    assert_same(model(x), expected[0])
    if QUANTIZERS[name].layout.square:
        assert_same(passes(model, model, x), expected)
        model[0].weight.update_usage(rowwise_usage=False, columnwise_usage=True)
        assert_same(passes(model, model, x), expected)
    else:
        with pytest.raises(UsageError, match=r"no columnwise data.*columnwise=True"):
            passes(model, model, x)


# -- master weights, on one process that holds all of them --


@pytest.mark.every_layout
def test_one_batch_of_master_weights_of_all_layouts() -> None:
    quantizers = [quantizer(name, usages) for name in LAYOUTS for usages in list(USAGES)[:2]]
    for dtype in (torch.float32, torch.bfloat16):
        masters = [wide(140, 70, seed=seed) for seed in range(len(quantizers))]
        weights = [q(torch.ones(140, 70, dtype=dtype)) for q in quantizers]
        quantize_master_weights(weights, masters, None)
        for weight, make, master in zip(weights, quantizers, masters, strict=True):
            with told(make):
                assert_directions(weight, make(master.to(dtype)))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-squares", "1x128", "128x128", "int8-8x64"])
def test_a_shard_of_rows_is_that_of_the_whole(name: str) -> None:
    """Of whole blocks of rows, also of leading dimensions; others are refused before a write."""
    make, rows = QUANTIZERS[name], boundary(name)
    master = wide(4, rows, 40)
    for first, last in ((0, 2), (2, 4), (1, 4)):
        whole, part = make(torch.ones(4, rows, 40)), make(torch.ones(last - first, rows, 40))
        start = first * rows * 40
        quantize_master_weights([whole], [master[first:last]], [start], None, [part])
        assert_directions(part, make(master[first:last]))
    part = make(torch.ones(rows, 40))
    flat, before = make(torch.ones(4 * rows, 40)), inner(part)
    with pytest.raises(ShapeError, match="which cut the blocks"):
        shard = master.view(-1, 40)[rows - 3 : 2 * rows - 3]
        quantize_master_weights([flat], [shard], [(rows - 3) * 40], None, [part])
    assert_same(inner(part), before)


@EACH
def test_raw_data_move_into_a_buffer(name: str) -> None:
    """Values and all else stay; views of the tensor lie in the buffer."""
    for usages in USAGES:
        make = quantizer(name, usages)
        weight, buffer = make(wide(6, 4)), torch.zeros(200, dtype=torch.uint8)
        values, held = weight.dequantize(), weight.get_usages()
        sizes = [getattr(weight, part.attribute).numel() for part in weight.raw_inner()]
        replace_raw_data(weight, buffer[10:][: sum(sizes)].split(sizes))
        assert weight.data_ptr() == buffer[10:].data_ptr()
        assert_same(weight.dequantize(), values)
        assert weight.get_usages() == held
        assert_directions(weight, make(wide(6, 4)))
