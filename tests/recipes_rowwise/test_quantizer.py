"""Bytes of data and scales, against a scalar oracle of the format; constructors, views, and what is
refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.kernels.backends import use_backend
from ottava_rowwise import Float8RowwiseQuantizer, Float8RowwiseTensor
from tests.cases import told
from tests.comparing import assert_same
from tests.grids import E4M3, E5M2, INNER, decoded, expected_bytes, inner, special, wide

ROW = (1, None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = list(itertools.product((E4M3, E5M2), DTYPES, (True, False), (0.0, 0.25)))
SHAPES = [(3, 260), (130, 5), (2, 33, 70), (1, 1), (0, 7), (7, 0)]


def check(x: torch.Tensor, fp8_dtype: torch.dtype, **options: Any) -> None:
    expected = expected_bytes(x, fp8_dtype, ROW, transposed=False, finite_as_input=False, **options)
    assert_same(inner(Float8RowwiseQuantizer(fp8_dtype, **options)(x)), expected)
    rows, columns = (
        Float8RowwiseQuantizer(fp8_dtype, columnwise=c, rowwise=not c, **options)(x)
        for c in (False, True)
    )
    assert_same(inner(rows), [*expected[:2], None, None])
    assert_same(inner(columns), [None, None, *expected[2:]])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_oracle(shape: tuple[int, ...]) -> None:
    for fp8_dtype, dtype, pow_2, epsilon in KINDS:
        with told(fp8_dtype, dtype, pow_2, epsilon):
            x = wide(*shape, dtype=dtype, sigma=2.0)
            check(x, fp8_dtype, force_pow_2_scales=pow_2, amax_epsilon=epsilon)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: torch.dtype) -> None:
    for number, (name, x) in enumerate(special(dtype)):
        with told(name):
            check(x, (E4M3, E5M2)[number % 2], force_pow_2_scales=number % 3 == 0)


def test_an_infinite_scale_becomes_the_largest_float32_whatever_the_input() -> None:
    for dtype in DTYPES:
        q = Float8RowwiseQuantizer(E4M3, amax_epsilon=1e-40)(torch.zeros(2, 3, dtype=dtype))
        assert (q._rowwise_scale_inv == 1 / torch.tensor(torch.finfo(torch.float32).max)).all()


def test_the_reference_backend_gives_the_same_bytes() -> None:
    x, quantizer = wide(140, 260, dtype=torch.bfloat16), Float8RowwiseQuantizer(E4M3)
    with use_backend("reference"):
        slow = quantizer(x)
    assert_same(inner(quantizer(x)), inner(slow))


@pytest.mark.parametrize("pow_2", [True, False])
@pytest.mark.parametrize("columnwise", [False, True])
def test_values_are_element_times_scale(columnwise: bool, pow_2: bool) -> None:
    x = wide(140, 260, sigma=2.0)
    q = Float8RowwiseQuantizer(
        E4M3, rowwise=not columnwise, columnwise=columnwise, force_pow_2_scales=pow_2
    )(x)
    values = decoded(q, ROW, columnwise=columnwise, transposed=False)
    # The product of an element and a float32 scale is exact in float64, and is rounded once.
    assert_same(q.dequantize(torch.float32), values.float())
    largest = x.abs().amax(0 if columnwise else 1, keepdim=True)
    assert ((values - x.double()).abs() <= x.abs() / 14 + largest / 448 / 512).all()


def test_attributes_and_construction() -> None:
    x = wide(4, 50, 300, dtype=torch.bfloat16)
    q = Float8RowwiseQuantizer(E4M3)(x)
    assert type(q) is Float8RowwiseTensor
    assert (q.dtype, q._fp8_dtype, q.shape) == (torch.bfloat16, E4M3, x.shape)
    assert [tuple(t.shape) for t in inner(q)] == [(4, 50, 300), (200, 1), (4, 50, 300), (1, 300)]
    held: dict[str, Any] = {name.removeprefix("_"): getattr(q, name) for name in INNER}
    held |= {"dtype": torch.bfloat16, "layout": q.grid_layout}
    assert torch.equal(Float8RowwiseTensor(**held).dequantize(), q.dequantize())
    cases: list[tuple[type[Exception], Any]] = [
        (DTypeError, lambda: Float8RowwiseQuantizer(torch.int8)),
        (OptionError, lambda: Float8RowwiseQuantizer(E4M3, force_pow_2_scales=1)),
        (OptionError, lambda: Float8RowwiseQuantizer(E4M3, amax_epsilon=-1.0)),
        (
            ShapeError,
            lambda: Float8RowwiseTensor(**(held | {"rowwise_scale_inv": torch.ones(1, 200)})),
        ),
        (
            DTypeError,
            lambda: Float8RowwiseTensor(
                **(held | {"columnwise_scale_inv": torch.ones(1, 300).half()})
            ),
        ),
    ]
    for error, make in cases:
        with pytest.raises(error):
            make()


def test_rows_and_columns_are_views_that_stay_quantized() -> None:
    x = wide(200, 300)
    q = Float8RowwiseQuantizer(E4M3)(x)
    views = {"rows": q[5:9], "columns": q[:, 7:50], "transposed": q.t(), "parts": q.split(70)[2]}
    plain = q.dequantize()
    expected = {
        "rows": plain[5:9],
        "columns": plain[:, 7:50],
        "transposed": plain.t(),
        "parts": plain.split(70)[2],
    }
    for name, view in views.items():
        assert type(view) is Float8RowwiseTensor, name
        assert torch.equal(view.dequantize(), expected[name]), name
