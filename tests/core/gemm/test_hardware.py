"""Products on hardware that multiplies FP8: what torch's library is asked for, against float64.

``Library`` stands in for the library of a GPU, which takes less than that of a CPU does.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ottava
from ottava import Layout
from ottava.gemm import gemm, operators
from ottava.kernels import products
from ottava.tensors import Float8TensorStorage, columnwise_layout
from tests.choosing import scaled_products
from tests.comparing import assert_same
from tests.core.gemm.operands import (
    BF16,
    E4M3,
    E5M2,
    F32,
    FORMATS,
    PRODUCTS,
    SHAPES,
    SIZES,
    Library,
    blocks,
    cases,
    check,
    coded,
    pair,
    values,
)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_every_product_is_that_of_float64(gpu: Library, kind: Any) -> None:
    for sizes in SIZES:
        for formats in FORMATS:
            a, b = pair(kind, sizes, formats=formats)
            for dtype, bias in cases(PRODUCTS[kind](values(a), values(b)).shape[1]):
                gpu.calls.clear()
                split = kind != "fprop"
                got = gemm(a, b, kind, out_dtype=dtype, bias=bias, use_split_accumulator=split)
                assert got.dtype == dtype
                check(got, a, b, kind, bias=bias)
                assert len(gpu.calls) == (1 if all(sizes) else 0), sizes
                for call in gpu.calls:
                    assert call["fast"] is not split
                    # The library adds a bias of the result's dtype, and rounds once.
                    fuses = bias is not None and bias.dtype == dtype != F32
                    assert (call["bias"] is not None) == fuses


@pytest.mark.parametrize("kind", PRODUCTS)
def test_what_fits_is_not_copied(gpu: Library, kind: Any) -> None:
    a, b = pair(kind, (48, 32, 64))
    bias = torch.zeros(PRODUCTS[kind](values(a), values(b)).shape[1], dtype=BF16)
    gemm(a, b, kind, bias=bias)
    (call,) = gpu.calls
    own = [{t.data_ptr() for t in x.inner_list() if t is not None} for x in (a, b)]
    copied = [call[name].data_ptr() not in held for name, held in zip("ab", own, strict=True)]
    # One buffer for both usages, and a library that takes one layout only: transposed here.
    turned = gpu.capability >= 120
    assert copied == [turned and kind == "wgrad", turned and kind != "fprop"]
    assert call["scale_a"].data_ptr() == a._scale_inv.data_ptr()
    assert call["bias"].data_ptr() == bias.data_ptr()


@pytest.mark.parametrize("kind", PRODUCTS)
def test_sums_into_out_are_rounded_once_and_nan_stays_in_its_lines(gpu: Library, kind: Any) -> None:
    for sizes in ((32, 48, 64), (17, 5, 9)):
        gpu.calls.clear()
        a, b = pair(kind, sizes, 3e-4, 3e-4)
        start = torch.randn(PRODUCTS[kind](values(a), values(b)).shape)
        for dtype in (F32, BF16):
            out = start.to(dtype, copy=True)
            assert gemm(a, b, kind, out=out, accumulate=True) is out
            check(out, a, b, kind, start=start.to(dtype))
        assert all(call["dtype"] == F32 for call in gpu.calls)
        a._data[3, 3], b._data[4, 2] = 0x7F, 0xFF
        for x in (a, b):
            x.mark_written()
            x.rebuild_derived()
        expected = PRODUCTS[kind](values(a), values(b)).isnan()
        assert torch.equal(gemm(a, b, kind).isnan(), expected)
        assert 0 < expected.sum() < expected.numel()


def test_two_e5m2_operands_are_decoded(gpu: Library) -> None:
    for kind in PRODUCTS:
        a, b = pair(kind, (32, 48, 64), formats=(E5M2, E5M2))
        check(gemm(a, b, kind, out_dtype=F32), a, b, kind)
    assert not gpu.calls


def test_strides_addresses_and_leading_dimensions(gpu: Library) -> None:
    data = coded((40, 96), 0)._data
    assert data is not None
    views = [
        data[:, 5:69],
        data[::2, :64],
        data[7:8, 3:67],
        data.t()[:40].t()[:, :40],
        data.reshape(-1)[3 : 3 + 64 * 16].view(16, 64),
        data[:, :64].reshape(2, 4, 5, 64),
        data[0, :64],
        data.as_strided((1, 64), (5, 1)),
    ]
    for view in views:
        x = Float8TensorStorage(
            data=view, fp8_scale_inv=torch.tensor(0.5), fp8_dtype=E4M3, dtype=BF16
        )
        rows, inner = values(x).shape
        weight, grad = coded((32, inner), 1), coded((rows, 48), 2)
        check(gemm(x, weight, out_dtype=F32), x, weight, "fprop")
        check(gemm(grad, x, "wgrad", out_dtype=F32), grad, x, "wgrad")
        if view.dim() == 2:
            other = coded((16, rows), 3)
            check(gemm(other, x, "dgrad", out_dtype=F32), other, x, "dgrad")
    assert len(gpu.calls) == 2 * len(views) + 6


def test_transposed_codes_alone_serve_both_usages(gpu: Library) -> None:
    with columnwise_layout("transpose"):
        for shape in ((48, 32), (5, 7), (2, 3, 64)):
            x = coded(shape, 0)
            x.update_usage(rowwise_usage=False)
            assert x._data is None
            grad, weight = coded((values(x).shape[0], 16), 1), coded((16, shape[-1]), 2)
            check(gemm(grad, x, "wgrad", out_dtype=F32), grad, x, "wgrad")
            check(gemm(x, weight, out_dtype=F32), x, weight, "fprop")
            check(gemm(weight, x, out_dtype=F32), weight, x, "fprop")
    assert len(gpu.calls) == 9


@pytest.mark.parametrize("kind", ["fprop", "dgrad"])
def test_what_is_derived_of_a_weight_is_made_once_for_each_value(gpu: Library, kind: Any) -> None:
    a, weight = pair(kind, (16, 31, 29))
    gemm(a, weight, kind)
    gemm(a, weight, kind)
    first, second = (call["b"] for call in gpu.calls)
    assert first.data_ptr() == second.data_ptr()
    shape = SHAPES[kind](16, 31, 29)[1]
    other = coded(shape, 2)
    alias = Float8TensorStorage(
        data=other._data, fp8_scale_inv=weight._scale_inv, fp8_dtype=E4M3, dtype=BF16
    )
    alias._writes = weight._writes
    writes: dict[str, Any] = {
        "other data": lambda: setattr(weight, "_data", other._data),
        "copied values": lambda: weight.copy_from_storage(coded(shape, 3)),
        "a write to the buffer": lambda: weight._data.fill_(0x38),
        "a write by numpy": lambda: (alias._data.numpy().fill(0x40), alias.mark_written()),  # type: ignore[union-attr]
    }
    for name, write in writes.items():
        write()
        try:
            check(gemm(a, weight, kind, out_dtype=F32), a, weight, kind)
        except AssertionError as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
def test_scales_of_rows_are_the_librarys_where_it_takes_them(gpu: Library, both: bool) -> None:
    sizes = [(64, 48, 32), (17, 33, 65), (1, 16, 32), (5, 1, 16), (4, 3, 0), (0, 3, 4)]
    for m, n, k in sizes:
        for formats in FORMATS:
            a = blocks((m, k), Layout(formats[0], (1, None)))
            b: Any = coded((n, k), 1, 1e-5, formats[1])
            if both:
                b = blocks((n, k), Layout(formats[1], (1, None)))
                # Any strides will do.
                b._rowwise_data = b._rowwise_data.t().contiguous().t()
            gpu.calls.clear()
            for dtype, bias in cases(n):
                check(gemm(a, b, out_dtype=dtype, bias=bias), a, b, "fprop", bias=bias)
            by_row = [c for c in gpu.calls if c["scale_a"].numel() * c["scale_b"].numel() > 1]
            native = gpu.capability >= 90 and formats[1] == E4M3 and (m > 1 or (both and n > 1))
            assert len(gpu.calls) == (12 if m * n * k else 0)
            # BF16 results without a bias, or with one that the library adds.
            assert len(by_row) == (2 if native and m * n * k else 0), (m, n, k)


def test_torchs_library_for_the_cpu_scales_rows(cpu_library: Library) -> None:
    if torch.__version__ < "2.13":
        pytest.skip("torch 2.11's function for the CPU takes one scale for a tensor")
    a, b = (blocks((size, 64), Layout(E4M3, (1, None))) for size in (48, 40))
    with scaled_products():
        for dtype in (F32, BF16):
            check(gemm(a, b, out_dtype=dtype), a, b, "fprop")
    assert len(cpu_library.calls) == 2


# -- graphs, tensors without memory, and what a GPU would wait for --


@pytest.mark.xdist_group("compiler")
def test_compiled_products_equal_eager_ones(cpu_library: Library) -> None:
    """One graph of every kind of product, with sizes that fit and sizes that do not."""
    kinds = [("fprop", (32, 48, 64)), ("fprop", (17, 5, 9)), ("dgrad", (17, 5, 9))]
    kinds.append(("wgrad", (17, 5, 9)))

    def tensor(x: Float8TensorStorage) -> ottava.Float8Tensor:
        scale = x._scale_inv
        return ottava.Float8Tensor(dtype=BF16, data=x._data, fp8_dtype=E4M3, fp8_scale_inv=scale)

    with columnwise_layout("shared"), scaled_products():
        pairs = [[tensor(x) for x in pair(kind, sizes)] for kind, sizes in kinds]
        biases = [
            torch.randn(gemm(*operands, kind).shape[1])
            for operands, (kind, _) in zip(pairs, kinds, strict=True)
        ]

        def run(pairs: Any, biases: Any) -> list[torch.Tensor]:
            triples = zip(pairs, biases, kinds, strict=True)
            return [gemm(*operands, kind, bias=bias) for operands, bias, (kind, _) in triples]

        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert_same(compiled(pairs, biases), run(pairs, biases), note=kinds)


@pytest.mark.xdist_group("compiler")
def test_a_devices_capability_is_a_constant_of_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_capabilities", {0: 90})

    def choose(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if products.capability_of_index(0) >= 89 else x - 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.compile(choose, fullgraph=True, backend="eager")(torch.zeros(1)) == 1
    assert products.capability(torch.zeros(1)) == 0


def test_tensors_without_memory_have_shapes(gpu: Library) -> None:
    with FakeTensorMode():
        a, b = (
            Float8TensorStorage(
                data=torch.empty(shape, dtype=torch.uint8),
                fp8_scale_inv=torch.ones(()),
                fp8_dtype=E4M3,
                dtype=BF16,
            )
            for shape in ((2, 3, 32), (5, 32))
        )
        got = gemm(a, b)
    assert (got.shape, got.dtype) == ((6, 5), BF16)
    assert not gpu.calls


class NoWait(TorchDispatchMode):
    """Refuses whatever would make the host wait for a value of the device."""

    WAITS = ("_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", PRODUCTS)
def test_nothing_waits_for_a_value_and_only_the_product_is_counted(
    gpu: Library, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    for sizes in ((32, 48, 64), (17, 5, 9)):
        a, b = pair(kind, sizes)
        with FlopCounterMode(display=False) as counter:
            shape = gemm(a, b, kind).shape
        assert counter.get_total_flops() == 2 * sizes[0] * sizes[1] * sizes[2]
        with monkeypatch.context() as patch:
            # The mode sees what the operator is made of.
            patch.setattr(operators, "is_direct", lambda *tensors: True)
            with NoWait():
                gemm(a, b, kind, out=torch.zeros(shape), accumulate=True)
                gemm(a, b, kind, bias=torch.zeros(shape[1]))
    with pytest.raises(AssertionError), NoWait():
        torch.ones(()).item()
