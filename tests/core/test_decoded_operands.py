"""Products of operands that are decoded first, on a CPU in memory that each thread keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ottava import Layout, kernels
from ottava.gemm import LayerProduct, Side, gemm, multiply, scaled
from ottava.gemm import scratch as memory
from ottava.gemm.decoded import decoded_mm
from ottava.gemm.scratch import Scratch
from ottava.kernels import products as dense
from ottava.kernels import use_backend
from ottava.kernels.products import scaled_mm
from ottava.tensors import Float8TensorStorage
from ottava.tensors.grid import GridTensorStorage
from tests.choosing import cpu_products, scaled_products

E4M3, F32 = torch.float8_e4m3fn, torch.float32
WHOLE = Layout(E4M3, (None, None), columnwise="same").text


def decoded_products(seed: int, size: int = 24) -> list[torch.Tensor]:
    """Products of operands of several sizes, and what float64 makes of the same values."""
    torch.manual_seed(seed)
    found = []
    for rows, columns in ((size, size + 3), (1, 5), (2 * size, 7)):
        x, w = torch.randn(rows, size), torch.randn(columns, size)
        a, b = (kernels.cast(values, torch.tensor(4.0), E4M3) for values in (x, w))
        scale = torch.tensor(0.25)
        operands = Side(a, scale, WHOLE), Side(b, scale, WHOLE)
        made = decoded_mm(*operands, None, F32, F32)
        exact = (a.view(E4M3).double() / 4) @ (b.view(E4M3).double() / 4).t()
        torch.testing.assert_close(made, exact.float(), rtol=1e-5, atol=1e-5)
        found.append(made)
    return found


def test_results_outlive_the_memory_that_operands_take_turns_in() -> None:
    first = decoded_products(1)
    kept = [made.clone() for made in first]
    with torch.inference_mode():
        decoded_products(2, 300)
    decoded_products(3)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_threads_decode_into_memory_of_their_own() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(repeated_product, range(4)))
    assert all(torch.equal(made, repeated_product(seed)) for seed, made in enumerate(found))


def repeated_product(seed: int) -> torch.Tensor:
    """The product of the values of a seed, the same each of many times."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 64, generator=generator)
    data, scale = kernels.cast(x, torch.tensor(4.0), E4M3), torch.tensor(0.25)
    operand = Side(data, scale, WHOLE)
    first = decoded_mm(operand, operand, None, F32, F32)
    for _ in range(200):
        assert torch.equal(decoded_mm(operand, operand, None, F32, F32), first)
    return first


def test_large_operands_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scratch, "LARGEST", 10_000)
    monkeypatch.setattr(memory, "scratch", Scratch())
    decoded_products(1, 64)
    assert 0 < max(buffer.numel() for buffer in memory.scratch.buffers) <= 1 << 14


# -- what is decided at the first product of two layouts and shapes --


def operands(recipe: str, size: int = 64) -> tuple[Any, Any]:
    """Bare storages of an input and a weight."""
    torch.manual_seed(0)
    made = []
    for rows in (16, 24):
        x = torch.randn(rows, size)
        if recipe == "tensor":
            data, scale = kernels.cast(x, torch.tensor(4.0), E4M3), torch.tensor(0.25)
            made.append(Float8TensorStorage(data=data, fp8_scale_inv=scale, fp8_dtype=E4M3))
        else:
            layout = Layout(E4M3, (1, 32), torch.float8_e8m0fnu, "up")
            sides = kernels.grid_quantize(x, layout)
            names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
            made.append(GridTensorStorage(**dict(zip(names, sides, strict=True)), layout=layout))
    return made[0], made[1]


each_layout = pytest.mark.parametrize("recipe", ["tensor", "blocks"])


@each_layout
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16])
def test_planned_products_have_the_bytes_of_the_operator(recipe: str, dtype: torch.dtype) -> None:
    x, w = operands(recipe)
    dy = operands(recipe, 24)[0]
    for kind, a, b, columns in (("fprop", x, w, 24), ("dgrad", dy, w, 64), ("wgrad", dy, x, 64)):
        for given in (None, F32, torch.bfloat16, torch.float16):
            bias = None if given is None else torch.randn(columns).to(given)
            expected = multiply(a, b, kind, dtype, bias)  # type: ignore[arg-type]
            product = LayerProduct(kind, dtype)  # type: ignore[arg-type]
            made = [product(a, b, bias) for _ in range(2)]
            # Where torch.autocast is on, or dispatch is observed, Python multiplies.
            for region in (torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
                with region:
                    made.append(product(a, b, bias))
            # The memory of a plan is that of one thread.
            with ThreadPoolExecutor(1) as threads:
                made.append(threads.submit(product, a, b, bias).result())
            assert all(torch.equal(each, expected) and each.dtype == dtype for each in made), (
                kind,
                given,
            )


@each_layout
def test_a_product_that_is_added_rounds_once(recipe: str) -> None:
    x, dy = operands(recipe)[0], operands(recipe, 24)[0]
    product = LayerProduct("wgrad", torch.bfloat16, accumulates=True)
    start = torch.randn(24, 64)
    expected = start + multiply(dy, x, "wgrad", F32)
    for _ in range(2):
        out = start.clone()
        assert product(dy, x, None, out) is out
        assert torch.equal(out, expected)


@each_layout
def test_operands_of_another_layout_are_planned_anew(recipe: str) -> None:
    product = LayerProduct("fprop", F32)
    for other in (recipe, "tensor", "blocks", recipe):
        x, w = operands(other)
        assert torch.equal(product(x, w), multiply(x, w, "fprop", F32))


@each_layout
def test_a_setting_that_changes_is_seen(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backend, product and hardware: in a plan that was made before."""
    x, w = operands(recipe)
    seen: list[str] = []
    mm, addmm = torch.mm, torch.addmm
    monkeypatch.setattr(torch, "mm", lambda a, *rest: seen.append(str(a.dtype)) or mm(a, *rest))
    monkeypatch.setattr(
        torch,
        "addmm",
        lambda bias, a, *rest, **o: seen.append(str(a.dtype)) or addmm(bias, a, *rest, **o),
    )

    planned = LayerProduct("fprop", torch.bfloat16)

    def dtypes() -> list[str]:
        seen.clear()
        planned(x, w)
        return list(seen)

    for product in (torch.bfloat16, F32, torch.bfloat16):
        with cpu_products(product):
            assert dtypes() == dtypes() == [str(product)]
            with use_backend("reference"):
                assert dtypes() == [str(F32)]
            assert dtypes() == [str(product)]


def test_what_is_scaled_by_the_library_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands("tensor")
    calls: list[str] = []
    original = scaled.scaled_mm
    monkeypatch.setattr(scaled, "scaled_mm", lambda *args: calls.append("") or original(*args))
    planned = LayerProduct("fprop", torch.bfloat16)
    planned(x, w)
    with scaled_products():
        planned(x, w)
    planned(x, w)
    assert len(calls) == 1


@each_layout
def test_a_plan_that_was_made_in_inference_mode_serves_training(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "scratch", Scratch())
    x, w = operands(recipe)
    product = LayerProduct("fprop", F32)
    with torch.inference_mode():
        expected = product(x, w).clone()
    assert not any(buffer.is_inference() for buffer in memory.scratch.buffers)
    made = product(x, w)
    assert torch.equal(made, expected)
    assert not made.is_inference()


@each_layout
def test_memory_that_has_grown_since_leaves_products_as_they_are(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "scratch", Scratch())
    pairs = [operands(recipe, size) for size in (32, 64, 96, 128, 160)]
    products = [LayerProduct("fprop", F32) for _ in pairs]
    for _ in range(2):
        for product, (x, w) in zip(products, pairs, strict=True):
            assert torch.equal(product(x, w), multiply(x, w, "fprop", F32))


@each_layout
def test_strides_of_elements_and_scales_are_minded(recipe: str) -> None:
    x, w = operands(recipe)
    expected = gemm(x, w, out_dtype=F32)
    for storage in (x, w):
        for inner in storage.inner_tensors:
            tensor = getattr(storage, inner.attribute)
            if tensor is not None and tensor.dim() == 2:
                setattr(storage, inner.attribute, tensor.t().contiguous().t())
    assert torch.equal(gemm(x, w, out_dtype=F32), expected)


def test_scales_beyond_float32_follow_ieee() -> None:
    """Their product is infinite, or 0: so is the result, and NaN where IEEE has one."""
    a = torch.tensor([[1.0, 0.0], [0.0, 0.0], [float("nan"), 0.0], [-2.0, 0.0]]).bfloat16()
    one = torch.tensor([[1.0, 0.0]]).bfloat16().t()
    for scale, expected in (
        (2.0**100, ["inf", "nan", "nan", "-inf"]),
        (2.0**-100, [0.0, 0.0, "nan", 0.0]),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            with cpu_products(dtype):
                made = scaled_mm(
                    a, one, torch.tensor(scale), torch.tensor(scale), None, torch.bfloat16
                )
            wanted = torch.tensor([[float(value)] for value in expected]).bfloat16()
            torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("block", "count"), [((None, None), 3), ((1, None), 3), ((1, 128), 3), ((8, 32), 10)], ids=str
)
def test_partial_sums_are_those_of_blocks(
    block: tuple[int | None, int | None], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has one scale along the summed dimension asks for no more of them."""
    torch.manual_seed(0)
    operands, exact = [], []
    for rows, sides in ((5, (1, 128)), (7, block)):
        layout = Layout(E4M3, sides)
        data, scales, _, _ = kernels.grid_quantize(torch.randn(rows, 300), layout, columnwise=False)
        operands.append(
            Side(data, scales.reshape(()) if sides == (None, None) else scales, layout.text)
        )
        high, wide = (side or size for side, size in zip(sides, (rows, 300), strict=True))
        spread = scales.double()[torch.arange(rows) // high][:, torch.arange(300) // wide]
        exact.append(data.view(E4M3).double() * spread)
    calls: list[torch.Size] = []
    mm = dense.mm
    monkeypatch.setattr(dense, "mm", lambda a, b: calls.append(a.shape) or mm(a, b))
    made = decoded_mm(*operands, None, F32, F32)
    torch.testing.assert_close(made, (exact[0] @ exact[1].t()).float(), rtol=1e-5, atol=1e-4)
    assert len(calls) == count
