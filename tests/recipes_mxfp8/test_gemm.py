"""Products of MXFP8 operands against float64 on the decoded ones, inside and beyond bfloat16's exponents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava import gemm_blocks
from ottava.gemm import gemm
from ottava.kernels import mx_ops
from ottava.kernels.backends import backend_module, use_backend
from ottava.tensors import Float8QuantizerBase, Float8Tensor
from ottava_mxfp8 import MXFP8Quantizer, MXFP8Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = {"fprop": ((96, 64), (80, 64)), "dgrad": ((96, 80), (80, 64)), "wgrad": ((96, 80), (96, 64))}
COLUMNWISE = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def values(codes: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype, columnwise: bool) -> torch.Tensor:
    """The operand in float64, from the definition of the format."""
    rows, columns = codes.shape
    factor = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float64)
    spread = factor[scales.long()].repeat_interleave(32, 0 if columnwise else 1)[:rows, :columns]
    return codes.view(fp8_dtype).double() * spread


def decoded(operand: Any, columnwise: bool) -> torch.Tensor:
    if not isinstance(operand, MXFP8Tensor):
        return operand.dequantize(torch.float64) if isinstance(operand, Float8Tensor) else operand.double()
    pair = operand.direction(columnwise=columnwise)
    assert pair is not None
    return values(*pair, operand._fp8_dtype, columnwise)


def expected(a: Any, b: Any, kind: str) -> torch.Tensor:
    left, right = (decoded(x, columnwise) for x, columnwise in zip((a, b), COLUMNWISE[kind], strict=True))
    return {"fprop": lambda: left @ right.t(), "dgrad": lambda: left @ right, "wgrad": lambda: left.t() @ right}[kind]()


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def bf16_product(a: Any, b: Any, kind: str) -> torch.Tensor:
    left, right = (decoded(x, c).bfloat16() for x, c in zip((a, b), COLUMNWISE[kind], strict=True))
    return {"fprop": lambda: left @ right.t(), "dgrad": lambda: left @ right, "wgrad": lambda: left.t() @ right}[kind]()


def operands(kind: str, fp8_dtype: torch.dtype = E4M3, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    quantizer = MXFP8Quantizer(fp8_dtype, **options)
    return tuple(quantizer(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES[kind])  # type: ignore[return-value]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_less_exact_than_a_bf16_product_of_the_same_operands(
    kind: str, fp8_dtype: torch.dtype, backend: str
) -> None:
    a, b = operands(kind, fp8_dtype)
    exact, theirs = expected(a, b, kind), bf16_product(a, b, kind)
    with use_backend(backend):
        narrow, wide = (gemm(a, b, kind, out_dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert narrow.dtype == torch.bfloat16
    assert relative_error(narrow, exact) <= relative_error(theirs, exact)
    assert relative_error(wide, exact) < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_sizes(data: Any) -> None:
    kind = data.draw(st.sampled_from(list(SHAPES)))
    m, n, k = (data.draw(st.integers(0, 70)) for _ in range(3))
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[kind]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    quantizer = MXFP8Quantizer(E4M3)
    a, b = (quantizer(torch.randn(shape, generator=generator)) for shape in shapes)
    got = gemm(a, b, kind, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), expected(a, b, kind), rtol=0, atol=1e-4)


def test_bias_out_and_accumulation() -> None:
    a, b = operands("fprop")
    bias = torch.randn(80)
    exact = expected(a, b, "fprop") + bias.double()
    assert relative_error(gemm(a, b, "fprop", out_dtype=torch.float32, bias=bias), exact) < 1e-6
    out = torch.ones(96, 80)
    assert gemm(a, b, "fprop", bias=bias, out=out, accumulate=True) is out
    assert relative_error(out, exact + 1) < 1e-6


class PerTensor(Float8QuantizerBase):
    def make(self, values: torch.Tensor, scale_inv: float) -> Any:
        codes = (values / scale_inv).clamp(-448, 448).to(E4M3).view(torch.uint8)
        return self.wrap(codes, None, torch.tensor(scale_inv), torch.bfloat16)

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return self.make(tensor, 1.0)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("other", ["dense", "per tensor"])
@pytest.mark.parametrize("beyond", [False, True])
def test_one_operand_of_another_kind(kind: str, other: str, beyond: bool) -> None:
    """A scale of another recipe is applied once, also to lines that are computed again."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(shape, generator=generator) for shape in SHAPES[kind])
    if beyond:
        # The other operand brings the lines that are computed again back into range.
        x[:33] *= 2.0**-128
        y *= 2.0**100
    block = MXFP8Quantizer(E4M3)(x)
    plain = y.bfloat16() if other == "dense" else PerTensor(E4M3).make(y, 0.3 * 2.0 ** (100 if beyond else 0))
    exact = expected(block, plain, kind)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        got = gemm(block, plain, kind, out_dtype=dtype)
        assert torch.isfinite(got).all()
        for line, theirs in zip(got, exact, strict=True):
            assert theirs.norm() > 2.0**-100
            assert relative_error(line, theirs) < bound


def test_bias_on_lines_that_are_computed_again() -> None:
    x, y, bias = torch.randn(40, 64), torch.randn(70, 64), torch.randn(70)
    x[3] *= 2.0**-130
    y[[5, 66]] *= 2.0**-130
    a, b = MXFP8Quantizer(E4M3)(x), MXFP8Quantizer(E4M3)(y)
    exact = expected(a, b, "fprop") + bias.double()
    assert relative_error(gemm(a, b, "fprop", out_dtype=torch.float32, bias=bias), exact) < 1e-6
    assert relative_error(gemm(a, b, "fprop", bias=bias), exact) < 2.0**-8


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("exponents", [(125, -120), (-120, 122)])
def test_another_kind_of_scale_brings_the_product_back(kind: str, exponents: tuple[int, int]) -> None:
    """Before the scale of a whole tensor is applied, the product is far beyond float32."""
    generator = torch.Generator().manual_seed(5)
    x, y = (1 + torch.rand(shape, generator=generator) for shape in SHAPES[kind])
    block = MXFP8Quantizer(E4M3)(x * 2.0 ** exponents[0])
    plain = PerTensor(E4M3).make(y * 2.0 ** exponents[1], 2.0 ** (exponents[1] - 7))
    for a, b, name in ((block, plain, kind), (plain, block, kind)):
        if a is plain and kind != "fprop":
            continue
        exact = expected(a, b, name)
        for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)):
            assert relative_error(gemm(a, b, name, out_dtype=dtype), exact) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_into_a_product(dtype: torch.dtype) -> None:
    x, y = torch.randn(96, 64) * 2.0**12, torch.randn(80, 64) * 2.0**12
    dense = torch.randn(80, 64)
    quantizer = MXFP8Quantizer(E4M3)
    a, b = quantizer(x), quantizer(y)
    outside = [gemm(a, other, "fprop", out_dtype=torch.float32) for other in (b, dense)]
    with torch.autocast("cpu", dtype=dtype):
        inside = [gemm(a, other, "fprop", out_dtype=torch.float32) for other in (b, dense)]
    for mine, theirs in zip(inside, outside, strict=True):
        assert torch.equal(mine, theirs)


def test_a_backward_pass_inside_autocast() -> None:
    torch.manual_seed(0)
    layer = ottava.nn.Linear(64, 48, recipe="mxfp8")
    grads = []
    for inside in (False, True):
        layer.zero_grad()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = (layer(x) * 2.0**14).square().sum()
        with torch.autocast("cpu", dtype=torch.float16, enabled=inside):
            loss.backward()
        grads.append((x.grad, layer.weight.grad))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


# What puts an operand beyond bfloat16's range. Every one of them decodes to infinity, zero or a subnormal somewhere.
EXTREMES = {
    "near the top": lambda x: x.sign() * 3.3e38,
    "infinite": lambda x: torch.where(x > 1.5, float("inf"), x),
    "near the bottom": lambda x: x * 2.0**-130,
    "subnormal": lambda x: x * 2.0**-140,
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("part", ["all", "some rows", "a column", "one element"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_values_beyond_bfloat16(kind: str, extreme: str, part: str, backend: str) -> None:
    """The other operand brings the products back into range: they are then as exact as any."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(shape, generator=generator) for shape in SHAPES[kind])
    where = {"all": ..., "some rows": slice(5, 40), "a column": (slice(None), 3), "one element": (4, 9)}[part]
    x[where] = EXTREMES[extreme](x[where])
    y *= 2.0 ** (-125 if extreme in ("near the top", "infinite") else 120)
    quantizer = MXFP8Quantizer(E4M3)
    for swapped in (False, True):
        if swapped and kind != "fprop":
            # The operands of the other GEMMs are not of one kind: theirs is the other's test.
            continue
        a, b = (quantizer(y), quantizer(x)) if swapped else (quantizer(x), quantizer(y))
        exact = expected(a, b, kind)
        info = torch.finfo(torch.float32)
        assert exact.isfinite().all()
        with use_backend(backend):
            wide = gemm(a, b, kind, out_dtype=torch.float32)
            narrow = gemm(a, b, kind, out_dtype=torch.bfloat16)
        usual = exact.abs() < info.max
        assert torch.equal(wide.isinf(), ~usual)
        # Each row by itself: a large one must not hide a small one.
        for got, bound in ((wide, 1e-6), (narrow, 2.0**-7)):
            for line, theirs, good in zip(got, exact, usual, strict=True):
                if good.all() and theirs.norm() > 2.0**-100:
                    assert relative_error(line, theirs) < bound, (extreme, part, swapped)


def test_opposite_extremes_in_one_row() -> None:
    """Products of the largest with the smallest values are one; the decoded float32 values alone would lose both."""
    a, b = torch.zeros(32, 64), torch.zeros(32, 64)
    a[0, 0], a[0, 32] = 3.3e38, 2.0**-140
    b[0, 0], b[0, 32] = 2.0**-128, 2.0**125
    quantizer = MXFP8Quantizer(E4M3)
    qa, qb = quantizer(a), quantizer(b)
    exact = expected(qa, qb, "fprop")
    assert 0.5 < exact[0, 0] < 2
    got = gemm(qa, qb, "fprop", out_dtype=torch.float32)
    assert relative_error(got, exact) < 1e-6


def test_zeros_and_padding_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of zeros have the smallest scale there is; nothing in them is beyond any range."""
    calls: list[int] = []
    original = mx_ops.mx_decode_exact
    monkeypatch.setattr(mx_ops, "mx_decode_exact", lambda *args: calls.append(1) or original(*args))
    x, y = torch.randn(96, 64), torch.randn(80, 64)
    x[:40] = 0
    y[:, 32:] = -0.0
    quantizer = MXFP8Quantizer(E4M3)
    gemm(quantizer(x), quantizer(y), "fprop")
    assert not calls
    gemm(quantizer(x * 2.0**-130), quantizer(y), "fprop")
    assert calls


def test_nan_stays_in_its_lines() -> None:
    x, y = torch.randn(96, 64), torch.randn(80, 64)
    x[7, 5] = float("nan")
    x[9] *= 2.0**-135
    got = gemm(MXFP8Quantizer(E4M3)(x), MXFP8Quantizer(E4M3)(y), "fprop", out_dtype=torch.float32)
    assert got[7].isnan().all()
    assert not got[torch.arange(96) != 7].isnan().any()


@pytest.mark.parametrize("kind", SHAPES)
def test_compiled_products_equal_eager_ones(kind: str) -> None:
    a, b = operands(kind)
    tiny = MXFP8Quantizer(E4M3)(torch.randn(SHAPES[kind][0]) * 2.0**-130)
    compiled = torch.compile(lambda x, y: gemm(x, y, kind), fullgraph=True, backend="aot_eager")
    for left in (a, tiny):
        assert torch.equal(compiled(left, b), gemm(left, b, kind))


# -- backends that keep what the decoding found on the device: this one stands in for them, from the documentation --


class Flagged:
    """A backend with ``mx_decode_flagged`` and ``mx_exact_lines``, and nothing that answers the host."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.flags: list[torch.Tensor] = []

    def epilogue(self, *args: Any) -> None:
        self.backend.epilogue(*args)

    def mx_decode_flagged(
        self, codes: Any, scales: Any, fp8_dtype: Any, out: torch.Tensor, columnwise: bool, flag: torch.Tensor
    ) -> None:
        assert codes.is_contiguous()
        assert scales.is_contiguous()
        assert flag.dtype == torch.int32
        assert flag.numel() == 1
        exact = values(codes, scales, fp8_dtype, columnwise)
        self.backend.mx_decode_out(codes, scales, fp8_dtype, out, columnwise)
        far = ((scales > 0) & (scales < 64)) | (scales > 190)
        flag.bitwise_or_(self.beyond(exact).any().int() | (2 * far.any().int()))

    @staticmethod
    def beyond(exact: torch.Tensor) -> torch.Tensor:
        magnitude = exact.abs()
        return (magnitude != 0) & magnitude.isfinite() & ~((magnitude >= 2.0**-126) & (magnitude < 2.0**128))

    def mx_exact_lines(
        self,
        result: torch.Tensor,
        a: Any,
        b: Any,
        transpose_a: bool,
        transpose_b: bool,
        scale_a: Any,
        scale_b: Any,
        bias: Any,
        flags: torch.Tensor,
    ) -> None:
        matrices = []
        for (data, blocks, fp8_dtype, columnwise), transposed in ((a, transpose_a), (b, transpose_b)):
            assert data.is_contiguous()
            exact = data.double() if blocks is None else values(data, blocks, fp8_dtype, columnwise)
            matrices.append(exact.t() if transposed else exact)
        assert result.is_contiguous()
        assert flags.dtype == torch.int32
        assert flags.shape == (2,)
        self.flags.append(flags)
        left, right = matrices
        if scale_a is None and scale_b is None:
            rows = self.beyond(left).any(1) & ((flags[0] & 1) != 0)
            columns = self.beyond(right).any(0) & ((flags[1] & 1) != 0)
            again = rows.unsqueeze(1) | columns
        else:
            again = ((flags[0] | flags[1]) != 0).expand(result.shape)
        product = left @ right
        for factor in (scale_a, scale_b):
            product = product if factor is None else product * factor.double()
        product = product if bias is None else product + bias.double()
        result.copy_(torch.where(again, product.float().to(result.dtype), result))


class NoLook(TorchDispatchMode):
    """Refuses whatever makes a device wait until the host has looked at a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "masked_select"), name
        return func(*args, **(kwargs or {}))


@pytest.fixture
def flagged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flagged]:
    """The backend, whose products are checked against those of the one that it stands on."""
    made = Flagged(backend_module("cpu"))
    original = mx_ops._mx_scaled_mm

    def both(*args: Any) -> torch.Tensor:
        expected = original(*args)
        with monkeypatch.context() as patch, NoLook():
            patch.setattr(mx_ops, "backend_module", lambda kind: made)
            got = original(*args)
        assert got.dtype == expected.dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        return got

    monkeypatch.setattr(mx_ops, "_mx_scaled_mm", both)
    yield made
    assert made.flags


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("extreme", [None, *EXTREMES])
@pytest.mark.parametrize("part", ["all", "some rows", "a column", "one element"])
def test_flags_that_stay_on_the_device(flagged: Flagged, kind: str, extreme: str | None, part: str) -> None:
    generator = torch.Generator().manual_seed(11)
    x, y = (torch.randn(shape, generator=generator) for shape in SHAPES[kind])
    where = {"all": ..., "some rows": slice(5, 40), "a column": (slice(None), 3), "one element": (4, 9)}[part]
    if extreme is not None:
        x[where] = EXTREMES[extreme](x[where])
        y[50, 2] = 2.0**-130
    x[17, 11] = float("nan")
    quantizer = MXFP8Quantizer(E4M3)
    plain = [y.bfloat16(), PerTensor(E4M3).make(y, 0.3)]
    columns = gemm(x, y, kind).shape[1]  # type: ignore[arg-type]
    for a, b in [(quantizer(x), other) for other in (quantizer(y), *plain)] + [
        (other, quantizer(x)) for other in plain
    ]:
        if a.shape != x.shape or b.shape != y.shape:
            continue
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for bias in (None, torch.randn(columns, generator=generator).bfloat16()):
                gemm(a, b, kind, out_dtype=dtype, bias=bias)  # type: ignore[arg-type]
    raised = [int(flags.max()) for flags in flagged.flags]
    if extreme is None:
        assert not any(raised)
    elif extreme in ("near the top", "infinite") and part in ("all", "some rows"):
        assert any(found & 1 for found in raised)


@pytest.mark.parametrize("exponent", [-90, 90])
def test_flags_of_scales_that_are_far_from_one(flagged: Flagged, exponent: int) -> None:
    """All values are normal, and only a product whose scale is still missing is computed again."""
    x, y = torch.randn(40, 64) * 2.0**exponent, torch.randn(48, 64)
    a = MXFP8Quantizer(E4M3)(x)
    for b in (MXFP8Quantizer(E4M3)(y), PerTensor(E4M3).make(y, 0.3), y.bfloat16()):
        for dtype in (torch.float32, torch.bfloat16):
            gemm(a, b, "fprop", out_dtype=dtype)
    assert {int(flags.max()) for flags in flagged.flags} == {2}


def test_flags_of_ragged_and_empty_operands(flagged: Flagged) -> None:
    quantizer = MXFP8Quantizer(E5M2)
    for m, n, k in ((33, 1, 70), (1, 65, 31), (0, 4, 5), (4, 0, 5), (4, 5, 0)):
        for kind, shapes in (("fprop", ((m, k), (n, k))), ("dgrad", ((m, n), (n, k))), ("wgrad", ((m, n), (m, k)))):
            a, b = (quantizer(torch.randn(shape) * scale) for shape, scale in zip(shapes, (2.0**-135, 1), strict=True))
            gemm(a, b, kind, out_dtype=torch.float32)  # type: ignore[arg-type]
    assert len(flagged.flags) == 15


# -- hardware that multiplies blocks: torch's function is replaced by one that does what its documentation says --


def unswizzled(flat: torch.Tensor, outer: int, blocks: int) -> torch.Tensor:
    """Scales [outer, blocks] from the library's layout, one by one by the documented offsets."""
    across = -(-blocks // 4)
    result = torch.empty(outer, blocks, dtype=torch.uint8)
    for r in range(outer):
        for c in range(blocks):
            tile = (r // 128) * across + c // 4
            result[r, c] = flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]
    return result


class BlockHardware:
    """Stands in for torch.nn.functional.scaled_mm, and insists on what it insists on."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, a: Any, b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any, **options: Any) -> Any:
        functional = torch.nn.functional
        assert recipe_a == recipe_b == functional.ScalingType.BlockWise1x32
        assert options["swizzle_a"] == options["swizzle_b"] == functional.SwizzleType.SWIZZLE_32_4_4
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[1] == b.shape[0]
        assert a.shape[1] % 32 == a.shape[0] % 16 == b.shape[1] % 16 == 0
        dense = []
        for codes, scales in ((a, scale_a), (b.t(), scale_b)):
            assert scales.dtype == torch.float8_e8m0fnu
            assert scales.is_contiguous()
            outer, blocks = codes.shape[0], codes.shape[1] // 32
            assert scales.numel() == -(-outer // 128) * 128 * (-(-blocks // 4) * 4)
            plain = unswizzled(scales.view(torch.uint8), outer, blocks)
            dense.append(values(codes.view(torch.uint8), plain, codes.dtype, False))
        self.calls.append({"scales": (scale_a, scale_b)} | options)
        return (dense[0] @ dense[1].t()).to(options["output_dtype"])


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> BlockHardware:
    made = BlockHardware()
    monkeypatch.setattr(gemm_blocks, "multiplies_blocks", lambda operand: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", made)
    return made


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("sizes", [(96, 80, 64), (129, 31, 193), (1, 1, 1), (33, 260, 40)])
@pytest.mark.parametrize("bias", [False, True])
def test_block_hardware_gets_padded_lines_and_swizzled_scales(
    hardware: BlockHardware, kind: str, sizes: tuple[int, int, int], bias: bool
) -> None:
    m, n, k = sizes
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[kind]
    generator = torch.Generator().manual_seed(1)
    # Every block has a scale of its own, so that none can stand in for another.
    spread = [torch.exp(2 * torch.randn(shape, generator=generator)) for shape in shapes]
    a, b = (MXFP8Quantizer(E4M3)(s * torch.randn(s.shape, generator=generator)) for s in spread)
    exact = expected(a, b, kind)
    offset = torch.randn(exact.shape[1], generator=generator) if bias else None
    for dtype in (torch.float32, torch.bfloat16):
        got = gemm(a, b, kind, out_dtype=dtype, bias=offset, use_split_accumulator=kind != "fprop")
        wanted = (exact if offset is None else exact.float() + offset).to(dtype)
        assert got.dtype == dtype
        assert got.is_contiguous()
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert all(call["use_fast_accum"] == (kind == "fprop") for call in hardware.calls)


def test_two_e5m2_operands_are_decoded(hardware: BlockHardware) -> None:
    a, b = operands("fprop", E5M2)
    assert relative_error(gemm(a, b, "fprop", out_dtype=torch.float32), expected(a, b, "fprop")) < 1e-6
    assert not hardware.calls
    gemm(a, operands("fprop")[1], "fprop")
    assert len(hardware.calls) == 1


def test_what_the_hardware_wants_is_made_once(hardware: BlockHardware) -> None:
    weight = MXFP8Quantizer(E4M3)(torch.randn(64, 96))
    x = [MXFP8Quantizer(E4M3)(torch.randn(32, 96)) for _ in range(3)]
    for operand in x[:2]:
        gemm(operand, weight, "fprop")
    first, second = (call["scales"][1] for call in hardware.calls)
    assert first is second or first.data_ptr() == second.data_ptr()
    # A write makes it anew: through the tensor, through a view of it, and below both.
    writes = [
        lambda: weight.copy_(torch.randn(64, 96)),
        lambda: weight[32:].copy_(torch.randn(32, 96)),
        lambda: weight._rowwise_scale_inv.add_(1),
        lambda: weight._rowwise_data.zero_(),
    ]
    for write in writes:
        write()
        got = gemm(x[2], weight, "fprop", out_dtype=torch.float32)
        torch.testing.assert_close(got, expected(x[2], weight, "fprop").float(), rtol=1e-6, atol=1e-6)


def test_a_layer_on_block_hardware(hardware: BlockHardware) -> None:
    torch.manual_seed(0)
    layer = ottava.nn.Linear(72, 40, recipe="mxfp8")
    x = torch.randn(5, 7, 72, requires_grad=True)
    layer(x).square().sum().backward()
    assert len(hardware.calls) == 3
    grads, x.grad = (x.grad, layer.weight.grad), None
    layer.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_blocks, "multiplies_blocks", lambda operand: False)
        layer(x).square().sum().backward()
    for mine, theirs in zip(grads, (x.grad, layer.weight.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_no_hardware_is_asked_on_a_cpu() -> None:
    assert not gemm_blocks.multiplies_blocks(torch.ones(1))
