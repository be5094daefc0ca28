"""The last step of a product on every path: scales and bias in float32, one rounding, the bytes of
torch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from placing import at, junk, same_bytes, sample, surroundings_kept

from ottava.kernels.backends import backend_module

Tensor = torch.Tensor
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(32, 512), (33, 1000), (40, 513), (1, 8), (97, 31), (64, 1)]


def epilogue32(*arguments: Any) -> None:
    backend_module("cpu").epilogue32(*arguments)


def finished(
    acc: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The float32 before the one rounding."""
    values, one = acc.float().numpy(), np.float32(1)
    a, b = (one if s is None else s.float().numpy().reshape(()) for s in (scale_a, scale_b))
    with np.errstate(all="ignore"):
        values = values * (a * b)
        if bias is not None:
            values = values + bias.float().numpy()
    assert values.dtype == np.float32
    return torch.from_numpy(values)


def one_nan(values: Tensor) -> Tensor:
    """NaN as the one NaN: which of them torch gives depends on the machine, and on the element's
    place."""
    return torch.where(values.isnan(), torch.full_like(values, math.nan), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_of_torch(code_path: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    acc = sample(shape, torch.float32, 3)
    scale = torch.tensor([0.37]), torch.tensor(3.0e-4)
    biases = [None, *(sample((1, shape[1]), d, 4).view(-1) for d in DTYPES)]
    for i, (a, b, bias) in enumerate(itertools.product((scale[0], None), (scale[1], None), biases)):
        out = junk(shape, dtype, (0, 1, 8)[i % 3])
        epilogue32(
            at(acc, (0, 0, 1, 4)[i % 4]), a, b, None if bias is None else at(bias, i % 2), out
        )
        expected = one_nan(finished(acc, a, b, bias).to(dtype))
        # The reference is torch's operations.
        assert same_bytes(one_nan(out) if code_path == "reference" else out, expected), i
        assert surroundings_kept(out)


def test_rounding_is_to_nearest_even(code_path: str) -> None:
    """Of the bits of float32 that decide."""
    top = torch.arange(0x10000, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (top.unsqueeze(1) | low).to(torch.int32)
    values = bits.view(torch.float32)
    for dtype in DTYPES:
        out = torch.empty(values.shape, dtype=dtype)
        epilogue32(values.clone(), None, torch.tensor(1.0), None, out)
        assert same_bytes(one_nan(out), one_nan(values.to(dtype))), dtype


def test_the_last_step_rounds_once(code_path: str) -> None:
    """The product is a float32 before the bias is added, and their sum is rounded from there."""
    acc = torch.tensor([[1 + 2.0**-8, 3.0, 1 + 2.0**-23]])
    bias = torch.tensor([2.0**-20, -1.0, -1.0])
    out = torch.empty(1, 3, dtype=torch.bfloat16)
    epilogue32(acc, torch.tensor(1.0), None, bias, out)
    assert out.tolist() == [[1 + 2.0**-7, 2.0, 2.0**-23]]
    exact = torch.empty(1, 3)
    epilogue32(acc, torch.tensor(1 + 2.0**-23), None, bias, exact)
    assert exact[0, 2] == 2.0**-22  # a fused multiply-add would keep 2^-46


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)], ids=str)
def test_nothing_to_do(code_path: str, shape: tuple[int, int]) -> None:
    epilogue32(
        torch.empty(shape), torch.tensor(2.0), None, torch.empty(shape[1]), torch.empty(shape)
    )


def test_in_place_and_by_many_threads(code_path: str) -> None:
    """On a CPU a float32 result takes the place of the sums."""
    acc, bias, scale = (
        sample((700, 130), torch.float32, 5),
        torch.randn(260)[::2],
        torch.tensor(0.7),
    )
    expected = one_nan(finished(acc, scale, None, bias))
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            made = acc.clone()
            epilogue32(made, scale, None, bias, made)
        finally:
            torch.set_num_threads(before)
        assert same_bytes(one_nan(made), expected)
