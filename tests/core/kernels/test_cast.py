"""Casts against ml_dtypes for finite in-range values and against the scalar oracle for the rest,
byte for byte."""

from __future__ import annotations

import itertools
from functools import cache

import ml_dtypes
import numpy as np
import oracle
import pytest
import torch
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st

from ottava import kernels
from ottava.kernels.backends import use_backend

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def all_16_bit(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)


def hard_float32() -> torch.Tensor:
    """Every exponent with extreme mantissas, every tie between neighbouring data with both its
    neighbours, random."""
    exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
    mantissas = np.array(
        [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF], dtype=np.uint32
    )[None]
    patterns = [(exponents | mantissas).ravel()]
    for fmt in FP8:
        values = [oracle.decode(code, fmt) for code in range(0x7F)]
        finite = np.array([v for v in values if np.isfinite(v)], dtype=np.float64)
        ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
        both = np.concatenate([finite.astype(np.float32), ties]).view(np.uint32)
        patterns.append(np.concatenate([both, both + 1, np.maximum(both, 1) - 1]))
    patterns.append(np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32))
    positive = np.concatenate(patterns).astype(np.uint32)
    return torch.from_numpy(np.concatenate([positive, positive | 0x80000000]).view(np.float32))


def expected_codes(x: torch.Tensor, fmt: str) -> np.ndarray:
    """ml_dtypes within the format's range; the rule for NaN and saturation beyond."""
    values = x.to(torch.float32).numpy()
    finite = np.isfinite(values)
    clipped = np.clip(np.where(finite, values, 0.0), -oracle.MAX[fmt], oracle.MAX[fmt]).astype(
        np.float32
    )
    data = clipped.astype(ML_DTYPES[fmt]).view(np.uint8).copy()
    top = 0x7E if fmt == "e4m3" else 0x7B
    data[np.isposinf(values)] = top
    data[np.isneginf(values)] = top | 0x80
    data[np.isnan(values)] = 0x7F
    return data


@cache
def inputs(source: str) -> torch.Tensor:
    return hard_float32() if source == "float32" else all_16_bit(getattr(torch, source))


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_codes_equal_ml_dtypes_and_the_rule(code_path: str, fmt: str, source: str) -> None:
    x = inputs(source)
    assert_same(kernels.cast(x, torch.ones(()), FP8[fmt]), expected_codes(x, fmt), x)


@cache
def scalar_codes(source: str, fmt: str) -> list[int]:
    return [oracle.encode(value, fmt) for value in inputs(source)[::7].to(torch.float32).tolist()]


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_codes_equal_the_scalar_oracle(code_path: str, fmt: str, source: str) -> None:
    x = inputs(source)[::7]
    assert_same(kernels.cast(x, torch.ones(()), FP8[fmt]), scalar_codes(source, fmt), x)


@given(scale=st.floats(width=32, min_value=2**-100, max_value=2**100), seed=st.integers(0, 2**31))
def test_the_product_with_the_scale_is_rounded_to_float32_first(scale: float, seed: int) -> None:
    x = torch.randn(97, generator=torch.Generator().manual_seed(seed)) / scale * 100
    expected = [oracle.encode(oracle.float32(v * scale), "e4m3") for v in x.tolist()]
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            assert kernels.cast(x, torch.tensor(scale), FP8["e4m3"]).tolist() == expected


def test_every_shape_and_stride_equals_the_reference(code_path: str) -> None:
    shapes = [
        (0,),
        (1,),
        (),
        (3, 0),
        (0, 5),
        (7,),
        (3, 5),
        (17, 33),
        (64, 64),
        (65, 129),
        (2, 3, 41),
    ]
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16, torch.float16)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        tensors = [x] + ([x.transpose(0, 1), x.flip(0), x[..., ::2]] if x.dim() >= 2 else [])
        for i, tensor in enumerate(tensors):
            got = kernels.quantize(tensor, FP8["e4m3"], transposed=tensor.dim() > 0)
            with use_backend("reference"):
                expected = kernels.quantize(tensor, FP8["e4m3"], transposed=tensor.dim() > 0)
            assert_same(got, expected, note=(shape, dtype, i))


def test_transposes_move_bytes(code_path: str) -> None:
    for shape in [
        (1, 1),
        (16, 16),
        (31, 47),
        (64, 200),
        (129, 257),
        (300, 1),
        (1, 300),
        (0, 4),
        (4, 0),
    ]:
        data = torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
        )
        assert_same(kernels.transpose(data), data.t(), note=shape)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        data, transposed = kernels.cast_transpose(x, torch.tensor(3.0), FP8["e5m2"])
        assert_same(transposed, data.t(), note=shape)
        assert_same(data, kernels.cast(x, torch.tensor(3.0), FP8["e5m2"]), x, shape)


def test_decode_every_code(code_path: str, fmt: str) -> None:
    data = torch.arange(256, dtype=torch.uint8)
    values = torch.tensor([oracle.decode(code, fmt) for code in range(256)], dtype=torch.float32)
    factors = [None, *(torch.tensor(factor) for factor in (1.0, 0.1, 2.0**-20, 3e38))]
    for factor, dtype in itertools.product(factors, (torch.float32, torch.bfloat16, torch.float16)):
        expected = (values if factor is None else values * factor).to(dtype)
        assert_same(kernels.decode(data, factor, FP8[fmt], dtype), expected, data, (factor, dtype))


def test_threads_do_not_change_bytes(code_path: str) -> None:
    x = torch.randn(513, 517)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(kernels.quantize(x, FP8["e4m3"], transposed=True))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_same(result, results[0])
