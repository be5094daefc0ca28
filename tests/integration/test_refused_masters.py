"""A wrong batch of master weights is refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from typing import Any

import pytest
import torch

from ottava.distributed import cast_master_weights_to_fp8, quantize_master_weights
from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_delayed import Float8Quantizer
from ottava_mxfp8 import MXFP8Quantizer
from tests.comparing import assert_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS = 64, 96
COUNT = ROWS * COLUMNS
current, wide = Float8CurrentScalingQuantizer(E4M3), Float8CurrentScalingQuantizer(E5M2)
mx, squares = MXFP8Quantizer(E4M3), MXFP8Quantizer(E4M3, with_2d_quantization=True)
#: Places of weights, by their quantizers.
CURRENT, DELAYED, MX, SQUARES, LAST = range(5)


class Batch:
    """A weight of each kind, and everything that a call could change."""

    def __init__(self) -> None:
        self.delayed = Float8Quantizer(
            torch.ones(1), torch.zeros(1), E4M3, saturated=torch.zeros(1, dtype=torch.int64)
        )
        kinds = [current, self.delayed, mx, squares, wide]
        self.weights: Any = [kind.quantize(torch.randn(ROWS, COLUMNS).bfloat16()) for kind in kinds]
        # Amaxes that clamp, and so would be counted.
        self.masters: list[Any] = [torch.randn(ROWS, COLUMNS) * 1000 for _ in kinds]
        self.outs: list[Any] = [None] * 5
        self.starts: list[Any] = [0] * 5
        self.quantizers: Any = [None] * 5
        self.options: dict[str, Any] = {}
        self.delayed.amax.zero_()
        self.watched = [t for weight in self.weights for t in weight.inner_list() if t is not None]
        self.watched += [self.delayed.amax, self.delayed.scale, self.delayed.saturated]

    def cast(self) -> None:
        cast_master_weights_to_fp8(
            self.weights,
            self.masters,
            self.starts,
            quantizers=self.quantizers,
            fsdp_shard_model_weights=self.outs,
            **self.options,
        )


Change = Callable[[Batch], Any]


def put(name: str, value: Any, place: int = LAST) -> Change:
    """Another entry of a list; a function makes it from the batch."""

    def change(batch: Batch) -> None:
        getattr(batch, name)[place] = value(batch) if isfunction(value) else value

    return change


def buffer(count: int = COUNT, **options: Any) -> torch.Tensor:
    return torch.zeros(count, **{"dtype": torch.uint8, **options})


def out(make: Callable[[], Any], place: int = LAST) -> Change:
    """A target that is watched, too."""

    def change(batch: Batch) -> None:
        batch.outs[place] = made = make()
        inner = made if isinstance(made, tuple) else getattr(made, "inner_list", lambda: [made])()
        batch.watched += [t for t in inner if t is not None and not t.is_meta]

    return change


def quantized(quantizer: Any, *shape: int) -> Any:
    return quantizer.quantize(torch.ones(shape).bfloat16())


def outs_that_overlap(batch: Batch) -> None:
    memory = buffer(COUNT + 1)
    batch.outs[CURRENT], batch.outs[DELAYED] = memory[1:], memory[:-1]
    batch.watched.append(memory)


def two_shards(batch: Batch) -> None:
    flat = batch.masters[0].view(-1)
    batch.weights[1] = batch.weights[0]
    batch.masters[:2], batch.starts[:2] = [flat[:3000], flat[3000:]], [0, 3000]


def view(batch: Batch) -> None:
    batch.weights[LAST], batch.masters[LAST] = batch.weights[LAST][:32], batch.masters[LAST][:32]


def cleared(batch: Batch) -> None:
    batch.weights[LAST].clear()
    batch.watched = [t for w in batch.weights for t in w.inner_list() if t is not None]


def cleared_out() -> Any:
    made = quantized(wide, ROWS, COLUMNS)
    made.clear()
    return made


REFUSED: dict[str, tuple[type[Exception], Change]] = {
    **{
        f"fewer {name}": (ShapeError, lambda b, name=name: getattr(b, name).pop())
        for name in ("weights", "masters", "starts", "outs", "quantizers")
    },
    "quantizers are a class": (DTypeError, lambda b: setattr(b, "quantizers", MXFP8Quantizer)),
    "quantizers are names": (DTypeError, lambda b: setattr(b, "quantizers", ["current"] * 5)),
    "weights are a generator": (
        DTypeError,
        lambda b: setattr(b, "weights", (w for w in b.weights)),
    ),
    **{f"start {value!r}": (OptionError, put("starts", value)) for value in (None, False, 0.0)},
    **{f"start {value}": (ShapeError, put("starts", value)) for value in (-1, 1, 2**70)},
    "master of float64": (DTypeError, put("masters", lambda b: b.masters[LAST].double())),
    "master of FP8": (DTypeError, put("masters", lambda b: b.masters[LAST].to(E4M3))),
    "master is sparse": (DTypeError, put("masters", lambda b: b.masters[LAST].to_sparse())),
    "master is quantized": (DTypeError, put("masters", lambda b: b.weights[0])),
    "master is a list": (DTypeError, put("masters", [1.0])),
    "master on meta": (DeviceError, put("masters", lambda b: b.masters[LAST].to("meta"))),
    "weight in high precision": (DTypeError, put("weights", torch.ones(ROWS, COLUMNS))),
    "weight without quantizer": (UsageError, lambda b: b.weights[MX].update_quantizer(None)),
    "weight is a view": (UsageError, view),
    "a weight is cleared": (UsageError, cleared),
    "quantizer of another format": (DTypeError, put("quantizers", wide, CURRENT)),
    "MX of another format": (DTypeError, put("quantizers", MXFP8Quantizer(E5M2), MX)),
    "one scale for MX": (OttavaError, put("quantizers", current, MX)),
    "rows for squares": (OttavaError, put("quantizers", mx, SQUARES)),
    "another option": (
        OptionError,
        put("quantizers", Float8CurrentScalingQuantizer(E5M2, amax_epsilon=1.0)),
    ),
    "one weight twice": (OttavaError, put("weights", lambda b: b.weights[0], 1)),
    "two shards of one weight": (OttavaError, two_shards),
    "group is a list": (OttavaError, lambda b: b.options.update(group=[0, 1])),
    "group has no such name": (OttavaError, lambda b: b.options.update(group="no such group")),
    "manual is a number": (
        OttavaError,
        lambda b: b.options.update(manual_post_all_gather_processing=1),
    ),
    "out too small": (ShapeError, out(lambda: buffer(COUNT - 1))),
    "out too large": (ShapeError, out(lambda: buffer(COUNT + 1))),
    "one out for two directions": (ShapeError, out(buffer, MX)),
    "two outs for one direction": (ShapeError, out(lambda: (buffer(), buffer()))),
    "one buffer for two directions": (OttavaError, out(lambda: (buffer(),) * 2, MX)),
    "out is not contiguous": (OttavaError, out(lambda: buffer(2 * COUNT)[::2])),
    "out of bools": (DTypeError, out(lambda: buffer(dtype=torch.bool))),
    "out of another format": (DTypeError, out(lambda: buffer().view(E5M2), CURRENT)),
    "out on meta": (DeviceError, out(lambda: buffer(device="meta"))),
    "outs that overlap": (OttavaError, outs_that_overlap),
    "out of another class": (OttavaError, out(lambda: quantized(mx, ROWS, COLUMNS))),
    "quantized out of another format": (DTypeError, out(lambda: quantized(current, ROWS, COLUMNS))),
    "out of other columns": (ShapeError, out(lambda: quantized(wide, 48, 128))),
    "out of other rows": (ShapeError, out(lambda: quantized(wide, 63, COLUMNS))),
    "out is cleared": (UsageError, out(cleared_out)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_batch(case: str) -> None:
    kind, change = REFUSED[case]
    batch = Batch()
    change(batch)
    before = [tensor.clone() for tensor in batch.watched]
    with pytest.raises(kind) as caught:
        batch.cast()
    assert_same(batch.watched, before)
    # An error that is no ValueError says what an object does not hold.
    assert isinstance(caught.value, (ValueError, UsageError))


def test_the_batch_is_right_otherwise() -> None:
    batch = Batch()
    before = [tensor.clone() for tensor in batch.watched]
    # A rank may have no rows of a weight.
    batch.masters[MX], batch.outs[MX] = torch.empty(0, COLUMNS), quantized(mx, 0, COLUMNS)
    batch.cast()
    for now, old in zip(batch.watched[:2], before, strict=False):
        assert not torch.equal(now, old)


def test_a_shard_of_one_dimension_is_no_rows() -> None:
    """A weight of one dimension is one row, which blocks are not cut out of."""
    for quantizer in (mx, Float8BlockQuantizer(E4M3)):
        weight, part = quantized(quantizer, 128), quantized(quantizer, 48)
        before = [tensor.clone() for tensor in part.inner_list() if tensor is not None]
        with pytest.raises(ShapeError):
            quantize_master_weights([weight], [torch.randn(48)], [0], None, [part])
        assert_same([tensor for tensor in part.inner_list() if tensor is not None], before)
