"""Scales of MX blocks against the scalar oracle: every bfloat16, hard float32 values, by hand; any
shape."""

from __future__ import annotations

import itertools
import math
from functools import cache

import mx_oracle
import numpy as np
import oracle
import pytest
import torch
from comparing import assert_same
from mx_arrays import (
    DTYPES,
    FP8,
    ROUNDINGS,
    array_scales,
    by_arrays,
    by_scalars,
    check_four,
    mx,
    sample,
)

from ottava import kernels

RULES = list(itertools.product(FP8, ROUNDINGS))


@cache
def every_bfloat16_scale(fmt: str, scale_rounding: str) -> list[int]:
    amaxes = (
        torch.arange(65536, dtype=torch.int32)
        .to(torch.uint16)
        .view(torch.bfloat16)
        .float()
        .tolist()
    )
    return [mx_oracle.scale_code(abs(amax), fmt, scale_rounding) for amax in amaxes]


def test_scales_of_every_bfloat16(code_path: str) -> None:
    """An amax has no sign; one that has is taken for its magnitude, NaN of either sign included."""
    amax = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    for rule in RULES:
        scale, got = kernels.grid_scales(amax, mx(FP8[rule[0]], rounding=rule[1]))
        assert scale is None
        assert got.dtype == torch.uint8
        assert_same(got, every_bfloat16_scale(*rule), amax, rule)


@cache
def hard_amaxes() -> torch.Tensor:
    """Every exponent with extreme mantissas; neighbours of each power of two, plain and times a
    maximum; random."""
    exponents = np.arange(256, dtype=np.int64)[:, None] << 23
    mantissas = [
        0,
        1,
        2,
        3,
        0x1FFFFF,
        0x3FFFFF,
        0x400000,
        0x400001,
        0x5FFFFF,
        0x600000,
        0x600001,
        0x7FFFFE,
        0x7FFFFF,
    ]
    patterns = [(exponents | np.array(mantissas)).ravel()]
    for fraction in (1.0, 1.75, 2 / 1.75):  # a maximum is 1.75 times a power of two
        scaled = (
            np.ldexp(np.float64(fraction), np.arange(-150, 128)).astype(np.float32).view(np.uint32)
        )
        patterns.append(
            (scaled.astype(np.int64)[:, None] + np.arange(-3, 4)).ravel().clip(0, 0x7F800000)
        )
    random = np.random.default_rng(0)
    patterns.append(random.integers(0, 0x7F800001, 3_000))
    patterns.append(random.integers(0, 24 << 23, 2_000))  # whose products are subnormal, or nearly
    return torch.from_numpy(np.concatenate(patterns).astype(np.uint32).view(np.float32))


@cache
def hard_scales(fmt: str, scale_rounding: str) -> list[int]:
    return [mx_oracle.scale_code(amax, fmt, scale_rounding) for amax in hard_amaxes().tolist()]


def test_scales_of_hard_float32(code_path: str) -> None:
    for rule in RULES:
        _, got = kernels.grid_scales(hard_amaxes(), mx(FP8[rule[0]], rounding=rule[1]))
        assert_same(got, hard_scales(*rule), hard_amaxes(), rule)


def test_scales_that_the_rules_name(code_path: str) -> None:
    """Each line was worked out by hand."""
    cases = [
        ("e4m3", "up", 0.0, 0),
        ("e4m3", "up", math.inf, 254),
        ("e4m3", "up", math.nan, 255),
        ("e4m3", "up", 448 * 2.0**-127, 0),  # the product is 2^-127, the smallest scale
        ("e4m3", "up", 449 * 2.0**-127, 1),
        ("e4m3", "up", 448 * 2.0**-126, 1),
        ("e4m3", "up", 1e-45, 0),  # the product underflows
        ("e4m3", "up", oracle.FLOAT32_MAX, 247),  # 2^128 / 448 is between 2^119 and 2^120
        ("e4m3", "up", 1.0, 119),  # 1 / 448 is between 2^-9 and 2^-8
        ("e5m2", "up", 1.0, 112),
        ("e5m2", "up", 57344.0 * 1.01, 128),
        ("e4m3", "floor", 0.0, 0),
        ("e4m3", "floor", math.inf, 254),
        ("e4m3", "floor", math.nan, 255),
        ("e4m3", "floor", 1.0, 119),
        ("e4m3", "floor", 511.0, 127),
        ("e4m3", "floor", 2.0**-119, 0),
        ("e4m3", "floor", 2.0**-118, 1),
        ("e4m3", "floor", 1e-45, 0),
        ("e5m2", "floor", 1.0, 112),
        ("e5m2", "floor", oracle.FLOAT32_MAX, 239),
    ]
    for fmt, scale_rounding, amax, code in cases:
        assert mx_oracle.scale_code(oracle.float32(amax), fmt, scale_rounding) == code
        _, got = kernels.grid_scales(torch.tensor(amax), mx(FP8[fmt], rounding=scale_rounding))
        assert got.item() == code, (fmt, scale_rounding, amax)


def test_scales_keep_the_shape(code_path: str) -> None:
    for shape, (fmt, scale_rounding) in itertools.product(
        [(), (0,), (3, 0), (5, 7), (2, 3, 4)], RULES
    ):
        amax = sample(shape, "float32").abs()
        for tensor in [amax] + ([amax.transpose(0, -1), amax[..., ::2]] if amax.dim() else []):
            _, got = kernels.grid_scales(tensor, mx(FP8[fmt], rounding=scale_rounding))
            expected = [
                mx_oracle.scale_code(v, fmt, scale_rounding) for v in tensor.flatten().tolist()
            ]
            assert got.shape == tensor.shape
            assert got.is_contiguous()
            assert_same(got.flatten(), expected, tensor.flatten(), (shape, fmt, scale_rounding))


@pytest.mark.parametrize(("fmt", "scale_rounding"), RULES)
def test_both_oracles_agree(fmt: str, scale_rounding: str) -> None:
    got = array_scales(hard_amaxes().numpy(), fmt, scale_rounding)
    assert_same(got, hard_scales(fmt, scale_rounding), hard_amaxes())
    for shape, dtype in zip([(70, 45), (33, 1), (0, 5)], DTYPES, strict=True):
        x = sample(shape, dtype, 3)
        for square in (False, True):
            arrays = by_arrays(x, fmt, scale_rounding, square)
            check_four(
                arrays, by_scalars(x, fmt, scale_rounding, square), (shape, dtype, square), x
            )
