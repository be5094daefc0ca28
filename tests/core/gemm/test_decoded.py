"""Products of operands that are decoded first: every backend against float64, and a layer's plan
against the operator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ottava import GridQuantizer, Layout, kernels
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.gemm import LayerProduct, gemm, multiply
from ottava.gemm import scratch as memory
from ottava.kernels import products, reference
from ottava.kernels.products import scaled_mm
from tests.cases import told
from tests.choosing import cpu_products, scaled_products
from tests.core.gemm.operands import (
    BF16,
    E4M3,
    F16,
    F32,
    PRODUCTS,
    SHAPES,
    WAYS,
    Library,
    blocks,
    cases,
    check,
    chosen,
    coded,
    pair,
    values,
)


@pytest.mark.parametrize("way", WAYS[:3])
def test_scales_and_bias_are_applied_in_float32(way: str) -> None:
    """To sums that are exact, so that the result is defined to the bit."""
    a, b = torch.randint(-8, 9, (33, 20)), torch.randint(-8, 9, (20, 17))
    sums, one, other = (a @ b).float(), torch.tensor(0.37), torch.tensor(5.9)
    strided = torch.randn(17, 2)[:, 0]
    for scales in ((None, None), (one, None), (None, other), (one, other)):
        factors = [scale for scale in scales if scale is not None]
        factor = torch.stack(factors).prod() if factors else 1.0
        for bias in (None, strided, strided.bfloat16()):
            for dtype in (F32, BF16, F16):
                for operands in (F32, BF16, F16):
                    before = sums
                    # torch has no product that adds a float32 bias before it rounds.
                    if way == "fast bfloat16" and operands == dtype == BF16 and bias is strided:
                        before = sums.bfloat16().float()
                    expected = (before * factor + (0.0 if bias is None else bias.float())).to(dtype)
                    with chosen(way):
                        got = scaled_mm(a.to(operands), b.to(operands), *scales, bias, dtype)
                    assert torch.equal(got, expected), (scales, bias, dtype, operands)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_extreme_scales_follow_ieee_and_sums_do_not_overflow(dtype: torch.dtype) -> None:
    a = torch.tensor([[1.0, 0.0], [0.0, 0.0], [float("nan"), 0.0], [-2.0, 0.0]]).bfloat16()
    one = torch.tensor([[1.0, 0.0]]).bfloat16().t()
    large = torch.full((2, 64), 100.0).half()
    with cpu_products(dtype):
        for power, expected in ((100, "inf nan nan -inf"), (-100, "0 0 nan 0")):
            scale = torch.tensor(2.0**power)
            got = scaled_mm(a, one, scale, scale, None, BF16)
            column = torch.tensor([[float(word)] for word in expected.split()]).bfloat16()
            torch.testing.assert_close(got, column, rtol=0, atol=0, equal_nan=True)
        product = scaled_mm(large, large.t(), torch.tensor(2.0**-10), None, None, F16)
        assert product.unique().item() == 625.0


@pytest.mark.parametrize("sides", [(32, 8), (8, 32), (12, 8), (None, 8), (8, None)], ids=str)
def test_blocks_of_two_lengths_share_partial_sums(sides: tuple[int | None, int | None]) -> None:
    """The summed dimension is cut where the blocks of either operand end."""
    rows = torch.arange(70) % 7 + 1
    a, b = (
        GridQuantizer(Layout(E4M3, (1, side)))(torch.randn(5 + place, 70) * rows)
        for place, side in enumerate(sides)
    )
    check(gemm(a, b, out_dtype=F32), a, b, "fprop")


@pytest.mark.parametrize("kind", PRODUCTS)
def test_scales_of_rows_beside_scales_of_blocks(kind: Any) -> None:
    """Where bfloat16 does not hold the products of elements and scales."""
    layout = Layout(torch.int8, (1, 8), E4M3, second_level="row", columnwise="own")
    a, b = (GridQuantizer(layout)(torch.randn(shape)) for shape in SHAPES[kind](5, 6, 20))
    check(gemm(a, b, kind, out_dtype=F32), a, b, kind)


def test_powers_of_two_as_scales_cost_no_rounding() -> None:
    for scales in ((1.0, 1.0), (0.25, 0.125)):
        a, b = pair("fprop", (64, 64, 64), *scales)
        with cpu_products(BF16):
            check(gemm(a, b), a, b, "fprop")


@pytest.fixture
def float32_sums(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A device that multiplies no FP8, whose bfloat16 products give their float32 sums; and what
    it is asked."""
    calls: list[Any] = []

    def epilogue32(sums: Any, scale_a: Any, scale_b: Any, bias: Any, out: Any) -> None:
        assert sums.dtype == F32
        calls.append("epilogue")
        result = sums if scale_a is None else sums * (scale_a * scale_b)
        out.copy_(result if bias is None else result + bias.float())

    def mm(a: torch.Tensor, b: torch.Tensor, *out_dtype: torch.dtype) -> torch.Tensor:
        calls.append((a.dtype, *out_dtype))
        return (a.double() @ b.double()).to(out_dtype[0] if out_dtype else a.dtype)

    def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append((a.dtype, "bias"))
        return (a.double() @ b.double() + bias.double()).to(a.dtype)

    decode = kernels.backends.backend_module("cpu").grid_decode
    backend = SimpleNamespace(grid_decode=decode, epilogue32=epilogue32)
    monkeypatch.setattr(products, "returns_float32", lambda device: True)
    monkeypatch.setattr(products, "_bfloat16_is_fast", True)
    monkeypatch.setattr(products, "backend_module", lambda kind: backend)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    return calls


def test_where_products_give_float32_sums_every_result_is_rounded_once(
    float32_sums: list[Any],
) -> None:
    for kind in PRODUCTS:
        a, b = pair(kind, (17, 33, 9))
        for dtype, bias in cases(PRODUCTS[kind](values(a), values(b)).shape[1]):
            float32_sums.clear()
            check(gemm(a, b, kind, out_dtype=dtype, bias=bias), a, b, kind, bias=bias)
            assert float32_sums == [(BF16, F32), "epilogue"]


def test_operands_of_any_form_mix(quantizer: Any) -> None:
    """Of a plain tensor, and of a quantizer whose user defined the product; whatever torch.autocast
    says."""

    class Custom(type(quantizer)):  # type: ignore[misc]
        custom = True

        def qgemm(self, *args: Any, **options: Any) -> torch.Tensor:
            kinds.append(args[9])
            result: torch.Tensor = super().qgemm(*args, **options)
            return result

    class Doubled(type(coded((1, 1), 0))):  # type: ignore[misc]
        def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
            value, scale = super().gemm_operand(columnwise=columnwise, dtype=dtype)
            return value * 2, scale

    kinds: list[str] = []
    own = Custom(E4M3)
    with scaled_products(), torch.autocast("cpu", BF16):
        for kind in PRODUCTS:
            plain, other = (torch.randn(shape) for shape in SHAPES[kind](4, 5, 6))
            for a, b in ((quantizer(plain), own(other)), (own(plain), quantizer(other))):
                check(gemm(a, b, kind, out_dtype=F32), a, b, kind)
            check(gemm(plain, b, kind, out_dtype=F32), plain, b, kind)
        assert kinds == [kind for kind in PRODUCTS for _ in range(2)]
        a, b = pair("fprop", (4, 5, 6))
        twice = Doubled(data=a._data, fp8_scale_inv=a._scale_inv, fp8_dtype=E4M3, dtype=BF16)
        check(gemm(twice, b, out_dtype=F32) / 2, a, b, "fprop")


def test_elements_that_share_a_byte_are_all_counted() -> None:
    layout = Layout("INT4", (1, 4), columnwise="transposed")
    for kind, shapes in SHAPES.items():
        a, b = (GridQuantizer(layout)(torch.randn(shape)) for shape in shapes(4, 6, 8))
        with FlopCounterMode(display=False) as counter:
            gemm(a, b, kind)  # type: ignore[arg-type]
        assert counter.get_total_flops() == 2 * 4 * 6 * 8


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"b": torch.ones(4, 5)}, ShapeError, "reduced dimensions 3 and 5"),
    ({"b": torch.ones(())}, ShapeError, "operand b has no dimensions"),
    ({"b": torch.ones(4, 3, dtype=torch.int32)}, DTypeError, "operand b"),
    ({"b": torch.ones(4, 3, device="meta")}, DeviceError, "cpu and meta"),
    ({"b": torch.ones(4, 3, dtype=torch.float64)}, DTypeError, "operand b"),
    ({"b": [[1.0] * 3]}, DTypeError, "operand b"),
    ({"a": torch.ones(())}, ShapeError, "operand a has no dimensions"),
    ({"gemm_type": "forward"}, OptionError, "'forward'"),
    ({"gemm_type": ["fprop"]}, OptionError, "gemm_type"),
    ({"accumulate": True}, OptionError, "without out"),
    ({"out_dtype": torch.int8}, DTypeError, "result"),
    ({"bias": torch.ones(3)}, ShapeError, "bias"),
    ({"bias": torch.ones(4, dtype=torch.int8)}, DTypeError, "bias"),
    ({"bias": torch.ones(4, device="meta")}, DeviceError, "bias"),
    ({"out": torch.ones(3, 3)}, ShapeError, "out"),
    ({"out": torch.ones(2, 4, device="meta")}, DeviceError, "out"),
    ({"out": torch.ones(2, 4, dtype=torch.int32)}, DTypeError, "out"),
]


def test_operands_that_do_not_fit_are_refused(quantizer: Any, gpu: Library) -> None:
    a, b = quantizer(torch.ones(2, 3)), quantizer(torch.ones(4, 3))
    for options, error, words in BAD:
        with told(options), pytest.raises(error, match=words):
            gemm(**{"a": a, "b": b} | options)
    assert not gpu.calls


@pytest.mark.parametrize("scaled", [False, True])
def test_no_gradient_flows_through_a_product(scaled: bool, cpu_library: Library) -> None:
    a, b = pair("fprop", (16, 48, 32))
    bias = torch.randn(48, dtype=BF16, requires_grad=True)
    with scaled_products(scaled):
        assert not gemm(a, b, bias=bias).requires_grad
        assert not gemm(torch.ones(16, 32, requires_grad=True), b, bias=bias).requires_grad


# -- the plans of a layer's products --


def layer_operands(name: str, size: int = 64) -> list[Any]:
    if name == "tensor":
        return [coded((rows, size), rows, 0.25) for rows in (16, 24)]
    layout = Layout(E4M3, (1, 32), torch.float8_e8m0fnu, "up")
    return [blocks((rows, size), layout, rows) for rows in (16, 24)]


each_layout = pytest.mark.parametrize("name", ["tensor", "blocks"])


@each_layout
def test_planned_products_have_the_bytes_of_the_operator(name: str) -> None:
    (x, w), dy = layer_operands(name), layer_operands(name, 24)[0]
    for kind, a, b, columns in (("fprop", x, w, 24), ("dgrad", dy, w, 64), ("wgrad", dy, x, 64)):
        for dtype, bias in cases(columns):
            expected = multiply(a, b, kind, dtype, bias)  # type: ignore[arg-type]
            product = LayerProduct(kind, dtype)  # type: ignore[arg-type]
            with torch.inference_mode():
                results = [product(a, b, bias).clone()]
            results += [product(a, b, bias), product(a, b, bias)]
            for observer in (torch.autocast("cpu", BF16), FlopCounterMode(display=False)):
                with observer:
                    results.append(product(a, b, bias))
            with ThreadPoolExecutor(1) as threads:
                results.append(threads.submit(product, a, b, bias).result())
            for result in results:
                assert torch.equal(result, expected), (kind, dtype)
                assert result.dtype == dtype
        assert not results[1].is_inference()
    start = torch.randn(24, 64)
    added = LayerProduct("wgrad", BF16, accumulates=True)
    for _ in range(2):
        out = start.clone()
        assert added(dy, x, None, out) is out
        assert torch.equal(out, start + multiply(dy, x, "wgrad", F32))


@each_layout
def test_a_plan_follows_layouts_settings_and_memory(name: str, cpu_library: Library) -> None:
    product, results = LayerProduct("fprop", BF16), {}
    for other in (name, "tensor", "blocks", name):
        x, w = layer_operands(other)
        assert torch.equal(product(x, w), multiply(x, w, "fprop", BF16))
    for way in (*WAYS, *WAYS):
        with chosen(way):
            results[way] = product(x, w)
            assert torch.equal(results[way], multiply(x, w, "fprop", BF16)), way
    assert len(cpu_library.calls) == (4 if name == "tensor" else 0)
    pairs = [layer_operands(name, size) for size in (32, 160, 96)]
    grown = [LayerProduct("fprop", F32) for _ in pairs]
    for _ in range(2):
        for each, (x, w) in zip(grown, pairs, strict=True):
            assert torch.equal(each(x, w), multiply(x, w, "fprop", F32))


@each_layout
def test_a_plan_follows_the_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*_: Any) -> None:
        raise ZeroDivisionError

    (x, w), product = layer_operands(name), LayerProduct("fprop", F32)
    first = product(x, w)
    monkeypatch.setattr(reference, "grid_decode", decoded)
    with kernels.use_backend("reference"), pytest.raises(ZeroDivisionError):
        product(x, w)
    assert torch.equal(product(x, w), first)


@each_layout
def test_strides_of_elements_and_scales_are_minded(name: str) -> None:
    x, w = layer_operands(name)
    expected = gemm(x, w, out_dtype=F32)
    for storage in (x, w):
        for inner in storage.inner_tensors:
            tensor = getattr(storage, inner.attribute)
            if tensor is not None and tensor.dim() == 2:
                setattr(storage, inner.attribute, tensor.t().contiguous().t())
    assert torch.equal(gemm(x, w, out_dtype=F32), expected)


def repeated(seed: int) -> torch.Tensor:
    """A product, the same each of many times."""
    x = coded((64, 64), seed)
    first = gemm(x, x, out_dtype=F32)
    for _ in range(100):
        assert torch.equal(gemm(x, x, out_dtype=F32), first)
    return first


def test_results_outlive_the_memory_of_operands_and_threads_have_their_own() -> None:
    first = repeated(1)
    copy = first.clone()
    with torch.inference_mode():
        gemm(coded((300, 300), 2), coded((300, 300), 3))
    gemm(coded((64, 64), 4), coded((64, 64), 5))
    assert torch.equal(first, copy)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(repeated, range(4)))
    assert all(torch.equal(result, repeated(seed)) for seed, result in enumerate(found))


def test_the_memory_of_large_operands_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.Scratch, "LARGEST", 10_000)
    monkeypatch.setattr(memory, "scratch", memory.Scratch())
    gemm(coded((16, 64), 0), coded((200, 64), 1))
    assert 0 < max(buffer.numel() for buffer in memory.scratch.buffers) <= 1 << 14


# -- which product a CPU has --


def test_a_variable_overrules_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(value: str) -> bool:
        monkeypatch.setattr(products, "_bfloat16_is_fast", None)
        monkeypatch.setenv("OTTAVA_CPU_PRODUCT", value)
        return products.multiplies_bfloat16()

    assert answer("") is bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert answer("bfloat16") is True
    assert answer("float32") is False
    with pytest.raises(products.BackendError, match=r"'fp16'.*bfloat16, float32.*unset"):
        answer("fp16")
    with cpu_products(F32):
        dtypes = {
            kind: products.product_dtype(BF16, torch.device(kind)) for kind in ("cpu", "cuda")
        }
    assert dtypes == {"cpu": F32, "cuda": BF16}
