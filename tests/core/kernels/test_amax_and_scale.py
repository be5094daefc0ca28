"""amax and scales against a scalar oracle, byte for byte."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import oracle
import pytest
import torch
from comparing import assert_same

from ottava import kernels
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def amaxes() -> list[float]:
    fixed = [
        0.0,
        math.inf,
        math.nan,
        448.0,
        57344.0,
        1.0,
        3e38,
        2.0**-149,
        2.0**-127,
        2.0**-126,
        1e-40,
        1e-38,
    ]
    bits = np.random.default_rng(5).integers(0, 0x7F800000, 3000, dtype=np.uint32).view(np.float32)
    return fixed + bits.tolist()


@cache
def expected_scales(fmt: str, epsilon: float, pow_2: bool) -> list[torch.Tensor]:
    pairs = [oracle.scale_from_amax(v, oracle.MAX[fmt], epsilon, pow_2) for v in amaxes()]
    return [torch.tensor(values) for values in zip(*pairs, strict=True)]


def test_scales_equal_the_scalar_oracle(code_path: str) -> None:
    amax = torch.tensor(amaxes())
    for fmt, epsilon, pow_2 in itertools.product(FP8, (0.0, 1e-12, 1e-3, 1e-42), (False, True)):
        found = kernels.scale_from_amax(amax, FP8[fmt], epsilon, pow_2)
        assert_same(found, expected_scales(fmt, epsilon, pow_2), amax, (fmt, epsilon, pow_2))


SPECIAL: list[tuple[list[float], float]] = [
    ([], 0.0),
    ([math.nan, math.nan], 0.0),
    ([math.nan, -3.0, 2.0], 3.0),
    ([-math.inf, 1.0], math.inf),
    ([-0.0, 0.0], 0.0),
    ([2.0**-24, -(2.0**-23)], 2.0**-23),
]


def test_amax_special_values(code_path: str) -> None:
    for dtype, (values, expected) in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), SPECIAL
    ):
        assert_same(
            kernels.amax(torch.tensor(values, dtype=dtype)),
            torch.tensor(expected),
            note=(dtype, values),
        )


def test_amax_finds_the_largest_anywhere(code_path: str) -> None:
    for n in (1, 15, 16, 17, 63, 64, 65, 1000, 4097, 100_003):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for position in {0, n // 2, n - 1}:
                x = torch.full((n,), 0.5, dtype=dtype)
                x[position] = -7.0
                assert kernels.amax(x).item() == 7.0, (n, dtype, position)


@pytest.mark.parametrize("call", ["amax", "quantize", "cast"])
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.complex64, torch.float64, torch.bool, torch.uint8]
)
def test_other_dtypes_are_refused(call: str, dtype: torch.dtype) -> None:
    x = torch.zeros(4, dtype=dtype)
    with pytest.raises(DTypeError, match=str(dtype)):
        if call == "amax":
            kernels.amax(x)
        elif call == "quantize":
            kernels.quantize(x, FP8["e4m3"])
        else:
            kernels.cast(x, torch.ones(()), FP8["e4m3"])


def test_bad_arguments_are_refused() -> None:
    x = torch.zeros(4)
    with pytest.raises(DTypeError, match="float8"):
        kernels.quantize(x, torch.float16)
    for epsilon in (-1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="epsilon"):
            kernels.quantize(x, FP8["e4m3"], epsilon)
    with pytest.raises(ShapeError, match="one element"):
        kernels.cast(x, torch.ones(2), FP8["e4m3"])
    with pytest.raises(DeviceError, match="meta"):
        kernels.cast(x, torch.ones((), device="meta"), FP8["e4m3"])
    with pytest.raises(DTypeError, match="sparse"):
        kernels.amax(x.to_sparse())
    with pytest.raises(ShapeError):
        kernels.transpose(torch.zeros((), dtype=torch.uint8))
    with pytest.raises(DTypeError):
        kernels.decode(x, None, FP8["e4m3"], torch.float32)
