"""Master weights on one process; random shards of every recipe, and of quantizers that say nothing
about shards, are in the integration tests, as are most refusals."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import ottava
from ottava.distributed import (
    MasterWeights,
    cast_master_weights_to_fp8,
    is_custom,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.tensors import columnwise_layout
from tests.comparing import assert_same


def test_a_plan_serves_new_values_and_follows_what_moved(quantizer: Any) -> None:
    weights = [quantizer.quantize(torch.ones(4, 6).bfloat16()) for _ in range(2)]
    masters = [torch.randn(4, 6), torch.randn(24)]
    plan = MasterWeights(weights, masters)
    # Nothing is written before it is asked for.
    assert_same(weights[0].dequantize(), torch.ones(4, 6).bfloat16())

    def check() -> None:
        plan.quantize()
        for weight, master in zip(weights, masters, strict=True):
            whole = weight._quantizer.quantize(master.view(4, 6).to(weight.dtype))
            assert_same(weight._data, whole._data)
            assert_same(weight._scale_inv, whole._scale_inv)

    check()
    masters[0].mul_(3.0)
    check()
    # Other memory, for the bytes, the scale and the master.
    buffer = torch.zeros(24, dtype=torch.uint8)
    replace_raw_data(weights[0], buffer)
    check()
    assert_same(buffer.view(4, 6), weights[0]._data)
    weights[1]._scale_inv, masters[1].data = torch.zeros(()), torch.randn(24)
    check()
    weights[1].data = quantizer.quantize(torch.ones(4, 6).bfloat16())
    check()
    # Another quantizer, many times: a new one may have the address of one that is gone.
    for _ in range(5):
        weights[0].update_quantizer(quantizer.copy())
        check()
    # A master that is not contiguous is a copy when it is flattened.
    masters[0].data = torch.randn(6, 4).t()
    check()
    masters[0].mul_(2.0)
    check()
    # Other tensors in the lists, as FSDP2 replaces the local tensors of its parameters.
    masters[0].data = torch.randn(4, 6)
    check()
    masters[1] = torch.randn(24)
    check()
    weights[0] = quantizer.quantize(torch.ones(4, 6).bfloat16())
    check()
    weights[0].clear()
    with pytest.raises(UsageError):
        plan.quantize()


def test_a_transpose_alone_takes_no_shards(quantizer: Any) -> None:
    """Its bytes are in another order, also where its shape is the same."""
    with columnwise_layout("transpose"):
        weight = quantizer.with_usage(False, True).quantize(torch.ones(8, 8))
        before = weight._transpose.clone()
        for outs in (None, [torch.zeros(64, dtype=torch.uint8)]):
            with pytest.raises(UsageError, match="not in the order"):
                quantize_master_weights([weight], [torch.randn(64)], [0], None, outs)
    assert_same(weight._transpose, before)


def test_a_transpose_follows_the_bytes(quantizer: Any) -> None:
    with columnwise_layout("transpose"):
        weight = quantizer.quantize(torch.ones(4, 6))
        alias = weight.detach()
        cast_master_weights_to_fp8([weight], [torch.randn(4, 6)])
        assert weight._transpose is alias._transpose is None
        post_all_gather_processing([weight, torch.ones(2)])
        assert_same(weight._transpose, weight._data.t())


@pytest.mark.parametrize("manual", [False, True])
def test_a_forward_pass_rebuilds_a_transpose(recipe: Any, manual: bool) -> None:
    """Unless the caller does, after the gather of the bytes."""
    with columnwise_layout("transpose"), ottava.quantized_model_init(recipe):
        layer: Any = ottava.nn.Linear(6, 4, recipe=recipe)
        layer.weight.update_usage(columnwise_usage=True)
        assert layer.weight._transpose is not None
        quantize_master_weights(
            [layer.weight], [torch.randn(4, 6)], None, manual_post_all_gather_processing=manual
        )
        assert layer.weight._transpose is None
        layer(torch.ones(2, 6))
        assert (layer.weight._transpose is None) == manual


#: Positional arguments after the weights and the masters, those by name, and whether the order is
#: that of an earlier version.
ORDERS: dict[str, Any] = {
    "positional": lambda o, q: ((o, None, [None], False), {}, False),
    "offsets and group": lambda o, q: ((o, None), {}, False),
    "quantizers by name": lambda o, q: ((o,), {"quantizers": [q]}, False),
    "all by name": lambda o, q: (
        (),
        {"quantizers": q, "amax_reduce_group": None, "start_offsets": o},
        False,
    ),
    "former, one quantizer": lambda o, q: ((q,), {"start_offsets": o}, True),
    "former, a list": lambda o, q: (([q], None), {"start_offsets": o}, True),
    "former, none": lambda o, q: ((None, None), {"start_offsets": o}, True),
    "former, their own": lambda o, q: (([None],), {"start_offsets": o}, True),
}


@pytest.mark.parametrize("order", ORDERS)
def test_arguments_in_both_orders(order: str, quantizer: Any) -> None:
    weight, expected = (quantizer.quantize(torch.ones(4, 6)) for _ in range(2))
    master = torch.randn(24)
    positional, named, former = ORDERS[order]([6], quantizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cast_master_weights_to_fp8([weight], [master[6:]], *positional, **named)
    assert [w.category for w in caught] == [DeprecationWarning] * former
    quantize_master_weights([expected], [master[6:]], [6])
    assert_same(weight._data, expected._data)


def test_arguments_that_are_given_twice_are_refused(quantizer: Any) -> None:
    weight, master = quantizer.quantize(torch.ones(4, 6)), torch.randn(24)
    before, cast = weight._data.clone(), cast_master_weights_to_fp8
    with pytest.raises(OptionError, match=r"given twice.*by name alone"):
        cast([weight], [master], quantizer, quantizers=quantizer)  # type: ignore[call-overload]
    with (
        pytest.raises(DTypeError, match="quantizer"),
        pytest.warns(DeprecationWarning, match="by name"),
    ):
        cast([weight], [master], [0], start_offsets=[0])  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="two groups"):
        cast([weight], [master], [0], object(), amax_reduce_group=object())  # type: ignore[call-overload]
    assert_same(weight._data, before)


def test_storages_and_parameters_serve_as_weights(quantizer: Any) -> None:
    """Gradients are not asked for, and autograd learns that the saved values are gone."""
    weight, master = torch.nn.Parameter(quantizer.quantize(torch.ones(4, 4))), torch.randn(4, 4)
    x, parameter = torch.randn(2, 4, requires_grad=True), torch.nn.Parameter(master)
    y, version = (x @ weight.dequantize().t()).sum(), weight._version
    quantize_master_weights([weight], [parameter], None)
    assert weight._version > version
    assert weight.requires_grad
    y.backward()
    assert parameter.grad is None
    storage = quantizer.copy()
    storage.internal = True
    bare = storage.quantize(torch.ones(4, 4))
    quantize_master_weights([bare], [master], [0])
    assert_same(bare._data, weight._data)  # type: ignore[attr-defined]


def test_other_arguments(quantizer: Any) -> None:
    with pytest.raises(DTypeError):
        post_all_gather_processing([None])  # type: ignore[list-item]
    with pytest.raises(DTypeError):
        is_custom("x")  # type: ignore[arg-type]
    assert is_custom(quantizer) is is_custom(None) is is_custom(torch.ones(1)) is False
    quantize_master_weights([], [], [], None)


def test_weights_in_one_place_are_refused(quantizer: Any) -> None:
    """Ranges of a buffer that overlap: one weight would have bytes of the other."""
    weights = [quantizer.quantize(torch.ones(4, 6)) for _ in range(2)]
    buffer = torch.empty(40, dtype=torch.uint8)
    for weight, start in zip(weights, (0, 16), strict=True):
        replace_raw_data(weight, buffer[start : start + 24])
    before = buffer.clone()
    with pytest.raises(ShapeError, match="overlap"):
        quantize_master_weights(weights, [torch.randn(24), torch.randn(24)], [0, 0])
    assert_same(buffer, before)
    with pytest.raises(ShapeError, match="overlap"):
        replace_raw_data(weights[0], buffer[8:32])
    assert_same(buffer, before)


@pytest.mark.parametrize("nothing", [None, (None, None), [None], [None, None]], ids=str)
def test_no_target_may_be_written_as_a_pair_of_none(quantizer: Any, nothing: Any) -> None:
    """As callers of TransformerEngine write it; and one of a pair may have bytes."""
    weights = [quantizer.quantize(torch.ones(4, 6)) for _ in range(3)]
    master, data = torch.randn(4, 6), torch.zeros(24, dtype=torch.uint8)
    masters, outs = [master.flatten(), None, master.flatten()], [nothing, nothing, (data, None)]
    quantize_master_weights(weights, masters, [0, None, 0], None, outs)
    whole, ones = quantizer.quantize(master)._data, quantizer.quantize(torch.ones(4, 6))._data
    assert_same([weights[0]._data, weights[1]._data, data.view(4, 6)], [whole, ones, whole])
    assert_same(weights[2]._data, ones)
