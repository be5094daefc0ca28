"""Bytes of data and scales, against a scalar oracle of the format; constructors, and what is
refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ottava.errors import DTypeError, OptionError, OttavaError, ShapeError
from ottava.kernels.backends import use_backend
from ottava.tensors import DequantizedView
from ottava_blockwise import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from tests.cases import told
from tests.comparing import assert_same
from tests.grids import E4M3, E5M2, INNER, decoded, expected_bytes, inner, special, wide

DIMS = {1: (1, 128), 2: (128, 128)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = list(itertools.product((E4M3, E5M2), DTYPES, (True, False), (0.0, 0.25)))
SHAPES = [(3, 260), (130, 5), (257, 129), (2, 65, 130), (1, 1), (0, 7), (7, 0)]


def check(x: torch.Tensor, fp8_dtype: torch.dtype, dim: int, **options: Any) -> None:
    expected = expected_bytes(
        x, fp8_dtype, DIMS[dim], transposed=True, finite_as_input=True, **options
    )
    options |= {"block_scaling_dim": dim}
    assert_same(inner(Float8BlockQuantizer(fp8_dtype, **options)(x)), expected)
    rows, columns = (
        Float8BlockQuantizer(fp8_dtype, columnwise=c, rowwise=not c, **options)(x)
        for c in (False, True)
    )
    assert_same(inner(rows), [*expected[:2], None, None])
    assert_same(inner(columns), [None, None, *expected[2:]])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_oracle(shape: tuple[int, ...], dim: int) -> None:
    for fp8_dtype, dtype, pow_2, epsilon in (
        KINDS if len(shape) == 2 and 300 < shape[0] * shape[1] < 1000 else KINDS[::5]
    ):
        with told(fp8_dtype, dtype, pow_2, epsilon):
            x = wide(*shape, dtype=dtype, sigma=2.0)
            check(x, fp8_dtype, dim, force_pow_2_scales=pow_2, amax_epsilon=epsilon)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: torch.dtype, dim: int) -> None:
    for number, (name, x) in enumerate(special(dtype)):
        with told(name):
            check(x, (E4M3, E5M2)[number % 2], dim, force_pow_2_scales=number % 3 != 0)


def test_the_reference_backend_gives_the_same_bytes() -> None:
    x = wide(140, 260, dtype=torch.bfloat16)
    for dim in DIMS:
        quantizer = Float8BlockQuantizer(E4M3, block_scaling_dim=dim)
        with use_backend("reference"):
            slow = quantizer(x)
        assert_same(inner(quantizer(x)), inner(slow))


@pytest.mark.parametrize("dim", DIMS)
def test_an_infinite_scale_becomes_the_largest_of_the_inputs_dtype(dim: int) -> None:
    # An epsilon this small makes the quotient infinite, as no value of float16 does.
    options: dict[str, Any] = {"block_scaling_dim": dim, "amax_epsilon": 1e-40}
    for dtype, largest in (
        (torch.float16, 65504.0),
        (torch.bfloat16, 2.0**127 * 1.9921875),
        (torch.float32, None),
    ):
        zeros = torch.zeros(2, 3, dtype=dtype)
        finite = torch.tensor(torch.finfo(torch.float32).max if largest is None else largest)
        exact = Float8BlockQuantizer(E4M3, force_pow_2_scales=False, **options)(zeros)
        assert (exact._rowwise_scale_inv == torch.ones(()) / finite).all()
        power = Float8BlockQuantizer(E4M3, **options)(zeros)
        assert (
            power._rowwise_scale_inv == (2.0**-15 if dtype == torch.float16 else 2.0**-127)
        ).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("pow_2", [True, False])
def test_values_are_element_times_scale(dim: int, pow_2: bool) -> None:
    x = wide(140, 260, sigma=2.0)
    for columnwise in (False, True):
        quantizer = Float8BlockQuantizer(
            E4M3,
            rowwise=not columnwise,
            columnwise=columnwise,
            block_scaling_dim=dim,
            force_pow_2_scales=pow_2,
        )
        q = quantizer(x)
        assert q.shape == x.shape
        values = decoded(q, DIMS[dim], columnwise=columnwise, transposed=True)
        # The product of an element and a float32 scale is exact in float64, and is rounded once.
        assert_same(q.dequantize(torch.float32), values.float())
        assert ((values - x.double()).abs() <= x.abs() / 14 + x.abs().max() / 448 / 512).all()
        assert_same(q.dequantize(torch.bfloat16), values.float().bfloat16())


def test_squares_give_both_directions_the_same_values() -> None:
    x = wide(200, 300)
    q = Float8BlockQuantizer(E4M3)(x)
    assert torch.equal(q._columnwise_data, q._rowwise_data.t())
    assert torch.equal(q._columnwise_scale_inv, q._rowwise_scale_inv.t())
    rows = Float8BlockQuantizer(E4M3, columnwise=False)(x)
    rows.update_usage(columnwise_usage=True)
    assert_same(inner(rows), inner(q))
    one = Float8BlockQuantizer(E4M3, columnwise=False, block_scaling_dim=1)(x)
    with pytest.raises(OttavaError, match="columnwise=True"):
        one.update_usage(columnwise_usage=True)


def test_attributes_and_construction() -> None:
    x = wide(200, 300, dtype=torch.bfloat16)
    q = Float8BlockQuantizer(E4M3, block_scaling_dim=1)(x)
    assert type(q) is Float8BlockwiseQTensor
    assert isinstance(q, Float8BlockwiseQTensorStorage)
    assert (q.dtype, q._fp8_dtype) == (torch.bfloat16, E4M3)
    assert [t.shape for t in inner(q)] == [(200, 300), (200, 3), (300, 200), (300, 2)]
    names = [name.removeprefix("_") for name in INNER]
    held = dict(zip(names, inner(q), strict=True))
    made = Float8BlockwiseQTensor(
        **held, dtype=torch.bfloat16, fp8_dtype=E4M3, block_scaling_dim=1, pow_2_scales=True
    )
    assert torch.equal(made.dequantize(), q.dequantize())
    bare = Float8BlockQuantizer(E4M3)
    bare.internal = True
    assert type(bare(x)) is Float8BlockwiseQTensorStorage


def test_what_is_refused() -> None:
    q = Float8BlockQuantizer(E4M3)(torch.randn(200, 300))
    held = {
        "rowwise_data": q._rowwise_data,
        "rowwise_scale_inv": q._rowwise_scale_inv,
        "dtype": torch.float32,
    }

    def tensor(**other: Any) -> Any:
        return Float8BlockwiseQTensor(**(held | {"fp8_dtype": E4M3} | other))

    assert tensor().shape == (200, 300)
    cases: list[tuple[type[Exception], Any]] = [
        (DTypeError, lambda: Float8BlockQuantizer(torch.int8)),
        (OptionError, lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=3)),
        (OptionError, lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=True)),
        (OptionError, lambda: Float8BlockQuantizer(E4M3, force_pow_2_scales=1)),
        (OptionError, lambda: Float8BlockQuantizer(E4M3, amax_epsilon=-1.0)),
        (DTypeError, lambda: tensor(fp8_dtype=torch.int8)),
        (ShapeError, lambda: tensor(block_scaling_dim=1)),
        (OptionError, lambda: tensor(block_scaling_dim=0)),
        (OptionError, lambda: tensor(pow_2_scales=1)),
        (DTypeError, lambda: tensor(rowwise_scale_inv=q._rowwise_scale_inv.half())),
    ]
    for error, make in cases:
        with pytest.raises(error):
            make()


def test_views_on_boundaries_of_blocks_stay_quantized() -> None:
    x = wide(256, 384)
    for dim in DIMS:
        quantizer = Float8BlockQuantizer(E4M3, block_scaling_dim=dim)
        q = quantizer(x)
        part = q[128:, 128:256]
        assert type(part) is Float8BlockwiseQTensor
        alone = quantizer(x[128:, 128:256])
        for columnwise in (False, True):
            assert_same(part.for_usage(columnwise), alone.for_usage(columnwise))
        assert torch.equal(part.dequantize(), q.dequantize()[128:, 128:256])
        turned = q.t()
        assert type(turned) is Float8BlockwiseQTensor
        assert torch.equal(turned.dequantize(), q.dequantize().t())
        assert type(q[5:9]) is DequantizedView
        assert torch.equal(q[5:9], q.dequantize()[5:9])
