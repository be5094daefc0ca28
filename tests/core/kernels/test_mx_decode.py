"""Decoding MX blocks: every code with every scale, any shape and stride; and gfloat, another
implementation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from comparing import assert_same
from mx_arrays import (
    DTYPES,
    FP8,
    ML_DTYPES,
    PAIRS,
    check_decoded,
    mx,
    random_blocks,
    sample,
    scale_shapes,
)

from ottava import kernels

DECODED = [*DTYPES, "float64"]


def check(shape: tuple[int, ...], fmt: str, dtype: str, columnwise: bool, seed: int = 0) -> None:
    codes, scales = random_blocks(shape, columnwise, seed)
    got = kernels.grid_decode(
        codes, scales, mx(FP8[fmt]), getattr(torch, dtype), columnwise=columnwise
    )
    check_decoded(got, codes, scales, fmt, dtype, columnwise)


def test_every_code_with_every_scale(on_every_path: Callable[..., None]) -> None:
    line = torch.arange(256, dtype=torch.uint8)
    tables = [
        (line.expand(256, 256).contiguous(), line[:, None].expand(256, 8).contiguous()),
        (line[:, None].expand(256, 256).contiguous(), line.expand(8, 256).contiguous()),
    ]

    def run() -> None:
        for (turn, fmt), (other_turn, dtype) in itertools.product(
            enumerate(FP8), enumerate(DECODED)
        ):
            # Every dtype meets both directions, each with another format.
            columnwise = (turn + other_turn) % 2 == 1
            codes, scales = tables[columnwise]
            got = kernels.grid_decode(
                codes, scales, mx(FP8[fmt]), getattr(torch, dtype), columnwise=columnwise
            )
            check_decoded(got, codes, scales, fmt, dtype, columnwise)

    on_every_path(run)


@pytest.mark.parametrize("dtype", DECODED)
def test_decoding_equals_float64_arithmetic(code_path: str, fmt: str, dtype: str) -> None:
    """Element and power of two are exact in float64, so is their product; a cast of numpy or
    ml_dtypes rounds it.

    ml_dtypes rounds to bfloat16 by way of float32, in which all products but those that overflow
    are exact.
    """
    codes = torch.arange(256, dtype=torch.uint8).expand(255, 256).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 8).contiguous()
    values = np.arange(256, dtype=np.uint8).view(ML_DTYPES[fmt]).astype(np.float64)
    with np.errstate(over="ignore"):
        product = values[None] * np.exp2(np.arange(255) - 127.0)[:, None]
        expected = product.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(
            np.float64
        )
    got = kernels.grid_decode(codes, scales, mx(FP8[fmt]), getattr(torch, dtype)).double().numpy()
    assert_same(got, expected, codes)


SHAPES = [
    (),
    (0,),
    (1,),
    (5,),
    (0, 5),
    (3, 0),
    (5, 0, 7),
    (31, 33),
    (33, 31),
    (65, 97),
    (2, 3, 41),
    (40, 2050),
    (1, 5001),
]


@pytest.mark.parametrize("columnwise", [False, True])
def test_decoding_any_shape(code_path: str, columnwise: bool) -> None:
    for shape, fmt, dtype in itertools.product(SHAPES, FP8, DECODED):
        check(shape, fmt, dtype, columnwise)


def test_decoding_every_size_up_to_97(code_path: str) -> None:
    choices = list(itertools.product(DTYPES, FP8, (False, True)))
    for number, shape in enumerate(PAIRS):
        dtype, fmt, columnwise = choices[number * 5 % len(choices)]
        check(shape, fmt, dtype, columnwise, number)


LARGE = [
    ((64, 65536), "bfloat16", "e4m3", False),
    ((64, 65536), "bfloat16", "e5m2", True),
    ((1025, 2111), "float32", "e4m3", True),
    ((1025, 2111), "float16", "e5m2", False),
]


@pytest.mark.parametrize(("shape", "dtype", "fmt", "columnwise"), LARGE, ids=str)
def test_decoding_large_matrices(
    on_every_isa: Callable[..., None],
    shape: tuple[int, int],
    dtype: str,
    fmt: str,
    columnwise: bool,
) -> None:
    """Past what is written around the caches, which only the compiled CPU kernels do."""
    on_every_isa(lambda: check(shape, fmt, dtype, columnwise))


@pytest.mark.parametrize("columnwise", [False, True])
def test_decoding_any_strides(code_path: str, fmt: str, columnwise: bool) -> None:
    codes, scales = random_blocks((67, 75), columnwise)
    turned = random_blocks((75, 67), not columnwise, 1)
    spaced = [torch.stack([t, t + 1], -1)[..., 0] for t in (codes, scales)]
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (codes, scales)]
    constant = torch.tensor(130, dtype=torch.uint8).expand(scale_shapes((67, 75))[int(columnwise)])
    cases = [(turned[0].t(), turned[1].t()), spaced, shifted, (codes[:1].expand(67, 75), constant)]
    for data, blocks in cases:
        got = kernels.grid_decode(data, blocks, mx(FP8[fmt]), torch.bfloat16, columnwise=columnwise)
        check_decoded(got, data, blocks, fmt, "bfloat16", columnwise)


@pytest.mark.parametrize("columnwise", [False, True])
def test_what_blocks_hold_survives_a_second_quantization(
    code_path: str, fmt: str, columnwise: bool
) -> None:
    """Decoded blocks are quantized to the same values again: the element of the amax cannot
    grow."""
    x = sample((70, 97), "float32").nan_to_num(1.0, 1.0, 1.0).clamp(-(2.0**100), 2.0**100)
    first = kernels.grid_quantize(x, mx(FP8[fmt]))[2 * columnwise :][:2]
    values = kernels.grid_decode(*first, mx(FP8[fmt]), torch.float32, columnwise=columnwise)
    second = kernels.grid_quantize(values, mx(FP8[fmt]))[2 * columnwise :][:2]
    again = kernels.grid_decode(*second, mx(FP8[fmt]), torch.float32, columnwise=columnwise)
    assert torch.equal(values, again)


# Another implementation


def gfloat_cases() -> Iterator[np.ndarray]:
    """Finite blocks: of one magnitude, of many, with zeros, of powers of two, close below them."""
    random = np.random.default_rng(5)
    for number in range(60):
        x = random.standard_normal(32) * np.exp(random.normal(0, (0.0, 2.0, 12.0)[number % 3]))
        if number % 2:
            x = x * random.lognormal(0, 4, 32)
        if number % 5 == 0:
            x[random.random(32) < 0.4] = 0.0
        if number % 7 == 0:
            x = np.exp2(np.round(np.log2(np.abs(x) + 1e-3)))
        x = x.astype(np.float32)
        yield np.nextafter(x, np.float32(0)) if number % 11 == 0 else x
    yield np.zeros(32, np.float32)
    yield np.linspace(400, 511, 32, dtype=np.float32)
    yield np.linspace(50000, 65535, 32, dtype=np.float32)


def test_the_floor_rule_equals_gfloat(code_path: str, fmt: str) -> None:
    """Decoded values, block by block.

    gfloat's ``compute_scale_amax`` is the floor rule; both its formats saturate in
    ``quantize_block``, as ours do, so amaxes between the largest element and the next power of two
    are compared too. Not compared: NaN, infinities, and scales at the ends of the range, for which
    gfloat has other rules. It computes in float64, which is given to it.
    """
    info = getattr(gfloat.formats, f"format_info_mxfp8_{fmt}")
    blocks = np.stack(list(gfloat_cases()))
    codes, scales, _, _ = kernels.grid_quantize(
        torch.from_numpy(blocks), mx(FP8[fmt], rounding="floor"), columnwise=False
    )
    got = kernels.grid_decode(codes, scales, mx(FP8[fmt]), torch.float32).numpy()
    saturated = 0
    for block, mine in zip(blocks, got, strict=True):
        theirs = gfloat.quantize_block(info, block.astype(np.float64), gfloat.compute_scale_amax)
        np.testing.assert_array_equal(mine.astype(np.float64), theirs)
        np.testing.assert_array_equal(np.signbit(mine), np.signbit(theirs))
        saturated += bool(np.abs(theirs).max() < np.abs(block).max() * 15 / 16)
    assert saturated > 0  # some blocks are beyond the largest element


def test_elements_under_the_up_rule_equal_gfloat(code_path: str, fmt: str) -> None:
    """gfloat does not have this rule for scales; its elements are compared under our scales."""
    info = getattr(gfloat.formats, f"format_info_mxfp8_{fmt}")
    blocks = np.stack(list(gfloat_cases()))
    codes, scales, _, _ = kernels.grid_quantize(
        torch.from_numpy(blocks), mx(FP8[fmt]), columnwise=False
    )
    got = kernels.grid_decode(codes, scales, mx(FP8[fmt]), torch.float32).numpy()
    for block, mine, scale in zip(blocks, got, scales.flatten().tolist(), strict=True):
        ours = 2.0 ** (scale - 127)
        theirs = gfloat.quantize_block(info, block.astype(np.float64), lambda *_, s=ours: s)
        np.testing.assert_array_equal(mine.astype(np.float64), theirs)
