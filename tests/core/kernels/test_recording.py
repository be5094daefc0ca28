"""cast_amax and update_scales: bytes against the separate kernels and a scalar oracle, on every code path."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ottava import kernels
from ottava.formats import fp8_format
from tests.core.conftest import FP8_DTYPES

FLOAT32_MAX = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 448.0, 449.0, -57344.0, 57345.0, 1e-45, -1e30]


def oracle(scale: list[float], history: list[list[float]], maximum: list[float], most_recent: bool) -> None:
    """One update, slot by slot, as the numerics page states it; float32 rounding by numpy."""
    length = len(history)
    for slot in range(len(scale)):
        last = history[0][slot]
        if last == 0:
            continue
        amax = last
        if not most_recent:
            for row in range(1, length):
                if history[row][slot] > amax:
                    amax = history[row][slot]
        for row in range(length - 1):
            history[row][slot] = history[row + 1][slot]
        history[length - 1][slot] = last
        history[0][slot] = 0.0
        if math.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                quotient = float(np.float32(maximum[slot]) / np.float32(amax))
            scale[slot] = FLOAT32_MAX if math.isinf(quotient) else quotient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 5), (3, 0), (63,), (65, 17), (130, 1030), (2, 3, 5), (64, 1024)])
def test_one_pass_equals_its_parts(code_path: str, fmt: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    fp8 = FP8_DTYPES[fmt]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 30
    flat = x.view(-1)
    flat[: len(SPECIAL)] = torch.tensor(SPECIAL)[: flat.numel()]
    x = x.to(dtype)
    for factor in (1.0, 13.7, -2.0, 0.0, 1e-30, math.inf, math.nan):
        scale, amax, saturated = torch.tensor([factor]), torch.tensor([0.5]), torch.tensor([7])
        transposed = x.dim() > 0
        data, transpose, scale_inv = kernels.cast_amax(x, scale, amax, fp8, saturated=saturated, transposed=transposed)
        assert torch.equal(data, kernels.cast(x, scale, fp8))
        if transposed:
            assert torch.equal(transpose, kernels.transpose(data))
        assert amax.item() == max(0.5, kernels.amax(x).item())
        beyond = (x.float() * factor).abs() > fp8_format(fp8).max
        assert saturated.item() == 7 + int(beyond.sum())
        expected = torch.tensor(1.0) / torch.tensor(factor)
        assert torch.equal(scale_inv, expected) or (scale_inv.isnan() and expected.isnan())


def test_strided_input_and_no_counter(code_path: str) -> None:
    x = torch.randn(70, 33).t()
    amax = torch.zeros(())
    data, transpose, _ = kernels.cast_amax(x, torch.tensor(2.0), amax, torch.float8_e4m3fn, transposed=True)
    assert torch.equal(data, kernels.cast(x.contiguous(), torch.tensor(2.0), torch.float8_e4m3fn))
    assert torch.equal(transpose, data.t())
    assert amax == x.abs().max()


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length", [1, 2, 16, 1024])
def test_two_hundred_steps(code_path: str, length: int, most_recent: bool) -> None:
    random = np.random.default_rng(length + most_recent)
    counts = [3, 1, 5]
    scales = [torch.ones(n) for n in counts]
    histories = [torch.zeros(length, n) for n in counts]
    maxima = [random.choice([448.0, 57344.0, 28672.0], n).tolist() for n in counts]
    mine = [(s.tolist(), h.tolist(), m) for s, h, m in zip(scales, histories, maxima, strict=True)]
    for step in range(200):
        use_last = step % 3 == 0
        planted = []
        for (_, kept, _), history in zip(mine, histories, strict=True):
            amaxes = np.exp(random.normal(0, 3, history.shape[1])).astype(np.float32)
            chance = random.random(history.shape[1])
            amaxes[chance < 0.1] = 0.0
            amaxes[(chance > 0.1) & (chance < 0.15)] *= np.float32(1e6)
            amaxes[(chance > 0.15) & (chance < 0.18)] = np.inf
            amaxes[(chance > 0.18) & (chance < 0.21)] = np.nan
            amaxes[(chance > 0.21) & (chance < 0.24)] = np.float32(1e-42)
            kept[0] = amaxes.tolist()
            history[0] = torch.zeros(len(amaxes)) if use_last else torch.from_numpy(amaxes)
            planted.append(torch.from_numpy(amaxes))
        last = torch.cat(planted) if use_last else None
        if use_last:
            # What stands in the first rows is not read.
            for history, amaxes in zip(histories, planted, strict=True):
                history[0] = torch.where(amaxes == 0, 0.0, 123.0)
        kernels.update_scales(scales, histories, [m for row in maxima for m in row], most_recent=most_recent, last=last)
        for (scale, kept, maximum), got, history in zip(mine, scales, histories, strict=True):
            oracle(scale, kept, maximum, most_recent)
            assert got.numpy().tobytes() == np.array(scale, np.float32).tobytes(), step
            expected = np.array(kept, np.float32)
            same = (history.numpy() == expected) | (np.isnan(history.numpy()) & np.isnan(expected))
            assert same.all(), step


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(width=32, min_value=0.0), min_size=1, max_size=30), st.integers(1, 5), st.booleans())
def test_any_amaxes(code_path: str, amaxes: list[float], length: int, most_recent: bool) -> None:
    scale, history = torch.ones(1), torch.zeros(length, 1)
    mine = (scale.tolist(), history.tolist(), [448.0])
    for amax in amaxes:
        history[0] = amax
        mine[1][0][0] = amax
        kernels.update_scales([scale], [history], [448.0], most_recent=most_recent)
        oracle(*mine, most_recent)
        assert scale.tolist() == mine[0]
        assert history.tolist() == mine[1]
