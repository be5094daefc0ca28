"""Products on hardware that multiplies FP8, with torch's CPU library in its place.

They are compared with float64 on the dequantized operands. The library on a GPU takes less than the
one on a CPU does: ``Strict`` stands in for it, and insists on what it insists on.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
from scaled_gemm import (
    E4M3,
    E5M2,
    KINDS,
    PRODUCTS,
    SHAPES,
    SIZES,
    Recorded,
    Strict,
    check,
    coded,
    matrix,
)

import ottava
from ottava import Layout
from ottava.errors import DTypeError, ShapeError
from ottava.gemm import gemm, side_of
from ottava.gemm.scaled import product
from ottava.tensors import Float8TensorStorage, QuantizedTensorStorage, columnwise_layout
from tests.choosing import scaled_products

FORMATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["transpose", "shared"])
def test_against_float64(library: Recorded, kind: Any, layout: Any) -> None:
    with columnwise_layout(layout), scaled_products():
        for sizes in SIZES:
            library.count = 0
            shapes = SHAPES[kind](*sizes)
            a, b = coded(shapes[0], E4M3, 2.3e-3, 0), coded(shapes[1], E4M3, 0.7e-3, 1)
            columns = PRODUCTS[kind](matrix(a), matrix(b)).shape[1]
            biases = [None, torch.randn(columns), torch.randn(columns, dtype=torch.bfloat16)]
            for bias, dtype in itertools.product(
                biases, (torch.float32, torch.bfloat16, torch.float16)
            ):
                check(gemm(a, b, kind, out_dtype=dtype, bias=bias), a, b, kind, dtype, bias)
            assert library.count == (9 if all(sizes) else 0), sizes


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_gpu_is_given(strict: Strict, kind: Any) -> None:
    for number, sizes in enumerate(SIZES):
        # Every pair of formats with sizes that fit and with sizes that do not, one with each of the
        # others.
        for formats in FORMATS if sizes in SIZES[:3] else FORMATS[number % 3 :][:1]:
            strict.calls.clear()
            a, b = (
                coded(s, f, 0.7e-5, i)
                for i, (s, f) in enumerate(zip(SHAPES[kind](*sizes), formats, strict=True))
            )
            columns = PRODUCTS[kind](matrix(a), matrix(b)).shape[1]
            narrow = [torch.randn(columns).bfloat16(), torch.randn(columns + 1).bfloat16()[1:]]
            for bias, dtype in itertools.product(
                [None, torch.randn(columns), *narrow], (torch.float32, torch.bfloat16)
            ):
                got = gemm(
                    a, b, kind, out_dtype=dtype, bias=bias, use_split_accumulator=kind != "fprop"
                )
                check(got, a, b, kind, dtype, bias)
            assert len(strict.calls) == (8 if all(sizes) else 0), sizes
            assert all(call["fast"] == (kind == "fprop") for call in strict.calls)
            assert sum(call["bias"] is not None for call in strict.calls) == (
                2 if all(sizes) else 0
            ), sizes


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_that_fits(strict: Strict, kind: Any) -> None:
    a, b = (coded(shape, E4M3, 1.0, i) for i, shape in enumerate(SHAPES[kind](48, 32, 64)))
    bias = torch.zeros(gemm(a, b, kind).shape[1], dtype=torch.bfloat16)
    strict.calls.clear()
    got = gemm(a, b, kind, bias=bias)
    (call,) = strict.calls
    own = [{t.data_ptr() for t in x.inner_list() if t is not None} for x in (a, b)]
    copied = [
        matrix.data_ptr() not in held
        for matrix, held in zip((call["a"], call["b"]), own, strict=True)
    ]
    # One buffer for both usages, and a library that takes one layout only: transposed here.
    by_columns = [
        strict.capability >= 120 and kind == "wgrad",
        strict.capability >= 120 and kind != "fprop",
    ]
    assert copied == by_columns
    assert call["scales"][0].data_ptr() == a._scale_inv.data_ptr()
    assert call["bias"].data_ptr() == bias.data_ptr()
    assert got.shape == PRODUCTS[kind](matrix(a), matrix(b)).shape


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_lines(strict: Strict, kind: Any) -> None:
    for sizes in ((32, 32, 32), (19, 21, 23)):
        a, b = (coded(shape, E4M3, 1.0, i) for i, shape in enumerate(SHAPES[kind](*sizes)))
        a._data[3, 5], b._data[7, 2] = 0x7F, 0xFF
        for x in (a, b):
            x.mark_written()
            x.rebuild_derived()
        got = gemm(a, b, kind, out_dtype=torch.float32)
        expected = PRODUCTS[kind](matrix(a), matrix(b)).isnan()
        assert torch.equal(got.isnan(), expected)
        assert 0 < expected.sum() < expected.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_out_and_accumulation(strict: Strict, kind: Any) -> None:
    for sizes in ((32, 48, 64), (17, 5, 9)):
        a, b = (coded(shape, E4M3, 3e-4, i) for i, shape in enumerate(SHAPES[kind](*sizes)))
        start = torch.randn(PRODUCTS[kind](matrix(a), matrix(b)).shape)
        out = start.clone()
        assert gemm(a, b, kind, out=out, accumulate=True) is out
        check(out, a, b, kind, torch.float32, extra=start)
        assert gemm(a, b, kind, out=out) is out
        check(out, a, b, kind, torch.float32)
        narrow = start.bfloat16()
        gemm(a, b, kind, out=narrow, accumulate=True)
        check(narrow, a, b, kind, torch.bfloat16, extra=start.bfloat16())
    # Nothing is rounded on the way to a sum.
    assert all(call["dtype"] == torch.float32 for call in strict.calls)


@pytest.mark.parametrize("kind", KINDS)
def test_two_e5m2_operands_are_decoded(strict: Strict, kind: Any) -> None:
    a, b = (coded(shape, E5M2, 1e-5, i) for i, shape in enumerate(SHAPES[kind](32, 48, 64)))
    check(gemm(a, b, kind, out_dtype=torch.float32), a, b, kind, torch.float32)
    assert not strict.calls


def test_strides_addresses_and_leading_dimensions(strict: Strict) -> None:
    whole = coded((40, 96), E4M3, 1e-3, 0)
    weight = coded((32, 64), E4M3, 1e-3, 1)

    def around(codes: torch.Tensor) -> Float8TensorStorage:
        return Float8TensorStorage(
            data=codes, fp8_scale_inv=whole._scale_inv, fp8_dtype=E4M3, dtype=torch.bfloat16
        )

    data = whole._data
    assert data is not None
    views = [
        data[:, 16:80],
        data[:, 5:69],
        data[::2, :64],
        data[7:8, 3:67],
        data.t()[:40, :].t()[:, :40],
        data.reshape(-1)[3 : 3 + 64 * 16].view(16, 64),
        data[:, :64].reshape(2, 4, 5, 64),
        data[0, :64],
        data.as_strided((1, 64), (5, 1)),
    ]
    for view in views:
        a, b = around(view), weight if view.shape[-1] == 64 else coded((32, 40), E4M3, 1e-3, 1)
        check(gemm(a, b, "fprop", out_dtype=torch.float32), a, b, "fprop", torch.float32)
        if view.dim() == 2:
            other = coded((view.shape[0], 48), E4M3, 1.0, 2)
            for one, two in ((a, other), (other, a)):
                check(
                    gemm(one, two, "wgrad", out_dtype=torch.float32),
                    one,
                    two,
                    "wgrad",
                    torch.float32,
                )
            grad = coded((16, view.shape[0]), E4M3, 1.0, 3)
            check(gemm(grad, a, "dgrad", out_dtype=torch.float32), grad, a, "dgrad", torch.float32)
    leading = coded((2, 3, 64), E4M3, 1.0, 5)
    other = coded((6, 16), E4M3, 1.0, 6)
    check(
        gemm(other, leading, "wgrad", out_dtype=torch.float32),
        other,
        leading,
        "wgrad",
        torch.float32,
    )
    assert len(strict.calls) > 20


def test_transposed_codes_alone_serve_both_usages(strict: Strict) -> None:
    with columnwise_layout("transpose"):
        for shape in ((48, 32), (5, 7), (2, 3, 64)):
            whole = coded(shape, E4M3, 1.0, 0)
            whole.update_usage(rowwise_usage=False)
            assert whole._data is None
            rows = matrix(whole).shape[0]
            grad, weight = coded((rows, 16), E4M3, 1.0, 1), coded((16, shape[-1]), E4M3, 1.0, 2)
            check(
                gemm(grad, whole, "wgrad", out_dtype=torch.float32),
                grad,
                whole,
                "wgrad",
                torch.float32,
            )
            check(
                gemm(whole, weight, "fprop", out_dtype=torch.float32),
                whole,
                weight,
                "fprop",
                torch.float32,
            )
            check(
                gemm(weight, whole, "fprop", out_dtype=torch.float32),
                weight,
                whole,
                "fprop",
                torch.float32,
            )
    assert len(strict.calls) == 9


def test_a_stale_transpose_is_not_read(strict: Strict) -> None:
    grad, weight = coded((16, 32), E4M3, 1.0, 0), coded((32, 48), E4M3, 1.0, 1)
    gemm(grad, weight, "dgrad")
    assert weight._data is not None
    weight._data.copy_(coded((32, 48), E4M3, 1.0, 2)._data)
    check(
        gemm(grad, weight, "dgrad", out_dtype=torch.float32), grad, weight, "dgrad", torch.float32
    )


@pytest.mark.parametrize("kind", ["fprop", "dgrad"])
def test_what_is_made_of_a_weight_is_made_once(strict: Strict, kind: Any) -> None:
    a_shape, b_shape = SHAPES[kind](16, 31, 29)
    a, weight = coded(a_shape, E4M3, 1.0, 0), coded(b_shape, E4M3, 1.0, 1)
    for _ in range(2):
        gemm(a, weight, kind)
    first, second = (call["b"] for call in strict.calls)
    assert first.data_ptr() == second.data_ptr()
    # A write makes it anew: counted by the storage, or to the buffer itself, through an alias, or
    # in another's place.
    other = coded(b_shape, E4M3, 1.0, 2)
    alias = Float8TensorStorage(
        data=other._data, fp8_scale_inv=weight._scale_inv, fp8_dtype=E4M3, dtype=torch.bfloat16
    )
    alias._writes = weight._writes
    writes = [
        lambda: setattr(weight, "_data", other._data),
        lambda: weight.copy_from_storage(coded(b_shape, E4M3, 2.0, 3)),
        lambda: weight._data.fill_(0x38),  # type: ignore[union-attr]
        lambda: (alias._data.numpy().fill(0x40), alias.mark_written()),  # type: ignore[union-attr]
    ]
    for write in writes:
        write()
        check(gemm(a, weight, kind, out_dtype=torch.float32), a, weight, kind, torch.float32)


def test_operands_that_are_not_met_again_are_not_kept(strict: Strict) -> None:
    a, b = coded((17, 31), E4M3, 1.0, 0), coded((17, 29), E4M3, 1.0, 1)
    gemm(a, b, "wgrad")
    assert all(x.gemm_cache().entries == {} for x in (a, b))  # type: ignore[union-attr]
    assert strict.calls


class LineScaled(QuantizedTensorStorage):
    """A matrix with one scale for each row, as a quantizer of rows would make it."""

    inner_tensors: ClassVar[Any] = (
        ottava.tensors.InnerTensor("_data", "data", usage="rowwise", gather=True),
        ottava.tensors.InnerTensor("_scales", "scales"),
    )
    _data: torch.Tensor
    _scales: torch.Tensor

    def __init__(self, *, data: torch.Tensor, scales: torch.Tensor, quantizer: Any = None) -> None:
        super().__init__(data=data, scales=scales, quantizer=quantizer)
        self._dtype = torch.bfloat16

    def dequantize(self, dtype: Any = None) -> torch.Tensor:
        return (self._data.double() * self._scales.double().unsqueeze(1)).to(dtype or self._dtype)

    @property
    def layout_text(self) -> str:  # type: ignore[override]
        return Layout(self._data.dtype, (1, None)).text

    def grid_operand(self, *, columnwise: bool) -> Any:
        return None if columnwise else (self._data.view(torch.uint8), self._scales.unsqueeze(1))


ROW_SIZES = [(64, 48, 32), (17, 33, 65), (1, 16, 32), (5, 1, 16), (4, 3, 0), (0, 3, 4)]


@pytest.mark.parametrize("rows_of_both", [True, False])
def test_one_scale_for_each_row(strict: Strict, rows_of_both: bool) -> None:
    for number, (m, n, k) in enumerate(ROW_SIZES):
        for formats in FORMATS if number < 2 else FORMATS[number % 3 :][:1]:
            plain: list[Any] = [
                coded(s, f, 1.5, i)
                for i, (s, f) in enumerate(zip(((m, k), (n, k)), formats, strict=True))
            ]
            a, b = (
                LineScaled(data=x._data.view(f), scales=1e-4 + torch.rand(x._data.shape[0]) * 1e-3)
                for x, f in zip(plain, formats, strict=True)
            )
            # Any strides will do.
            b._data = b._data.view(torch.uint8).t().contiguous().t().view(formats[1])
            second: Any = b if rows_of_both else plain[1]
            strict.calls.clear()
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for bias in (None, torch.randn(n), torch.randn(n).bfloat16()):
                    got = gemm(a, second, "fprop", out_dtype=dtype, bias=bias)
                    check(got, a, second, "fprop", dtype, bias)
            assert len(strict.calls) == (9 if m * n * k else 0)
            by_line = [
                call
                for call in strict.calls
                if call["scales"][0].numel() * call["scales"][1].numel() > 1
            ]
            native = (
                strict.capability >= 90
                and formats[1] == E4M3
                and (m > 1 or (rows_of_both and n > 1))
            )
            assert len(by_line) == (2 if native and m * n * k else 0), (m, n, k)


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11's function for the CPU takes one scale for a tensor",
)
def test_one_scale_for_each_row_in_torchs_own_function(library: Recorded) -> None:
    a, b = coded((48, 64), E4M3, 1.0, 0), coded((40, 64), E4M3, 1.0, 1)
    rows = [
        LineScaled(
            data=x._data.view(E4M3),  # type: ignore[union-attr]
            scales=torch.rand(x._data.shape[0]),  # type: ignore[union-attr]
        )
        for x in (a, b)
    ]
    with scaled_products():
        for dtype in (torch.float32, torch.bfloat16):
            check(gemm(*rows, "fprop", out_dtype=dtype), *rows, "fprop", dtype)
    assert library.count == 2


def test_bare_codes(strict: Strict) -> None:
    a, b = coded((16, 32), E4M3, 1.0, 0), coded((48, 32), E4M3, 1.0, 1)
    bare = [side_of(x, False)._replace(scales=None) for x in (a, b)]  # type: ignore[union-attr]
    got = product(*bare, None, torch.float32, False)
    check(got, a, b, "fprop", torch.float32)


def test_a_dense_operand_and_a_subclass_of_its_own_are_decoded(
    library: Recorded, quantizer: Any
) -> None:
    class Doubled(Float8TensorStorage):
        def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
            values, scale = super().gemm_operand(columnwise=columnwise, dtype=dtype)
            return values * 2, scale

    a, b = coded((16, 32), E4M3, 1.0, 0), coded((48, 32), E4M3, 1.0, 1)
    doubled = Doubled(
        data=a._data, fp8_scale_inv=a._scale_inv, fp8_dtype=E4M3, dtype=torch.bfloat16
    )
    with scaled_products():
        check(
            gemm(a, b.dequantize(), "fprop", out_dtype=torch.float32), a, b, "fprop", torch.float32
        )
        plain = gemm(doubled, b, "fprop", out_dtype=torch.float32)
    assert library.count == 0
    torch.testing.assert_close(plain, 2 * gemm(a, b, "fprop", out_dtype=torch.float32))


def test_a_custom_quantizer_does_its_own_gemm(library: Recorded, quantizer: Any) -> None:
    class Custom(type(quantizer)):  # type: ignore[misc]
        custom = True

    own = Custom(E4M3)
    with scaled_products():
        gemm(own(torch.randn(16, 16)), own(torch.randn(16, 16)), "fprop")
    assert library.count == 0


def test_bad_operands_are_refused(strict: Strict) -> None:
    a, b = coded((16, 32), E4M3, 1.0, 0), coded((48, 32), E4M3, 1.0, 1)
    with pytest.raises(ShapeError, match="reduced dimensions"):
        gemm(a, coded((48, 16), E4M3, 1.0, 1))
    with pytest.raises(ShapeError, match="bias"):
        gemm(a, b, bias=torch.ones(3))
    with pytest.raises(DTypeError, match="bias"):
        gemm(a, b, bias=torch.ones(48, dtype=torch.int8))
    with pytest.raises(ShapeError, match="out"):
        gemm(a, b, out=torch.ones(3, 3))
    assert not strict.calls


def test_no_gradient_flows_through_a_product(library: Recorded) -> None:
    a, b = coded((16, 32), E4M3, 1.0, 0), coded((48, 32), E4M3, 1.0, 1)
    with scaled_products():
        for dtype in (torch.float32, torch.bfloat16):
            bias = torch.randn(48, dtype=torch.bfloat16, requires_grad=True)
            assert not gemm(a, b, "fprop", out_dtype=dtype, bias=bias).requires_grad
    assert library.count == 2
