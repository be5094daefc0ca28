"""Float8Quantizer: known scale, recorded amax, counted saturation."""

from __future__ import annotations

import io
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ottava.distributed import quantize_master_weights
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.tensors import Float8Tensor, Float8TensorStorage, columnwise_layout
from ottava_delayed import Float8Quantizer

FORMATS = {
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, 448.0),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0),
}


def make(
    fp8_dtype: torch.dtype = torch.float8_e4m3fn, scale: float = 1.0, **options: Any
) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1), fp8_dtype, **options)


@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 7), (3, 4, 33), (130, 70)])
def test_bytes_amax_and_counter(
    fp8_dtype: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    oracle, largest = FORMATS[fp8_dtype]
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * largest).to(dtype)
    for scale in (1.0, 0.3, 2.0**-5):
        saturated = torch.zeros(1, dtype=torch.int64)
        quantizer = make(fp8_dtype, scale, saturated=saturated)
        tensor = quantizer(x)
        scaled = x.float().numpy() * np.float32(scale)
        expected = np.clip(scaled, -largest, largest).astype(oracle).view(np.uint8)
        assert tensor._data.numpy().tobytes() == expected.tobytes()
        assert tensor._scale_inv.item() == np.float32(1) / np.float32(scale)
        assert quantizer.amax.item() == (float(x.float().abs().max()) if x.numel() else 0.0)
        assert saturated.item() == int((np.abs(scaled) > largest).sum())


def test_amax_rises_and_never_falls() -> None:
    quantizer = make()
    for value, expected in ((2.0, 2.0), (5.0, 5.0), (-1.0, 5.0), (float("nan"), 5.0), (-7.0, 7.0)):
        quantizer(torch.tensor([value, 0.5]))
        assert quantizer.amax.item() == expected
    quantizer(torch.tensor([float("-inf")]))
    assert quantizer.amax.item() == float("inf")
    quantizer.calibrate(torch.tensor([0.25]))
    assert quantizer.amax.item() == 0.25


def test_shards_are_rounded_before_they_are_counted() -> None:
    """448.9 is 448 in bfloat16, which fits; 449.5 is 450, which does not."""
    saturated = torch.zeros(1, dtype=torch.int64)
    weight = make(saturated=saturated)(torch.zeros(2, 2, dtype=torch.bfloat16))
    quantize_master_weights([weight], [torch.tensor([[448.9, 449.5], [-448.2, 1.0]])], None)
    assert saturated.item() == 1
    assert weight.dequantize().tolist() == [[448.0, 448.0], [-448.0, 1.0]]


def test_a_slot_without_a_scale_yet_takes_that_of_the_first_shards() -> None:
    """As where a weight was made on meta: the values that decide the scale come as shards."""
    quantizer = make(scale=1.0)
    weight = quantizer(torch.zeros(2, 2, dtype=torch.bfloat16))
    quantizer.fits = quantizer.unset = True
    quantize_master_weights([weight], [torch.tensor([[7.0, -3.0], [0.5, 1.0]])], None)
    assert quantizer.scale.item() == weight._quantizer.scale.item() == 448.0 / 7.0
    assert not quantizer.unset
    assert weight.dequantize().tolist() == [[7.0, -3.0], [0.5, 1.0]]


def test_a_scalar_has_no_transpose() -> None:
    with columnwise_layout("transpose"):
        tensor = make(rowwise=False)(torch.tensor(3.0))
    assert tensor._transpose is None
    assert tensor.dequantize().item() == 3.0


def test_the_scale_is_read_when_it_is_used() -> None:
    quantizer = make()
    quantizer.scale.fill_(4.0)
    assert torch.equal(
        quantizer(torch.tensor([1.0]))._data,
        torch.tensor([4.0]).to(torch.float8_e4m3fn).view(torch.uint8),
    )


@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("layout", ["shared", "transpose"])
@pytest.mark.parametrize("recording", [True, False])
def test_usages(usages: tuple[bool, bool], layout: Any, recording: bool) -> None:
    x = torch.randn(6, 10)
    with columnwise_layout(layout):
        quantizer = make(scale=50.0, rowwise=usages[0], columnwise=usages[1])
        if not recording:
            quantizer.amax = None
        tensor = quantizer(x)
        assert tensor.get_usages() == (
            {"rowwise": usages[0], "columnwise": usages[1]}
            if layout == "transpose"
            else dict.fromkeys(tensor.get_usages(), True)
        )
        whole = make(scale=50.0)(x)
        assert torch.equal(tensor.dequantize(), whole.dequantize())
        quantizer.internal = True
        assert type(quantizer(x)) is Float8TensorStorage
        out = whole.detach()
        assert quantizer.quantize(2 * x, out=out) is out
        assert torch.equal(out.dequantize(), make(scale=50.0)(2 * x).dequantize())


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_noop_flag_leaves_the_state_too(flag: float) -> None:
    quantizer = make(scale=100.0, saturated=torch.zeros(1, dtype=torch.int64))
    tensor = quantizer(torch.full((4,), 2.0))
    before = tensor.dequantize().clone()
    quantizer.update_quantized(torch.full((4,), 9.0), tensor, noop_flag=torch.tensor([flag]))
    assert torch.equal(tensor.dequantize(), before if flag else torch.full((4,), 4.48))
    assert quantizer.amax.item() == (2.0 if flag else 9.0)
    assert quantizer.saturated.item() == (0 if flag else 4)


def test_identity_and_copies() -> None:
    one, two = make(), make()
    assert one == one
    assert one != two
    copied = one.copy()
    copied.set_usage(columnwise=False)
    assert one.columnwise_usage
    copied(torch.tensor([3.0]))
    assert one.amax.item() == 3.0


def test_tensors_pickle_with_weights_only() -> None:
    tensor = make(scale=3.0)(torch.randn(4, 5))
    stream = io.BytesIO()
    torch.save(tensor, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert isinstance(loaded, Float8Tensor)
    assert torch.equal(loaded.dequantize(), tensor.dequantize())
    assert loaded._quantizer.scale.item() == 3.0


def test_straight_through_gradient() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    (make(scale=10.0)(x).dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 5), 3.0))


@pytest.mark.parametrize(
    ("error", "arguments", "options"),
    [
        (DTypeError, ("1.0", torch.zeros(1), torch.float8_e4m3fn), {}),
        (DTypeError, (True, torch.zeros(1), torch.float8_e4m3fn), {}),
        (DTypeError, (torch.ones(1).double(), torch.zeros(1), torch.float8_e4m3fn), {}),
        (ShapeError, (torch.ones(2), torch.zeros(1), torch.float8_e4m3fn), {}),
        (DTypeError, (torch.ones(1), 0.0, torch.float8_e4m3fn), {}),
        (ShapeError, (torch.ones(1), torch.zeros(3), torch.float8_e4m3fn), {}),
        (DeviceError, (torch.ones(1), torch.zeros(1, device="meta"), torch.float8_e4m3fn), {}),
        (DTypeError, (torch.ones(1), torch.zeros(1), torch.int8), {}),
        (
            DTypeError,
            (torch.ones(1), torch.zeros(1), torch.float8_e5m2),
            {"saturated": torch.zeros(1)},
        ),
        (OptionError, (torch.ones(1), torch.zeros(1), torch.float8_e5m2), {"rowwise": None}),
        *(
            (OptionError, (number, None, torch.float8_e4m3fn), {})
            for number in (0, -1.0, math.nan, math.inf, 1e39)
        ),
    ],
)
def test_bad_state(error: type[Exception], arguments: Any, options: Any) -> None:
    with pytest.raises(error):
        Float8Quantizer(*arguments, **options)


@pytest.mark.parametrize("scale", [2, 0.5])
def test_a_number_is_a_scale(scale: float) -> None:
    x = torch.randn(8, 8)
    quantizers = [
        Float8Quantizer(s, torch.zeros(1), torch.float8_e4m3fn)
        for s in (scale, torch.tensor([scale * 1.0]))
    ]
    one, other = (quantizer(x) for quantizer in quantizers)
    assert torch.equal(one._data, other._data)
    assert torch.equal(one._scale_inv, other._scale_inv)


def test_bad_tensors_record_nothing() -> None:
    quantizer = make()
    for bad in (
        torch.ones(3).int(),
        torch.ones(3).cfloat(),
        torch.ones(3).double(),
        torch.ones(3, device="meta"),
    ):
        with pytest.raises((DTypeError, DeviceError)):
            quantizer(bad)
    assert quantizer.amax.item() == 0.0
