"""Products on backends that keep what the decoding found on the device: this one stands in, from the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.gemm import gemm
from ottava.kernels import mx_ops
from ottava.kernels.backends import backend_module
from ottava_mxfp8 import MXFP8Quantizer
from tests.cases import told
from tests.recipes_mxfp8.products import (
    E4M3,
    E5M2,
    EXTREMES,
    PARTS,
    SHAPES,
    PerTensor,
    values,
)


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
def test_flags_that_stay_on_the_device(flagged: Flagged, kind: str, extreme: str | None) -> None:
    # Where nothing is extreme there are no parts.
    for part in ["all"] if extreme is None else PARTS:
        with told(part):
            check_flags(flagged, kind, extreme, part)


def check_flags(flagged: Flagged, kind: str, extreme: str | None, part: str) -> None:
    flagged.flags.clear()
    generator = torch.Generator().manual_seed(11)
    x, y = (torch.randn(shape, generator=generator) for shape in SHAPES[kind])
    if extreme is not None:
        x[PARTS[part]] = EXTREMES[extreme](x[PARTS[part]])
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
        bias = torch.randn(columns, generator=generator).bfloat16()
        for dtype, given in ((torch.float32, None), (torch.bfloat16, bias), (torch.float16, bias)):
            gemm(a, b, kind, out_dtype=dtype, bias=given)  # type: ignore[arg-type]
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
