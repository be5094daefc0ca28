"""Sharded master weights of a recipe that says nothing about shards, on one process and core
alone."""

from __future__ import annotations

import math
import random
import warnings
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import Quantizer
from ottava.distributed import (
    MasterWeights,
    cast_master_weights_to_fp8,
    is_custom,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from ottava.distributed.batches import GatheredBatch
from ottava.distributed.shards import ShardJob
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.tensors import columnwise_layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 1e-40, 3e38, 65520.0, 0.0)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    st.lists(st.one_of(st.floats(width=32), st.sampled_from(SPECIAL)), max_size=40),
    st.randoms(use_true_random=False),
)
def test_gathered_shards_are_the_values_bit_for_bit(
    dtypes: list[torch.dtype], values: list[float], chance: random.Random
) -> None:
    """Each element is on one rank, or on none; the ranks send as much as they have, and NaNs keep
    their payloads."""
    world = chance.randint(1, 4)
    kept: list[torch.Tensor] = []

    class Keeping(Quantizer):
        def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
            kept.append(tensor)
            return tensor

    class Output:
        holder = SimpleNamespace(get_usages=lambda: {"rowwise": True, "columnwise": True})

        def write(self, whole: Any, start_offset: int) -> None:
            pass

    wholes = [torch.tensor(values, dtype=torch.float32).to(dtype) for dtype in dtypes]
    ranks: list[list[Any]] = [[] for _ in range(world)]
    for whole in wholes:
        missing = chance.randint(0, len(values)) if chance.random() < 0.3 else len(values)
        ends = sorted(chance.randint(0, missing) for _ in range(world - 1))
        for jobs, a, b in zip(ranks, [0, *ends], [*ends, missing], strict=True):
            shape: Any = (len(values),)
            shard = whole[a:b].repeat_interleave(2)[::2] if chance.random() < 0.5 else whole[a:b]
            quantizer: Any = Keeping()
            output: Any = Output()
            jobs.append(ShardJob(quantizer, shard, shape, whole.dtype, a, output))
        whole[missing:] = 0
    batches = [GatheredBatch(jobs) for jobs in ranks]
    batches[0].cast([torch.nn.functional.pad(batch.values(), [0, 13]) for batch in batches])
    for found, whole in zip(kept, wholes, strict=True):
        bits = torch.int32 if whole.dtype == torch.float32 else torch.int16
        assert torch.equal(found.view(bits), whole.view(bits))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from(DTYPES), st.data())
def test_a_shard_is_written_and_nothing_else(
    rows: int, columns: int, dtype: torch.dtype, data: Any
) -> None:
    from conftest import SampleQuantizer

    quantizer = SampleQuantizer(torch.float8_e4m3fn)
    master = (
        torch.randn(
            rows, columns, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        )
        * 50
    )
    weight: Any = quantizer.quantize(torch.ones(rows, columns, dtype=dtype))
    before = weight._data.reshape(-1).tolist()
    start = data.draw(st.integers(0, master.numel()))
    stop = data.draw(st.integers(start, master.numel()))
    shard = master.view(-1)[start:stop]
    quantize_master_weights([weight], [shard], [start])
    # Alone, this process holds all there is: what is missing counts as 0.
    values = shard.to(dtype).float().tolist()
    largest = max((abs(v) for v in values), default=0.0)
    scale, scale_inv = oracle.scale_from_amax(largest, 448.0, 0.0, False)
    assert weight._scale_inv.item() == scale_inv
    codes = [oracle.encode(oracle.float32(v * scale), "e4m3") for v in values]
    assert weight._data.reshape(-1).tolist() == before[:start] + codes + before[stop:]


def test_masters_are_rounded_to_the_nominal_dtype_first(quantizer: Any) -> None:
    """1 + 2^-9 is 1 in bfloat16, and decides the scale."""
    weight = quantizer.quantize(torch.ones(2, dtype=torch.bfloat16))
    quantize_master_weights([weight], [torch.tensor([1 + 2.0**-9, 0.5])], None)
    assert weight._scale_inv.item() == oracle.scale_from_amax(1.0, 448.0, 0.0, False)[1]


def test_a_plan_serves_new_values_and_follows_what_moved(quantizer: Any) -> None:
    weights = [quantizer.quantize(torch.ones(4, 6).bfloat16()) for _ in range(2)]
    masters = [torch.randn(4, 6), torch.randn(24)]
    plan = MasterWeights(weights, masters)

    def check() -> None:
        plan.quantize()
        for weight, master in zip(weights, masters, strict=True):
            whole = weight._quantizer.quantize(master.view(4, 6).to(weight.dtype))
            assert torch.equal(weight._data, whole._data)
            assert torch.equal(weight._scale_inv, whole._scale_inv)
            assert weight._fp8_dtype == whole._fp8_dtype

    check()
    masters[0].mul_(3.0)
    check()
    # Other memory, for the bytes, the scale and the master.
    buffer = torch.zeros(24, dtype=torch.uint8)
    replace_raw_data(weights[0], buffer)
    check()
    assert torch.equal(buffer.view(4, 6), weights[0]._data)
    weights[1]._scale_inv = torch.zeros(())
    masters[1].data = torch.randn(24)
    check()
    weights[1].data = quantizer.quantize(torch.ones(4, 6).bfloat16())
    check()
    # Another quantizer, many times: a plan must not take a new one for an old one that is gone.
    for _ in range(5):
        weights[0].update_quantizer(quantizer.copy())
        check()
    # A master that is not contiguous is a copy when it is flattened.
    masters[0].data = torch.randn(6, 4).t()
    check()
    masters[0].mul_(2.0)
    check()
    # Other tensors in the lists, as FSDP2 replaces the local tensors of its parameters. All are
    # contiguous again, so that a plan is reused until it notices.
    masters[0].data = torch.randn(4, 6)
    check()
    masters[1] = torch.randn(24)
    check()
    weights[0] = quantizer.quantize(torch.ones(4, 6).bfloat16())
    check()


def test_a_plan_writes_nothing_before_it_is_asked(quantizer: Any) -> None:
    weight = quantizer.quantize(torch.ones(4, 6))
    before = weight._data.clone()
    plan = MasterWeights([weight], [torch.randn(4, 6)])
    assert torch.equal(weight._data, before)
    weight.clear()
    with pytest.raises(UsageError):
        plan.quantize()


@pytest.mark.parametrize("start", [-1, 1, 2**70])
def test_a_shard_must_lie_in_its_weight(quantizer: Any, start: int) -> None:
    weight = quantizer.quantize(torch.ones(4, 6))
    before = weight._data.clone()
    with pytest.raises(ShapeError):
        quantize_master_weights([weight], [torch.zeros(24)], [start])
    assert torch.equal(weight._data, before)


@pytest.mark.parametrize("start", [True, 0.0, "0", None])
def test_an_offset_is_an_integer(quantizer: Any, start: Any) -> None:
    with pytest.raises(OptionError):
        quantize_master_weights([quantizer.quantize(torch.ones(4, 6))], [torch.zeros(24)], [start])


def test_a_transpose_alone_takes_no_shards(quantizer: Any) -> None:
    """Its bytes are in another order, also where its shape is the same."""
    with columnwise_layout("transpose"):
        weight = quantizer.with_usage(False, True).quantize(torch.ones(8, 8))
        before = weight._transpose.clone()
        for outs in (None, [torch.zeros(64, dtype=torch.uint8)]):
            with pytest.raises(UsageError, match="not in the order"):
                quantize_master_weights(
                    [weight], [torch.randn(64)], [0], fsdp_shard_model_weights=outs
                )
    assert torch.equal(weight._transpose, before)


def test_a_transpose_follows_the_bytes(quantizer: Any) -> None:
    with columnwise_layout("transpose"):
        weight = quantizer.quantize(torch.ones(4, 6))
        alias = weight.detach()
        cast_master_weights_to_fp8([weight], [torch.randn(4, 6)])
        for held in (weight, alias):
            assert held._transpose is None
        post_all_gather_processing([weight])
        assert torch.equal(weight._transpose, weight._data.t())


ORDERS: dict[str, Any] = {
    "positional": lambda w, m, o, q: ((w, m, o, None, [None], False), {}),
    "offsets and group": lambda w, m, o, q: ((w, m, o, None), {}),
    "quantizers by name": lambda w, m, o, q: ((w, m, o), {"quantizers": q}),
    "by name": lambda w, m, o, q: (
        (),
        {"model_weights": w, "master_weights": m, "start_offsets": o},
    ),
    "all by name": lambda w, m, o, q: (
        (w, m),
        {
            "quantizers": [q],
            "amax_reduce_group": None,
            "start_offsets": o,
            "fsdp_shard_model_weights": None,
        },
    ),
}
OLD_ORDERS: dict[str, Any] = {
    "one": lambda w, m, o, q: ((w, m, q), {"start_offsets": o}),
    "list": lambda w, m, o, q: ((w, m, [q], None), {"start_offsets": o}),
    "none": lambda w, m, o, q: ((w, m, None, None), {"start_offsets": o}),
    "their own": lambda w, m, o, q: ((w, m, [None]), {"start_offsets": o}),
}


@pytest.mark.parametrize("order", [*ORDERS, *OLD_ORDERS])
def test_arguments_in_both_orders(order: str, quantizer: Any) -> None:
    weight, master = quantizer.quantize(torch.ones(4, 6)), torch.randn(24)
    arguments = (ORDERS | OLD_ORDERS)[order]
    args, named = arguments([weight], [master[6:]], [6], quantizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cast_master_weights_to_fp8(*args, **named)
    assert [w.category for w in caught] == [DeprecationWarning] * (order in OLD_ORDERS)
    expected = quantizer.quantize(torch.ones(4, 6))
    quantize_master_weights([expected], [master[6:]], [6])
    assert torch.equal(weight._data, expected._data)


def test_arguments_that_are_given_twice_are_refused(quantizer: Any) -> None:
    weight, master = quantizer.quantize(torch.ones(4, 6)), torch.randn(24)
    before = weight._data.clone()
    cast: Any = cast_master_weights_to_fp8
    with pytest.raises(OptionError, match=r"given twice.*by name alone"):
        cast([weight], [master], quantizer, quantizers=quantizer)
    with (
        pytest.raises(DTypeError, match="quantizer"),
        pytest.warns(DeprecationWarning, match="by name"),
    ):
        cast([weight], [master], [0], start_offsets=[0])
    with pytest.raises(OptionError, match="two groups"):
        cast([weight], [master], [0], object(), amax_reduce_group=object())
    assert torch.equal(weight._data, before)


def test_storages_serve_as_weights(quantizer: Any) -> None:
    quantizer.internal = True
    weight, master = quantizer.quantize(torch.ones(3, 4).half()), torch.randn(3, 4)
    quantize_master_weights([weight], [master], [0])
    assert torch.equal(weight._data, quantizer.quantize(master.half())._data)


def test_parameters_serve_as_weights_and_masters_as_they_are(quantizer: Any) -> None:
    """Gradients are not asked for, and autograd learns that the saved values are gone."""
    weight = torch.nn.Parameter(quantizer.quantize(torch.ones(4, 4)))
    x = torch.randn(2, 4, requires_grad=True)
    y = (x @ weight.dequantize().t()).sum()
    master = torch.nn.Parameter(torch.randn(4, 4))
    version = weight._version
    quantize_master_weights([weight], [master], None)
    assert weight._version > version
    assert weight.requires_grad
    y.backward()
    assert master.grad is None


def test_what_is_no_tensor_is_refused(quantizer: Any) -> None:
    with pytest.raises(DTypeError):
        post_all_gather_processing([None])  # type: ignore[list-item]
    with pytest.raises(DTypeError):
        is_custom("x")  # type: ignore[arg-type]
    assert is_custom(quantizer) is False
    assert is_custom(None) is False


def test_weights_in_one_place_are_refused(quantizer: Any) -> None:
    """Ranges of a buffer that overlap: one weight would have bytes of the other."""
    weights, buffer = (
        [quantizer.quantize(torch.ones(4, 6)) for _ in range(2)],
        torch.empty(40, dtype=torch.uint8),
    )
    for weight, start in zip(weights, (0, 16), strict=True):
        replace_raw_data(weight, buffer[start : start + 24])
    before = buffer.clone()
    with pytest.raises(ShapeError, match="overlap"):
        quantize_master_weights(weights, [torch.randn(24), torch.randn(24)], [0, 0])
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("nothing", [None, (None, None), [None], [None, None]], ids=str)
def test_no_shard_may_be_written_as_a_pair_of_none(quantizer: Any, nothing: Any) -> None:
    """As callers of TransformerEngine write it: this rank holds nothing, or its shard goes into the
    weight itself."""
    weights = [quantizer.quantize(torch.ones(4, 6)) for _ in range(2)]
    master = torch.randn(4, 6)
    quantize_master_weights(weights, [master.flatten(), None], [0, None], None, [nothing, nothing])
    assert torch.equal(weights[0]._data, quantizer.quantize(master)._data)
    assert torch.equal(weights[1]._data, quantizer.quantize(torch.ones(4, 6))._data)


def test_a_pair_may_have_bytes_for_one_direction(quantizer: Any) -> None:
    weight, master = quantizer.quantize(torch.ones(4, 6)), torch.randn(4, 6)
    data = torch.zeros(24, dtype=torch.uint8)
    quantize_master_weights([weight], [master.flatten()], [0], None, [(data, None)])
    assert torch.equal(data.view(4, 6), quantizer.quantize(master)._data)
