"""What the tests of products share: operands, and the product of what they decode to, in
float64."""

from __future__ import annotations

from typing import Any

import torch

from ottava.tensors import Float8QuantizerBase, Float8Tensor
from ottava_mxfp8 import MXFP8Quantizer, MXFP8Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = {
    "fprop": ((96, 64), (80, 64)),
    "dgrad": ((96, 80), (80, 64)),
    "wgrad": ((96, 80), (96, 64)),
}
COLUMNWISE = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def values(
    data: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype, columnwise: bool
) -> torch.Tensor:
    """The operand in float64, from the definition of the format."""
    rows, columns = data.shape
    factor = torch.tensor(
        [2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float64
    )
    spread = factor[scales.long()].repeat_interleave(32, 0 if columnwise else 1)[:rows, :columns]
    return data.view(fp8_dtype).double() * spread


def decoded(operand: Any, columnwise: bool) -> torch.Tensor:
    if not isinstance(operand, MXFP8Tensor):
        return (
            operand.dequantize(torch.float64)
            if isinstance(operand, Float8Tensor)
            else operand.double()
        )
    pair = operand.direction(columnwise=columnwise)
    assert pair is not None
    return values(*pair, operand._fp8_dtype, columnwise)


def expected(a: Any, b: Any, kind: str) -> torch.Tensor:
    left, right = (
        decoded(x, columnwise) for x, columnwise in zip((a, b), COLUMNWISE[kind], strict=True)
    )
    return {
        "fprop": lambda: left @ right.t(),
        "dgrad": lambda: left @ right,
        "wgrad": lambda: left.t() @ right,
    }[kind]()


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def bf16_product(a: Any, b: Any, kind: str) -> torch.Tensor:
    left, right = (decoded(x, c).bfloat16() for x, c in zip((a, b), COLUMNWISE[kind], strict=True))
    return {
        "fprop": lambda: left @ right.t(),
        "dgrad": lambda: left @ right,
        "wgrad": lambda: left.t() @ right,
    }[kind]()


def operands(
    kind: str, fp8_dtype: torch.dtype = E4M3, seed: int = 0, **options: Any
) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    quantizer = MXFP8Quantizer(fp8_dtype, **options)
    return tuple(  # type: ignore[return-value]
        quantizer(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES[kind]
    )


class PerTensor(Float8QuantizerBase):
    def make(self, values: torch.Tensor, scale_inv: float) -> Any:
        data = (values / scale_inv).clamp(-448, 448).to(E4M3).view(torch.uint8)
        return self.wrap(data, None, torch.tensor(scale_inv), torch.bfloat16)

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return self.make(tensor, 1.0)
