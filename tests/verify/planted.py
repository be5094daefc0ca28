"""Quantizers as people write them in plain PyTorch, each with one wrong turn.

They share no code with the package: elements come from torch's own conversions, or from a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

Tensor = torch.Tensor
E4M3, E5M2, BF16, F16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16
#: Numbers of E2M1 by their codes.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Planted(NamedTuple):
    """A function with a wrong turn, the contract that it is meant to have, and the name of the
    turn; empty for a function without one."""

    turn: str
    function: Callable[[Tensor], tuple[Tensor, ...]]
    recipe: str


def divide(number: float, by: Tensor) -> Tensor:
    """A quotient that is rounded once."""
    return torch.div(torch.full_like(by, number), by)


def amaxes(x: Tensor, block: int | None) -> Tensor:
    """The amax of each block of a row, or of the whole matrix, which is finite."""
    if block is None:
        return x.abs().max().view(1, 1)
    return x.view(x.shape[0], -1, block).abs().amax(2)


def spread(scale: Tensor, x: Tensor) -> Tensor:
    return scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)


def cast(x: Tensor, dtype: torch.dtype = E4M3, largest: float = 448.0) -> Tensor:
    """Elements of eight bits, saturating."""
    return x.clamp(-largest, largest).to(dtype)


def fp8(
    x: Tensor,
    *,
    scales: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, scale, inverse: x * scale,
    elements: Callable[[Tensor], Tensor] = cast,
    source: torch.dtype = torch.float32,
    amax: Callable[[Tensor], Tensor] = lambda x: amaxes(x, None),
    largest: float = 448.0,
) -> tuple[Tensor, Tensor]:
    """One scale for the tensor: `current`."""
    values = x.to(source).float()
    scale = divide(largest, amax(values))
    inverse = divide(1.0, scale)
    if scales is not None:
        scale, inverse = scales(amax(values))
    return elements(product(values, scale, inverse)), inverse


def inverse_quotient(amax: Tensor) -> tuple[Tensor, Tensor]:
    inverse = amax / torch.full_like(amax, 448.0)
    return divide(1.0, inverse), inverse


def inverse_product(amax: Tensor) -> tuple[Tensor, Tensor]:
    inverse = amax * torch.tensor(1 / 448)
    return divide(1.0, inverse), inverse


def reciprocal(amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = divide(1.0, amax) * 448.0
    return scale, divide(1.0, scale)


def chosen(amax: Tensor) -> tuple[Tensor, Tensor]:
    """As an observer of the least error chooses: some amaxes are made smaller."""
    factor = torch.where(amax.view(torch.int32) % 2 == 0, 0.83, 0.94)
    inverse = divide(1.0, divide(448.0, amax * factor))
    return divide(1.0, inverse), inverse


def epsilon_added(amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = divide(448.0, amax + 1e-4)
    return scale, divide(1.0, scale)


def rounded_scale(dtype: torch.dtype, amax: Tensor) -> tuple[Tensor, Tensor]:
    inverse = divide(1.0, divide(448.0, amax)).to(dtype).float()
    return divide(1.0, inverse), inverse


def not_inverted(x: Tensor) -> tuple[Tensor, Tensor]:
    data, _ = fp8(x)
    return data, divide(448.0, amaxes(x.float(), None))


def towards_zero(x: Tensor) -> Tensor:
    """E4M3 by truncation, of normal and subnormal numbers."""
    limited = x.clamp(-448, 448)
    unit = torch.exp2(torch.floor(torch.log2(limited.abs().clamp(min=2.0**-6))) - 3)
    return (torch.trunc(limited / unit) * unit).to(E4M3)


def mx(
    x: Tensor,
    *,
    rule: str = "floor",
    size: int = 32,
    bias: int = 127,
    off: int = 0,
    elements: Callable[[Tensor], Tensor] = cast,
    largest: float = 448.0,
    values: Callable[[Tensor], Tensor] = lambda x: x.float(),
) -> tuple[Tensor, Tensor]:
    """Powers of two for blocks of 32: `mxfp8`, whose rule is "up"."""
    x = values(x)
    amax = amaxes(x, size)
    ratio = (amax / largest).double()
    exponents = {
        "floor": torch.floor(torch.log2(amax.double())) - math.floor(math.log2(largest)),
        "up": torch.ceil(torch.log2((amax * torch.tensor(1 / largest)).double())),
        "nearest": torch.round(torch.log2(ratio)),
        "ceiling": torch.ceil(torch.log2(amax.double())) - math.floor(math.log2(largest)),
        "above": torch.floor(torch.log2((amax * torch.tensor(1 / largest)).double())) + 1,
    }[rule] + off
    data = elements(x * spread(torch.exp2(-exponents).float(), x))
    return data, (exponents + bias).to(torch.uint8)


def fp4(x: Tensor, ties: str = "even") -> Tensor:
    """Codes of E2M1."""
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    low = torch.bucketize(x.abs(), middles)
    high = torch.bucketize(x.abs(), middles, right=True)
    places = {"even": torch.where(low % 2 == 0, low, high), "away": high}[ties]
    return (places | (x.signbit().long() << 3)).to(torch.uint8)


def packed(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def nvfp4(
    x: Tensor,
    *,
    bound: float = 448.0,
    pack: Callable[[Tensor], Tensor] = packed,
    block: Callable[[Tensor, Tensor], Tensor] | None = None,
    level: Callable[[Tensor], Tensor] = lambda amax: divide(2688.0, amax),
    unrounded: bool = False,
    codes: Callable[[Tensor], Tensor] = fp4,
    largest: float = 6.0,
    zero: float | None = None,
    given: Callable[[Tensor, Tensor], tuple[Tensor, ...]] = lambda amax, scale: (amax,),
) -> tuple[Tensor, ...]:
    """Scales in E4M3 for blocks of 16, and one for the tensor: `nvfp4`."""
    x = x.float()
    amax = x.abs().max()
    scale = divide(bound * 6, amax) if bound != 448.0 else level(amax)
    of_blocks = amaxes(x, 16)
    exact = of_blocks * (scale * torch.tensor(1 / largest))
    if block is not None:
        exact = block(of_blocks, scale)
    stored = exact.clamp(max=448).to(E4M3)
    number = exact.clamp(max=448) if unrounded else stored.float()
    multiplier = divide(1.0, number * divide(1.0, scale))
    multiplier = multiplier.clamp(max=torch.finfo().max)
    if zero is not None:
        multiplier = torch.where(stored.float() == 0, zero, multiplier)
    return pack(codes(x * spread(multiplier, x))), stored, *given(amax, scale)


def swapped(codes: Tensor) -> Tensor:
    return codes[:, 1::2] | codes[:, ::2] << 4


def in_halves(codes: Tensor) -> Tensor:
    half = codes.shape[1] // 2
    return codes[:, :half] | codes[:, half:] << 4


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = mx(x, rule="up")
    return data, scales.t().contiguous()


def padded(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = mx(x, rule="up")
    rows, columns = scales.shape
    return data, torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))


def swizzled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles of 128 x 4 as cuBLAS reads them: row r, column c is at 16 (r % 32) + 4 (r / 32) + c."""
    data, scales = padded(x)
    rows, columns = scales.shape
    result = torch.empty(rows * columns, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (columns // 4) + c // 4
            result[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    return data, result


def as_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = mx(x, rule="up")
    return data, torch.exp2(scales.float() - 127)


def without_negative_zero(x: Tensor) -> Tensor:
    data = cast(x)
    return torch.where(
        data.float() == 0, torch.zeros((), dtype=torch.uint8), data.view(torch.uint8)
    )


def flushed(x: Tensor) -> Tensor:
    data = cast(x).view(torch.uint8)
    return torch.where((data & 0x7F) < 8, data & 0x80, data)


def through_bf16(x: Tensor, scale: Tensor, inverse: Tensor) -> Tensor:
    return (x * scale).to(BF16).float()


PLANTED = [
    Planted("", fp8, "current"),
    Planted("", partial(mx, rule="up"), "mxfp8"),
    Planted("", nvfp4, "nvfp4"),
    Planted("reciprocal", partial(fp8, scales=reciprocal), "current"),
    Planted("inverse-quotient", partial(fp8, scales=inverse_quotient), "current"),
    Planted("inverse-product", partial(fp8, scales=inverse_product), "current"),
    Planted("added-0.0001", partial(fp8, scales=epsilon_added), "current"),
    Planted("scale-bfloat16", partial(fp8, scales=partial(rounded_scale, BF16)), "current"),
    Planted("scale-float16", partial(fp8, scales=partial(rounded_scale, F16)), "current"),
    Planted("scales-chosen", partial(fp8, scales=chosen), "current"),
    Planted("divided", partial(fp8, product=lambda x, scale, inverse: x / inverse), "current"),
    Planted("product-bfloat16", partial(fp8, product=through_bf16), "current"),
    Planted("source-bfloat16", partial(fp8, source=BF16), "current"),
    Planted("source-float16", partial(fp8, source=F16), "current"),
    Planted("multiplier-stored", not_inverted, "current"),
    Planted("truncated", partial(fp8, elements=towards_zero), "current"),
    Planted("flushed", partial(fp8, elements=flushed), "current"),
    Planted("zero-unsigned", partial(fp8, elements=without_negative_zero), "current"),
    Planted("scale-240", partial(fp8, largest=240.0), "current"),
    Planted("amax-signed", partial(fp8, amax=lambda x: x.max().view(1, 1)), "current"),
    Planted("via-e5m2", partial(fp8, elements=lambda x: cast(cast(x, E5M2).float())), "current"),
    Planted("scale-floor", mx, "mxfp8"),
    Planted("scale-nearest", partial(mx, rule="nearest"), "mxfp8"),
    Planted("scale-ceiling", partial(mx, rule="ceiling"), "mxfp8"),
    Planted("scale-above", partial(mx, rule="above"), "mxfp8"),
    Planted("exponent-1", partial(mx, rule="up", off=1), "mxfp8"),
    Planted("exponent--1", partial(mx, rule="up", off=-1), "mxfp8"),
    Planted("bias-128", partial(mx, rule="up", bias=128), "mxfp8"),
    Planted("block-16", partial(mx, rule="up", size=16), "mxfp8"),
    Planted("block-64", partial(mx, rule="up", size=64), "mxfp8"),
    Planted("maximum-240", partial(mx, rule="up", largest=240.0), "mxfp8"),
    Planted("scales-transposed", turned, "mxfp8"),
    Planted("scales-padded", padded, "mxfp8"),
    Planted("scales-swizzled", swizzled, "mxfp8"),
    Planted("scales-as-numbers", as_numbers, "mxfp8"),
    Planted("nibbles", partial(nvfp4, pack=swapped), "nvfp4"),
    Planted("one-in-a-byte", partial(nvfp4, pack=lambda codes: codes), "nvfp4"),
    Planted("halves", partial(nvfp4, pack=in_halves), "nvfp4"),
    Planted("global-256", partial(nvfp4, bound=256.0), "nvfp4"),
    Planted("global-240", partial(nvfp4, bound=240.0), "nvfp4"),
    Planted("level-scale", partial(nvfp4, given=lambda amax, scale: (scale,)), "nvfp4"),
    Planted(
        "level-inverse", partial(nvfp4, given=lambda amax, scale: (divide(1, scale),)), "nvfp4"
    ),
    Planted("level-missing", partial(nvfp4, given=lambda amax, scale: ()), "nvfp4"),
    Planted("block-zero", partial(nvfp4, zero=0.0), "nvfp4"),
    Planted(
        "block-product",
        partial(nvfp4, block=lambda amax, scale: amax * torch.tensor(1 / 6) * scale),
        "nvfp4",
    ),
    Planted(
        "global-reciprocal", partial(nvfp4, level=lambda amax: 2688 * divide(1, amax)), "nvfp4"
    ),
    Planted("block-unrounded", partial(nvfp4, unrounded=True), "nvfp4"),
    Planted("ties-away", partial(nvfp4, codes=partial(fp4, ties="away")), "nvfp4"),
    Planted("scale-4", partial(nvfp4, largest=4.0), "nvfp4"),
    Planted("block-divided", partial(nvfp4, block=lambda amax, scale: amax / 6 * scale), "nvfp4"),
    Planted(
        "block-divided-last", partial(nvfp4, block=lambda amax, scale: amax * scale / 6), "nvfp4"
    ),
    Planted(
        "global-inverted",
        partial(nvfp4, block=lambda amax, scale: amax * (divide(1, scale) * torch.tensor(1 / 6))),
        "nvfp4",
    ),
]
