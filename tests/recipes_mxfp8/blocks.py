"""What the tests of MXFP8 tensors share: values, quantizers of every kind, and comparisons to the
last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ottava_mxfp8 import MXFP8Quantizer, MXFP8Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
KINDS = ("both", "rowwise", "columnwise", "square")
# Squares of which one direction is held can give the other: they are held to the boundaries of
# both.
VIEW_KINDS = (*KINDS, "square rows", "square columns")
SHAPES = [(), (1,), (5,), (70,), (0,), (0, 7), (7, 0), (1, 1), (33, 70), (2, 31, 65)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Op = Callable[[torch.Tensor], Any]


def wide(shape: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Magnitudes so far apart that rows and columns of blocks keep different values."""
    random = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(10 * torch.randn(tuple(shape), generator=random)).clamp(1e-30, 1e30)
    return (torch.randn(tuple(shape), generator=random).sign() * magnitudes).to(dtype)


def quantizer(
    kind: str = "both", fp8_dtype: torch.dtype = E4M3, rounding: str = "up"
) -> MXFP8Quantizer:
    return MXFP8Quantizer(
        fp8_dtype,
        rowwise=kind not in ("columnwise", "square columns"),
        columnwise=kind not in ("rowwise", "square rows"),
        with_2d_quantization=kind.startswith("square"),
        scale_rounding=rounding,
    )


def inner(q: Any) -> list[torch.Tensor | None]:
    return [getattr(q, name) for name in INNER]


def check_bytes(q: Any, expected: Any) -> None:
    """Codes and scales are those of ``expected``, a quantized tensor or their list."""
    wanted = expected if isinstance(expected, list) else inner(expected)
    for name, mine, theirs in zip(INNER, inner(q), wanted, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            assert mine.shape == theirs.shape, name
            assert torch.equal(mine, theirs), name


def check_same(one: torch.Tensor, two: torch.Tensor) -> None:
    """Equal bit for bit, the sign of zero included."""
    assert not isinstance(one, MXFP8Tensor)
    assert not isinstance(two, MXFP8Tensor)
    assert (one.shape, one.dtype) == (two.shape, two.dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    assert torch.equal(one.contiguous().view(bits), two.contiguous().view(bits))


def values_of(result: torch.Tensor) -> torch.Tensor:
    return result.dequantize() if isinstance(result, MXFP8Tensor) else result


def decoded(q: Any, columnwise: bool) -> torch.Tensor:
    """The values of one direction in float64, by torch's own conversions."""
    data, scales = (q._columnwise_data, q._columnwise_scale_inv) if columnwise else inner(q)[:2]
    columns = data.shape[-1] if data.dim() else 1
    matrix = (
        data.contiguous().view(q._fp8_dtype).double().reshape(math.prod(data.shape[:-1]), columns)
    )
    powers = torch.where(scales == 255, math.nan, torch.exp2(scales.double() - 127))
    side = 0 if columnwise else 1
    powers = powers.repeat_interleave(32, side).narrow(side, 0, matrix.shape[side])
    return (matrix * powers).reshape(data.shape)
