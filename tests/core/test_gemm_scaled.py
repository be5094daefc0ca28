"""Products on hardware that multiplies FP8, with torch's CPU library in its place.

They are compared with float64 on the dequantized operands. The library on a GPU takes less than the one on a CPU does:
``Strict`` stands in for it, and insists on what it insists on.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ottava
from ottava import gemm_scaled
from ottava.errors import DTypeError, ShapeError
from ottava.gemm import gemm
from ottava.gemm_scaled import scaled_product, scaled_products
from ottava.kernels import devices, products
from ottava.kernels.backends import backend_module
from ottava.tensors import Float8Tensor, Float8TensorStorage, QuantizedTensorStorage, columnwise_layout

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ["fprop", "dgrad", "wgrad"]
# What each kind takes of its operands of a layer: shapes of (M, N, K), and whether they are taken by columns.
SHAPES: dict[str, Any] = {
    "fprop": lambda m, n, k: ((m, k), (n, k)),
    "dgrad": lambda m, n, k: ((m, n), (n, k)),
    "wgrad": lambda m, n, k: ((m, n), (m, k)),
}
PRODUCTS: dict[str, Any] = {
    "fprop": lambda a, b: a @ b.t(),
    "dgrad": lambda a, b: a @ b,
    "wgrad": lambda a, b: a.t() @ b,
}
SIZES = [(64, 48, 32), (1, 1, 1), (3, 5, 7), (17, 33, 65), (1, 16, 32), (33, 16, 48), (0, 4, 3), (4, 0, 3), (4, 3, 0)]
# Half a unit in the last place.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Strict:
    """torch._scaled_mm with what a GPU's asks for: sizes, addresses, layouts, and the dtype of a bias."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, scale_result: Any, out_dtype: Any, fast: Any
    ) -> torch.Tensor:
        assert a.shape[1] == b.shape[0]
        assert min(*a.shape, *b.shape) > 0
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert not {a.dtype, b.dtype} - {E4M3, E5M2}
        assert not a.dtype == b.dtype == E5M2
        rows = [self.is_row_major(matrix) for matrix in (a, b.t())]
        any_layout = 100 <= self.capability < 120
        for matrix, row_major in zip((a, b.t()), rows, strict=True):
            assert matrix.data_ptr() % 16 == 0
            assert row_major or (any_layout and self.is_row_major(matrix.t()))
            assert max(matrix.stride()) % 16 == 0
        assert scale_a.dtype == scale_b.dtype == torch.float32
        if scale_a.numel() == scale_b.numel() == 1:
            scales = scale_a.reshape(()), scale_b.reshape(())
        else:
            assert self.capability >= 90
            assert all(rows)
            assert scale_a.shape == (a.shape[0], 1)
            assert scale_b.shape == (1, b.shape[1])
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            assert out_dtype == torch.bfloat16
            assert b.dtype == E4M3
            scales = scale_a, scale_b
        assert scale_result is None
        result = a.float().double() @ b.float().double() * scales[0].double() * scales[1].double()
        if bias is not None:
            assert bias.dtype == out_dtype != torch.float32
            assert bias.shape == (b.shape[1],)
            assert bias.is_contiguous()
            assert bias.data_ptr() % 16 == 0
            result = result + bias.double()
        self.calls.append(
            {"a": a, "b": b, "scales": (scale_a, scale_b), "bias": bias, "dtype": out_dtype, "fast": fast}
        )
        return result.to(out_dtype)

    @staticmethod
    def is_row_major(matrix: torch.Tensor) -> bool:
        return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


@pytest.fixture(params=[89, 90, 100, 120], ids=lambda found: f"sm{found}")
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Strict]:
    """Each kind of hardware, with the layout that its tensors have."""
    made = Strict(request.param)
    monkeypatch.setattr(gemm_scaled, "capability", lambda operand: made.capability)
    monkeypatch.setattr(gemm_scaled, "_scales_lines", lambda operand: made.capability >= 90)
    monkeypatch.setattr(torch, "_scaled_mm", made)
    layout: Any = "transpose" if made.capability < 100 else "shared"
    with scaled_products(), columnwise_layout(layout):
        yield made


class Recorded:
    """torch's own function on the CPU, and how often it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = torch._scaled_mm

        def call(*args: Any) -> torch.Tensor:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(torch, "_scaled_mm", call)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def coded(shape: tuple[int, ...], fp8_dtype: torch.dtype, scale: float, seed: int) -> Float8TensorStorage:
    """Codes drawn from all finite ones."""
    generator = torch.Generator().manual_seed(seed)
    top = 0x7E if fp8_dtype == E4M3 else 0x7B
    codes = torch.randint(0, top + 1, shape, dtype=torch.uint8, generator=generator)
    codes |= torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator) << 7
    made = Float8TensorStorage(data=codes, fp8_scale_inv=torch.tensor(scale), fp8_dtype=fp8_dtype, dtype=torch.bfloat16)
    # As the quantizers do, where the columnwise usage is a transpose.
    made.rebuild_derived()
    return made


def matrix(x: Any) -> torch.Tensor:
    values = x.dequantize(torch.float64) if isinstance(x, QuantizedTensorStorage) else x.double()
    codes = x._codes() if isinstance(x, Float8TensorStorage) else None
    if codes is not None:
        # The scale's product with a code need not be a float32 value.
        values = codes.contiguous().view(x._fp8_dtype).double() * x._scale_inv.double()
    return values.reshape(-1, values.shape[-1]) if values.numel() else values.reshape(values.shape[0], values.shape[-1])


def check(
    got: torch.Tensor, a: Any, b: Any, kind: str, dtype: torch.dtype, bias: Any = None, extra: Any = None
) -> None:
    """Sums in float32 of exact products, and one rounding."""
    left, right = matrix(a), matrix(b)
    exact, size = PRODUCTS[kind](left, right), PRODUCTS[kind](left.abs(), right.abs())
    for term in (bias, extra):
        if term is not None:
            exact, size = exact + term.double(), size + term.double().abs()
    inner = left.shape[0 if kind == "wgrad" else 1]
    bound = (inner + 4) * 2.0**-24 * size + ROUNDING[dtype] * 1.01 * exact.abs()
    assert got.dtype == dtype
    assert got.shape == exact.shape
    assert got.is_contiguous()
    assert ((got.double() - exact).abs() <= bound + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
def test_against_float64(library: Recorded, kind: Any, sizes: tuple[int, int, int], bias_dtype: Any) -> None:
    for layout in ("transpose", "shared"):
        with columnwise_layout(layout), scaled_products():  # type: ignore[arg-type]
            shapes = SHAPES[kind](*sizes)
            a, b = coded(shapes[0], E4M3, 2.3e-3, 0), coded(shapes[1], E4M3, 0.7e-3, 1)
            columns = PRODUCTS[kind](matrix(a), matrix(b)).shape[1]
            bias = None if bias_dtype is None else torch.randn(columns, dtype=bias_dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                check(gemm(a, b, kind, out_dtype=dtype, bias=bias), a, b, kind, dtype, bias)
    assert library.count == (6 if all(sizes) else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_what_a_gpu_is_given(strict: Strict, kind: Any, sizes: tuple[int, int, int], formats: Any) -> None:
    a, b = (coded(s, f, 0.7e-5, i) for i, (s, f) in enumerate(zip(SHAPES[kind](*sizes), formats, strict=True)))
    columns = PRODUCTS[kind](matrix(a), matrix(b)).shape[1]
    biases = [None, torch.randn(columns), torch.randn(columns).bfloat16(), torch.randn(columns + 1).bfloat16()[1:]]
    for bias in biases:
        for dtype in (torch.float32, torch.bfloat16):
            got = gemm(a, b, kind, out_dtype=dtype, bias=bias, use_split_accumulator=kind != "fprop")
            check(got, a, b, kind, dtype, bias)
    assert len(strict.calls) == (8 if all(sizes) else 0)
    for call in strict.calls:
        assert call["fast"] == (kind == "fprop")
    assert sum(call["bias"] is not None for call in strict.calls) == (2 if all(sizes) else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_that_fits(strict: Strict, kind: Any) -> None:
    a, b = (coded(shape, E4M3, 1.0, i) for i, shape in enumerate(SHAPES[kind](48, 32, 64)))
    bias = torch.zeros(gemm(a, b, kind).shape[1], dtype=torch.bfloat16)
    strict.calls.clear()
    got = gemm(a, b, kind, bias=bias)
    (call,) = strict.calls
    own = [{t.data_ptr() for t in x.inner_list() if t is not None} for x in (a, b)]
    copied = [matrix.data_ptr() not in held for matrix, held in zip((call["a"], call["b"]), own, strict=True)]
    # One buffer for both usages, and a library that takes one layout only: transposed here.
    by_columns = [strict.capability >= 120 and kind == "wgrad", strict.capability >= 120 and kind != "fprop"]
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
        return Float8TensorStorage(data=codes, fp8_scale_inv=whole._scale_inv, fp8_dtype=E4M3, dtype=torch.bfloat16)

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
                check(gemm(one, two, "wgrad", out_dtype=torch.float32), one, two, "wgrad", torch.float32)
            grad = coded((16, view.shape[0]), E4M3, 1.0, 3)
            check(gemm(grad, a, "dgrad", out_dtype=torch.float32), grad, a, "dgrad", torch.float32)
    leading = coded((2, 3, 64), E4M3, 1.0, 5)
    other = coded((6, 16), E4M3, 1.0, 6)
    check(gemm(other, leading, "wgrad", out_dtype=torch.float32), other, leading, "wgrad", torch.float32)
    assert len(strict.calls) > 20


def test_transposed_codes_alone_serve_both_usages(strict: Strict) -> None:
    with columnwise_layout("transpose"):
        for shape in ((48, 32), (5, 7), (2, 3, 64)):
            whole = coded(shape, E4M3, 1.0, 0)
            whole.update_usage(rowwise_usage=False)
            assert whole._data is None
            rows = matrix(whole).shape[0]
            grad, weight = coded((rows, 16), E4M3, 1.0, 1), coded((16, shape[-1]), E4M3, 1.0, 2)
            check(gemm(grad, whole, "wgrad", out_dtype=torch.float32), grad, whole, "wgrad", torch.float32)
            check(gemm(whole, weight, "fprop", out_dtype=torch.float32), whole, weight, "fprop", torch.float32)
            check(gemm(weight, whole, "fprop", out_dtype=torch.float32), weight, whole, "fprop", torch.float32)
    assert len(strict.calls) == 9


def test_a_stale_transpose_is_not_read(strict: Strict) -> None:
    grad, weight = coded((16, 32), E4M3, 1.0, 0), coded((32, 48), E4M3, 1.0, 1)
    gemm(grad, weight, "dgrad")
    assert weight._data is not None
    weight._data.copy_(coded((32, 48), E4M3, 1.0, 2)._data)
    check(gemm(grad, weight, "dgrad", out_dtype=torch.float32), grad, weight, "dgrad", torch.float32)


@pytest.mark.parametrize("kind", ["fprop", "dgrad"])
def test_what_is_made_of_a_weight_is_made_once(strict: Strict, kind: Any) -> None:
    a_shape, b_shape = SHAPES[kind](16, 31, 29)
    a, weight = coded(a_shape, E4M3, 1.0, 0), coded(b_shape, E4M3, 1.0, 1)
    for _ in range(2):
        gemm(a, weight, kind)
    first, second = (call["b"] for call in strict.calls)
    assert first.data_ptr() == second.data_ptr()
    # A write makes it anew: counted by the storage, or to the buffer itself, through an alias, or in another's place.
    other = coded(b_shape, E4M3, 1.0, 2)
    alias = Float8TensorStorage(data=other._data, fp8_scale_inv=weight._scale_inv, fp8_dtype=E4M3, dtype=torch.bfloat16)
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

    def scaled_lines(self, *, columnwise: bool) -> Any:
        return None if columnwise else (self._data, self._scales)


@pytest.mark.parametrize("rows_of_both", [True, False])
@pytest.mark.parametrize("sizes", [(64, 48, 32), (17, 33, 65), (1, 16, 32), (5, 1, 16), (4, 3, 0), (0, 3, 4)])
def test_one_scale_for_each_row(strict: Strict, sizes: tuple[int, int, int], rows_of_both: bool) -> None:
    m, n, k = sizes
    for formats in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        plain = [coded(s, f, 1.5, i) for i, (s, f) in enumerate(zip(((m, k), (n, k)), formats, strict=True))]
        a, b = (
            LineScaled(data=x._data.view(f), scales=1e-4 + torch.rand(x._data.shape[0]) * 1e-3)  # type: ignore[union-attr]
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
        if all(sizes):
            assert len(strict.calls) == 9
            by_line = [call for call in strict.calls if call["scales"][0].numel() * call["scales"][1].numel() > 1]
            native = strict.capability >= 90 and formats[1] == E4M3 and (m > 1 or (rows_of_both and n > 1))
            assert len(by_line) == (2 if native else 0)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11's function for the CPU takes one scale for a tensor")
def test_one_scale_for_each_row_in_torchs_own_function(library: Recorded) -> None:
    a, b = coded((48, 64), E4M3, 1.0, 0), coded((40, 64), E4M3, 1.0, 1)
    rows = [LineScaled(data=x._data.view(E4M3), scales=torch.rand(x._data.shape[0])) for x in (a, b)]  # type: ignore[union-attr]
    with scaled_products():
        for dtype in (torch.float32, torch.bfloat16):
            check(gemm(*rows, "fprop", out_dtype=dtype), *rows, "fprop", dtype)
    assert library.count == 2


def test_bare_codes(strict: Strict) -> None:
    a, b = coded((16, 32), E4M3, 1.0, 0), coded((48, 32), E4M3, 1.0, 1)
    lines = [(x.scaled_lines(columnwise=False)[0], None) for x in (a, b)]  # type: ignore[index]
    got = scaled_product(*lines, None, torch.float32, False)
    assert got is not None
    check(got, a, b, "fprop", torch.float32)


def test_a_dense_operand_and_a_subclass_of_its_own_are_decoded(library: Recorded, quantizer: Any) -> None:
    class Doubled(Float8TensorStorage):
        def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
            values, scale = super().gemm_operand(columnwise=columnwise, dtype=dtype)
            return values * 2, scale

    a, b = coded((16, 32), E4M3, 1.0, 0), coded((48, 32), E4M3, 1.0, 1)
    doubled = Doubled(data=a._data, fp8_scale_inv=a._scale_inv, fp8_dtype=E4M3, dtype=torch.bfloat16)
    with scaled_products():
        check(gemm(a, b.dequantize(), "fprop", out_dtype=torch.float32), a, b, "fprop", torch.float32)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(32, 48, 64), (17, 5, 9)])
def test_compiled_products_equal_eager_ones(kind: Any, sizes: tuple[int, int, int]) -> None:
    for layout in ("transpose", "shared"):
        with columnwise_layout(layout), scaled_products():  # type: ignore[arg-type]
            shapes = SHAPES[kind](*sizes)
            tensors = []
            for i, shape in enumerate(shapes):
                made = coded(shape, E4M3, 1e-3, i)
                tensors.append(
                    Float8Tensor(
                        dtype=torch.bfloat16,
                        data=made._data,
                        fp8_dtype=E4M3,
                        fp8_scale_inv=made._scale_inv,
                        data_transpose=made._transpose,
                    )
                )
            bias = torch.randn(gemm(*tensors, kind).shape[1])
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda *args: gemm(*args[:2], kind, bias=args[2]), fullgraph=True, backend="aot_eager"
            )
            assert torch.equal(compiled(*tensors, bias), gemm(*tensors, kind, bias=bias))


def test_a_devices_capability_is_a_constant_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_capabilities", {0: 90})

    def choose(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if devices.capability_of_index(0) >= 89 else x - 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(choose, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1)) == 1
    assert devices.capability(torch.zeros(1)) == 0
    assert not gemm_scaled.multiplies_fp8(torch.zeros(1))


def test_tensors_without_memory(strict: Strict) -> None:
    with FakeTensorMode():
        a, b = (
            Float8TensorStorage(
                data=torch.empty(shape, dtype=torch.uint8),
                fp8_scale_inv=torch.ones(()),
                fp8_dtype=E4M3,
                dtype=torch.bfloat16,
            )
            for shape in ((2, 3, 32), (5, 32))
        )
        got = gemm(a, b, "fprop")
    assert got.shape == (6, 5)
    assert got.dtype == torch.bfloat16
    assert not strict.calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(16, 32, 48), (17, 5, 9)])
def test_operations_are_counted(kind: Any, sizes: tuple[int, int, int]) -> None:
    """Those of the product, not of its padding."""
    a, b = (coded(shape, E4M3, 1.0, i) for i, shape in enumerate(SHAPES[kind](*sizes)))
    lines = a.scaled_lines(columnwise=kind == "wgrad"), b.scaled_lines(columnwise=kind != "fprop")
    (left, one), (right, _) = lines  # type: ignore[misc]
    for product in (
        lambda: gemm(a, b, kind),
        lambda: torch.ops.ottava.fp8_mm(left, right, one, one, None, torch.bfloat16, True),
    ):
        with scaled_products(), FlopCounterMode(display=False) as counter:
            product()
        assert counter.get_total_flops() == 2 * sizes[0] * sizes[1] * sizes[2]


class NoLook(TorchDispatchMode):
    """Refuses whatever would make a device wait for the host to look at a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "masked_select"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_is_looked_at(strict: Strict, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    # The mode is to see what the operator is made of.
    monkeypatch.setattr(gemm_scaled, "unobserved", lambda: True)
    for sizes in ((32, 48, 64), (17, 5, 9)):
        a, b = (coded(shape, E4M3, 1.0, i) for i, shape in enumerate(SHAPES[kind](*sizes)))
        with NoLook():
            gemm(a, b, kind)
            gemm(a, b, kind, out=torch.zeros(gemm(a, b, kind).shape), accumulate=True)
            gemm(a, b, kind, bias=torch.zeros(gemm(a, b, kind).shape[1]))
    with pytest.raises(AssertionError), NoLook():
        torch.ones(()).item()


@pytest.mark.parametrize("sizes", [(32, 48, 64), (21, 19, 35)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_training_step(library: Recorded, recipe: Any, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Both paths are within the stated bound of the same sums: one rounding here, two there."""
    m, n, k = sizes
    torch.manual_seed(0)
    layer = ottava.nn.Linear(k, n, recipe=recipe, dtype=dtype)
    x0, dy = torch.randn(m, k, dtype=dtype), torch.randn(m, n, dtype=dtype)

    def step() -> list[torch.Tensor]:
        layer.zero_grad()
        x = x0.clone().requires_grad_()
        y = layer(x)
        y.backward(dy)
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]  # type: ignore[list-item]

    decoded = step()
    assert library.count == 0
    with columnwise_layout("transpose"), scaled_products():
        scaled = step()
    assert library.count == 3
    u = ROUNDING[dtype]
    # The first of the two roundings is before the bias.
    sums = [float(layer.bias.detach().abs().max()), 0, 0, 0]
    for mine, theirs, more in zip(scaled, decoded, sums, strict=True):
        size = theirs.double().abs()
        near = (u + (1 + u) ** 2 - 1) * (size + more) + 1e-5 * size.max()
        assert ((mine.double() - theirs.double()).abs() <= near).all()
    assert torch.equal(scaled[3], decoded[3])


# -- devices without FP8 products --


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A device whose bfloat16 products give float32 sums, and whose backend has an epilogue for them."""
    calls: list[Any] = []

    def epilogue32(sums: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any, out: torch.Tensor) -> None:
        assert sums.dtype == torch.float32
        assert sums.is_contiguous()
        assert out.is_contiguous()
        assert sums.shape == out.shape
        calls.append("epilogue32")
        values = sums
        if scale_a is not None and scale_b is not None:
            values = values * (scale_a * scale_b)
        out.copy_(values if bias is None else values + bias.float())

    def mm(a: torch.Tensor, b: torch.Tensor, *out_dtype: torch.dtype) -> torch.Tensor:
        calls.append((a.dtype, *out_dtype))
        return (a.double() @ b.double()).to(out_dtype[0] if out_dtype else a.dtype)

    def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append((a.dtype, "bias"))
        return (a.double() @ b.double() + bias.double()).to(a.dtype)

    backend = SimpleNamespace(**vars(backend_module("cpu")), epilogue32=epilogue32)
    for module in (products, importlib.import_module("ottava.gemm")):
        monkeypatch.setattr(module, "returns_float32", lambda device: True)
    monkeypatch.setattr(products, "_bfloat16_is_fast", True)
    monkeypatch.setattr(products, "backend_module", lambda kind: backend)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_products_round_once(wide: list[Any], kind: Any) -> None:
    a, b = (coded(shape, E4M3, 0.3e-3, i) for i, shape in enumerate(SHAPES[kind](17, 33, 9)))
    columns = PRODUCTS[kind](matrix(a), matrix(b)).shape[1]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bias in (None, torch.randn(columns)):
            wide.clear()
            check(gemm(a, b, kind, out_dtype=dtype, bias=bias), a, b, kind, dtype, bias)
            assert wide == [(torch.bfloat16, torch.float32), "epilogue32"]


def test_a_product_without_scales_goes_straight_to_its_dtype(wide: list[Any]) -> None:
    a, b = torch.randn(5, 6).bfloat16(), torch.randn(7, 6).bfloat16()
    gemm(a, b, "fprop")
    gemm(a, b, "fprop", out_dtype=torch.float32)
    gemm(a.float(), b.float(), "fprop", out_dtype=torch.float32)
    assert wide == [(torch.bfloat16,), (torch.bfloat16, torch.float32), (torch.float32,)]


def test_the_library_adds_a_bias_that_it_can(wide: list[Any]) -> None:
    """One of the result's own dtype, where there is no scale to apply before."""
    a, b, bias = torch.randn(5, 6).bfloat16(), torch.randn(7, 6).bfloat16(), torch.randn(7)
    exact = a.double() @ b.double().t()
    for dtype, given in ((torch.bfloat16, bias.bfloat16()), (torch.bfloat16, bias), (torch.float32, bias)):
        result = gemm(a, b, "fprop", out_dtype=dtype, bias=given)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact + given.double(), rtol=2**-8, atol=1e-6)
    sums = [(torch.bfloat16, torch.float32), "epilogue32"]
    assert wide == [(torch.bfloat16, "bias"), *sums, *sums]
