"""The last step of a product on every path: scales and bias in float32, and one rounding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ottava.kernels.backends import backend_module
from tests import samples
from tests.comparing import assert_same
from tests.core.placing import at, is_alone, junk, running_on

Tensor = torch.Tensor
SCALE_A, SCALE_B = torch.tensor([0.37]), torch.tensor(3.0e-4)


def epilogue32(*arguments: Any) -> None:
    backend_module("cpu").epilogue32(*arguments)


def expected(sums: Tensor, a: Tensor | None, b: Tensor | None, bias: Tensor | None) -> Tensor:
    """The float32 before the one rounding."""
    factors = [np.float32(1 if scale is None else scale.item()) for scale in (a, b)]
    with np.errstate(all="ignore"):
        values = sums.numpy() * (factors[0] * factors[1])
        if bias is not None:
            values = values + bias.float().numpy()
    return torch.from_numpy(values)


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_bytes(code_path: str, dtype: torch.dtype) -> None:
    for shape in [(33, 1000), (40, 513), (1, 8), (64, 1), (0, 32), (3, 0)]:
        sums = samples.tiles(*shape, seed=3)
        biases = [None, *(samples.tiles(shape[1], dtype=d) for d in samples.DTYPES)]
        cases = itertools.product((SCALE_A, None), (SCALE_B, None), biases)
        for i, (a, b, bias) in enumerate(cases):
            out = junk(shape, dtype, (0, 1, 8)[i % 3])
            own_bias = None if bias is None else at(bias, i % 2)
            epilogue32(at(sums, (0, 1, 4)[i % 3]), a, b, own_bias, out)
            assert_same(out, expected(sums, a, b, bias).to(dtype), sums, (shape, i))
            assert is_alone(out)


def test_rounding_is_to_nearest_even(code_path: str) -> None:
    """Every upper half of float32, with the lower bits that decide."""
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    step = 3 if code_path == "grid" else 1
    upper = torch.arange(0, 0x10000, step, dtype=torch.int64) << 16
    values = (upper.unsqueeze(1) | low).to(torch.int32).view(torch.float32)
    for dtype in samples.DTYPES:
        out = torch.empty(values.shape, dtype=dtype)
        epilogue32(values.clone(), None, torch.tensor(1.0), None, out)
        assert_same(out, values.to(dtype), values)


def test_in_place_by_many_threads(code_path: str) -> None:
    """On a CPU a float32 result takes the place of the sums; the bias may be strided."""
    sums, scale = samples.wide(700, 130), torch.tensor(0.7)
    bias = samples.wide(260)[::2]
    for threads in (1, 2):
        own = sums.clone()
        with running_on(threads):
            epilogue32(own, scale, None, bias, own)
        assert_same(own, expected(sums, scale, None, bias))
