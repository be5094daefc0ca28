"""Shards of master weights: bytes and scales are those of quantizing the whole weight at once; what
is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava.distributed import cast_master_weights_to_fp8, quantize_master_weights
from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava_current import Float8CurrentScalingQuantizer
from ottava_custom import HybridQuantizer
from ottava_delayed import Float8Quantizer
from ottava_mxfp8 import MXFP8Quantizer

sys.path.insert(0, str(Path(__file__).parent))

import sharded_weights_cases

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("examples", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_without_a_process_group(examples: int) -> None:
    sharded_weights_cases.run(examples)


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("made", [True, False], ids=["made with one", "dropped"])
@pytest.mark.parametrize(
    "other", [Float8CurrentScalingQuantizer, MXFP8Quantizer], ids=["current", "mxfp8"]
)
def test_one_side_of_a_hybrid(other: Any, made: bool, side: str) -> None:
    quantizer = HybridQuantizer(MXFP8Quantizer(E4M3, with_2d_quantization=True), other(E5M2))
    if side == "columnwise":
        quantizer = HybridQuantizer(quantizer.columnwise_quantizer, quantizer.rowwise_quantizer)
    values, master = torch.randn(64, 64), torch.randn(64, 64)
    wanted = side == "rowwise", side == "columnwise"
    weight = quantizer.with_usage(*wanted)(values) if made else quantizer(values)
    weight.update_usage(*wanted)
    quantize_master_weights([weight], [master.flatten()], [0])
    assert torch.equal(weight.dequantize(), quantizer.with_usage(*wanted)(master).dequantize())
    weight.copy_(quantizer(values))
    assert torch.equal(weight.dequantize(), quantizer.with_usage(*wanted)(values).dequantize())


# -- what is refused, with everything left as it was --


class Batch:
    """A weight of each recipe, and everything that a call could have changed."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.delayed = Float8Quantizer(
            torch.ones(1), torch.zeros(1), E4M3, saturated=torch.zeros(1, dtype=torch.int64)
        )
        self.quantizers = [
            Float8CurrentScalingQuantizer(E4M3),
            self.delayed,
            MXFP8Quantizer(E4M3),
            MXFP8Quantizer(E4M3, with_2d_quantization=True),
            Float8CurrentScalingQuantizer(E5M2),
        ]
        self.weights: list[Any] = [
            q.quantize(torch.randn(64, 96, generator=random).bfloat16()) for q in self.quantizers
        ]
        # Amaxes that clamp, and so would be counted.
        self.masters: list[Any] = [
            torch.randn(64, 96, generator=random) * 1000 for _ in self.weights
        ]
        self.outs: list[Any] = [None] * len(self.weights)
        self.starts: list[Any] = [0] * len(self.weights)
        self.delayed.amax.zero_()
        self.given: Any = None
        self.options: dict[str, Any] = {}
        self.watched = [t for w in self.weights for t in w.inner_list() if t is not None]
        self.watched += [self.delayed.amax, self.delayed.scale, self.delayed.saturated]
        self.before = [t.clone() for t in self.watched]

    def watch(self, *tensors: Any) -> None:
        for tensor in tensors:
            held = (
                [tensor]
                if type(tensor) is torch.Tensor
                else [t for t in tensor.inner_list() if t is not None]
            )
            self.watched += held
            self.before += [t.clone() for t in held]

    def cast(self) -> None:
        cast_master_weights_to_fp8(
            self.weights,
            self.masters,
            start_offsets=self.starts,
            quantizers=self.given,
            fsdp_shard_model_weights=self.outs,
            **self.options,
        )

    def unchanged(self) -> bool:
        return all(
            torch.equal(now, old) for now, old in zip(self.watched, self.before, strict=True)
        )


Change = Callable[[Batch], Any]


def _set(name: str, place: int, value: Any) -> Change:
    def change(batch: Batch) -> None:
        getattr(batch, name)[place] = value

    return change


def _buffer(shape: Any = 64 * 96, dtype: torch.dtype = torch.uint8, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, **options)


def _out(place: int, make: Callable[[], Any]) -> Change:
    def change(batch: Batch) -> None:
        out = make()
        batch.outs[place] = out
        batch.watch(
            *[t for t in (out if isinstance(out, (list, tuple)) else [out]) if not t.is_meta]
        )

    return change


def _quantized(quantizer: Any, *shape: int) -> Any:
    return quantizer.quantize(torch.ones(shape).bfloat16())


def _shared_buffer(batch: Batch) -> None:
    out = _buffer()
    batch.outs[0] = batch.outs[1] = out
    batch.watch(out)


def _overlapping_buffers(batch: Batch) -> None:
    out = _buffer(64 * 96 + 1)
    batch.outs[0], batch.outs[1] = out[1:], out[:-1]
    batch.watch(out)


def _twice(batch: Batch) -> None:
    batch.weights[1] = batch.weights[0]


def _two_shards(batch: Batch) -> None:
    batch.weights[1] = batch.weights[0]
    batch.masters[0], batch.masters[1] = (
        batch.masters[0].view(-1)[:3000],
        batch.masters[0].view(-1)[3000:],
    )
    batch.starts[0], batch.starts[1] = 0, 3000


def _unquantized(batch: Batch) -> None:
    batch.weights[2].update_quantizer(None)


def _options(batch: Batch, **options: Any) -> None:
    batch.given = [None] * 4 + [Float8CurrentScalingQuantizer(E5M2, **options)]


def _given(place: int, quantizer: Any) -> Change:
    def change(batch: Batch) -> None:
        batch.given = [None] * len(batch.weights)
        batch.given[place] = quantizer

    return change


def _call(**options: Any) -> Change:
    return lambda batch: batch.options.update(options)


def _fewer(name: str) -> Change:
    return lambda batch: getattr(batch, name).pop()


REFUSED: dict[str, tuple[type[OttavaError], Change]] = {
    "fewer masters": (ShapeError, _fewer("masters")),
    "fewer offsets": (ShapeError, _fewer("starts")),
    "fewer outs": (ShapeError, _fewer("outs")),
    "fewer weights": (ShapeError, _fewer("weights")),
    "fewer quantizers": (ShapeError, lambda b: setattr(b, "given", [None])),
    "quantizers are a class": (DTypeError, lambda b: setattr(b, "given", MXFP8Quantizer)),
    "a quantizer is a recipe's name": (DTypeError, lambda b: setattr(b, "given", ["current"] * 5)),
    "weights are a generator": (
        DTypeError,
        lambda b: setattr(b, "weights", (w for w in b.weights)),
    ),
    "missing offset": (OptionError, _set("starts", 4, None)),
    "negative offset": (ShapeError, _set("starts", 4, -1)),
    "overrunning offset": (ShapeError, _set("starts", 4, 1)),
    "huge offset": (ShapeError, _set("starts", 4, 2**70)),
    "offset is a bool": (OptionError, _set("starts", 4, False)),
    "offset is a float": (OptionError, _set("starts", 4, 0.0)),
    "offset is a string": (OptionError, _set("starts", 4, "0")),
    "master of float64": (DTypeError, lambda b: b.masters.__setitem__(4, b.masters[4].double())),
    "master of int": (DTypeError, lambda b: b.masters.__setitem__(4, b.masters[4].int())),
    "master of FP8": (DTypeError, lambda b: b.masters.__setitem__(4, b.masters[4].to(E4M3))),
    "master is quantized": (DTypeError, lambda b: b.masters.__setitem__(4, b.weights[0])),
    "master is sparse": (DTypeError, lambda b: b.masters.__setitem__(4, b.masters[4].to_sparse())),
    "master is a list": (DTypeError, lambda b: b.masters.__setitem__(4, [1.0])),
    "master on another device": (
        DeviceError,
        lambda b: b.masters.__setitem__(4, b.masters[4].to("meta")),
    ),
    "weight in high precision": (DTypeError, _set("weights", 4, torch.ones(64, 96))),
    "weight is None": (DTypeError, _set("weights", 4, None)),
    "no quantizer": (UsageError, _unquantized),
    "quantizer of another format": (DTypeError, _given(0, Float8CurrentScalingQuantizer(E5M2))),
    "MXFP8 of another format": (DTypeError, _given(2, MXFP8Quantizer(E5M2))),
    "quantizer of another kind": (OttavaError, _given(4, MXFP8Quantizer(E4M3))),
    "quantizer of another kind for blocks": (
        OttavaError,
        _given(2, Float8CurrentScalingQuantizer(E4M3)),
    ),
    "scales for rows in a weight of squares": (OttavaError, _given(3, MXFP8Quantizer(E4M3))),
    "other force_pow_2_scales": (OptionError, lambda b: _options(b, force_pow_2_scales=True)),
    "other amax_epsilon": (OptionError, lambda b: _options(b, amax_epsilon=1.0)),
    "one weight twice": (OttavaError, _twice),
    "two shards of one weight": (OttavaError, _two_shards),
    "group is a number": (OptionError, _call(amax_reduce_group=3)),
    "group is a list of ranks": (OptionError, _call(amax_reduce_group=[0, 1])),
    "manual is a number": (OttavaError, _call(manual_post_all_gather_processing=1)),
    "out too small": (ShapeError, _out(4, lambda: _buffer(64 * 96 - 1))),
    "out too large": (ShapeError, _out(4, lambda: _buffer(64 * 96 + 1))),
    "one out for two directions": (ShapeError, _out(2, _buffer)),
    "three outs for two directions": (
        ShapeError,
        _out(2, lambda: (_buffer(), _buffer(), _buffer())),
    ),
    "two outs for one direction": (ShapeError, _out(4, lambda: (_buffer(), _buffer()))),
    "one buffer for two directions": (OttavaError, _out(2, lambda: (_buffer(),) * 2)),
    "out not contiguous": (OttavaError, _out(4, lambda: _buffer(2 * 64 * 96)[::2])),
    "out in high precision": (OttavaError, _out(4, lambda: _buffer(dtype=torch.bfloat16))),
    "out of bools": (DTypeError, _out(4, lambda: _buffer(dtype=torch.bool))),
    "out of another format": (DTypeError, _out(0, lambda: _buffer(dtype=torch.uint8).view(E5M2))),
    "out on another device": (DeviceError, _out(4, lambda: _buffer(device="meta"))),
    "one out for two weights": (OttavaError, _shared_buffer),
    "outs that overlap": (OttavaError, _overlapping_buffers),
    "out of another class": (
        OttavaError,
        _out(4, lambda: _quantized(MXFP8Quantizer(E4M3), 64, 96)),
    ),
    "quantized out of another format": (
        DTypeError,
        _out(4, lambda: _quantized(Float8CurrentScalingQuantizer(E4M3), 64, 96)),
    ),
    "out of other columns": (
        ShapeError,
        _out(4, lambda: _quantized(Float8CurrentScalingQuantizer(E5M2), 48, 128)),
    ),
    "out of other rows": (
        ShapeError,
        _out(4, lambda: _quantized(Float8CurrentScalingQuantizer(E5M2), 63, 96)),
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_wrong_batch_is_refused_before_anything_is_written(name: str) -> None:
    kind, change = REFUSED[name]
    batch = Batch()
    batch.cast()
    assert not batch.unchanged()  # or this test could not fail

    batch = Batch()
    change(batch)
    with pytest.raises(kind) as caught:
        batch.cast()
    assert batch.unchanged(), name
    # What is no ValueError is what an object does not hold.
    assert isinstance(caught.value, (ValueError, UsageError)), type(caught.value)


def test_a_cleared_weight_is_refused_before_anything_is_written() -> None:
    for place in range(5):
        batch = Batch()
        batch.weights[place].clear()
        with pytest.raises(UsageError, match="holds no data"):
            batch.cast()
        assert batch.unchanged()


def test_a_cleared_part_is_refused_before_anything_is_written() -> None:
    batch = Batch()
    batch.outs[4] = Float8CurrentScalingQuantizer(E5M2).quantize(torch.ones(64, 96))
    batch.outs[4].clear()
    with pytest.raises(UsageError, match="holds no data"):
        batch.cast()
    assert batch.unchanged()


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(128,), (40, 96), (8, 4, 32)])
def test_parts_that_cut_blocks_are_refused(shape: tuple[int, ...], square: bool) -> None:
    """Half of the rows; a weight of one dimension is one row, so that its shards are no rows at
    all."""
    quantizer = MXFP8Quantizer(E4M3, with_2d_quantization=square)
    weight, master = quantizer.quantize(torch.ones(shape)), torch.randn(shape)
    half = shape[0] // 2 if len(shape) > 1 else 48
    part = quantizer.quantize(torch.ones(half, *shape[1:]))
    before = [t.clone() for t in (*weight.inner_list(), *part.inner_list())]
    with pytest.raises(ShapeError):
        quantize_master_weights([weight], [master[:half]], [0], None, [part])
    assert all(
        torch.equal(a, b)
        for a, b in zip((*weight.inner_list(), *part.inner_list()), before, strict=True)
    )


def test_an_unknown_group_is_refused() -> None:
    batch = Batch()
    batch.options["amax_reduce_group"] = "no such group"
    with pytest.raises(OttavaError):
        batch.cast()
    assert batch.unchanged()


def test_a_quantizer_for_all_serves_all() -> None:
    quantizer = Float8CurrentScalingQuantizer(E4M3)
    weights = [quantizer.quantize(torch.ones(5, 7)) for _ in range(2)]
    for weight in weights:
        weight.update_quantizer(None)
    masters = [torch.randn(5, 7), torch.randn(5, 7) * 9]
    cast_master_weights_to_fp8(weights, masters, quantizers=quantizer)
    for weight, master in zip(weights, masters, strict=True):
        assert torch.equal(weight._data, quantizer.quantize(master)._data)
        assert torch.equal(weight._scale_inv, quantizer.quantize(master)._scale_inv)


def test_an_empty_batch_is_nothing_to_do() -> None:
    quantize_master_weights([], [], [], None)
