"""cast_amax and update_scales: bytes against the separate kernels and a scalar oracle, on every
code path."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from comparing import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ottava import kernels
from ottava.formats import fp8_format
from ottava.kernels import table
from tests.core.conftest import FP8_DTYPES

FLOAT32_MAX = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 448.0, 449.0, -57344.0, 57345.0, 1e-45, -1e30]


def oracle(
    scale: list[float], history: list[list[float]], maximum: list[float], most_recent: bool
) -> None:
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


SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (1,),
    (0, 5),
    (3, 0),
    (63,),
    (65, 17),
    (2, 3, 5),
    (40, 1030),
]
FACTORS = [1.0, 13.7, -2.0, 0.0, 1e-30, math.inf, math.nan]


def check_one_pass(shape: tuple[int, ...], dtype: torch.dtype, fmt: str, factor: float) -> None:
    fp8 = FP8_DTYPES[fmt]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 30
    flat = x.view(-1)
    flat[: len(SPECIAL)] = torch.tensor(SPECIAL)[: flat.numel()]
    x, note = x.to(dtype), (shape, dtype, fmt, factor)
    scale, amax, saturated = torch.tensor([factor]), torch.tensor([0.5]), torch.tensor([7])
    transposed = x.dim() > 0
    data, transpose, scale_inv = kernels.cast_amax(
        x, scale, amax, fp8, saturated=saturated, transposed=transposed
    )
    assert_same(data, kernels.cast(x, scale, fp8), x, note)
    if transposed:
        assert_same(transpose, kernels.transpose(data), note=note)
    assert amax.item() == max(0.5, kernels.amax(x).item()), note
    beyond = (x.float() * factor).abs() > fp8_format(fp8).max
    assert saturated.item() == 7 + int(beyond.sum()), note
    assert_same(scale_inv.reshape(()), torch.tensor(1.0) / torch.tensor(factor), note=note)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_pass_equals_its_parts(code_path: str, dtype: torch.dtype) -> None:
    for shape, fmt in itertools.product(SHAPES, FP8_DTYPES):
        large = math.prod(shape) > 2000
        for factor in (13.7, math.nan) if large else FACTORS:
            check_one_pass(shape, dtype, fmt, factor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_written_but_what_was_seen(code_path: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 300
    amax, saturated, scale_inv = torch.tensor(0.5), torch.tensor(7), torch.tensor(0.0)
    recorded = x, torch.tensor(3.0), amax, saturated, torch.float8_e4m3fn
    table.cast_amax.into([None, None, scale_inv], *recorded, False, False)
    assert amax.item() == max(0.5, kernels.amax(x).item())
    assert saturated.item() == 7 + int(((x * 3).abs() > 448).sum())
    assert_same(scale_inv, torch.tensor(1.0) / torch.tensor(3.0))


def test_strided_input_and_no_counter(code_path: str) -> None:
    x = torch.randn(70, 33).t()
    amax = torch.zeros(())
    data, transpose, _ = kernels.cast_amax(
        x, torch.tensor(2.0), amax, torch.float8_e4m3fn, transposed=True
    )
    assert torch.equal(data, kernels.cast(x.contiguous(), torch.tensor(2.0), torch.float8_e4m3fn))
    assert torch.equal(transpose, data.t())
    assert amax == x.abs().max()


COUNTS = [3, 1, 5]
# First rows of the histories, what is given as ``last`` in their place, and what the state is to be
# after the update.
Step = tuple[list[torch.Tensor], torch.Tensor | None, list[np.ndarray], list[np.ndarray]]


def planted(random: np.random.Generator, count: int) -> np.ndarray:
    amaxes = np.exp(random.normal(0, 3, count)).astype(np.float32)
    chance = random.random(count)
    amaxes[chance < 0.1] = 0.0
    amaxes[(chance > 0.1) & (chance < 0.15)] *= np.float32(1e6)
    amaxes[(chance > 0.15) & (chance < 0.18)] = np.inf
    amaxes[(chance > 0.18) & (chance < 0.21)] = np.nan
    amaxes[(chance > 0.21) & (chance < 0.24)] = np.float32(1e-42)
    return amaxes


def steps_of(
    length: int, most_recent: bool, steps: int
) -> tuple[list[np.ndarray], list[list[float]], list[Step]]:
    """The first histories, the formats' maxima, and the steps with their results by the oracle."""
    random = np.random.default_rng(length + most_recent)
    maxima = [random.choice([448.0, 57344.0, 28672.0], n).tolist() for n in COUNTS]
    # A long history is full from the start, so that few steps look at all of it.
    first = [
        np.nan_to_num(planted(random, length * n)).reshape(length, n) * np.float32(length > 100)
        for n in COUNTS
    ]
    scales, histories = [[1.0] * n for n in COUNTS], [h.tolist() for h in first]
    made: list[Step] = []
    for step in range(steps):
        rows = [planted(random, n) for n in COUNTS]
        last = torch.from_numpy(np.concatenate(rows)) if step % 3 == 0 else None
        # What stands in the first rows is not read where the last amaxes are given.
        heads = [
            torch.from_numpy(row if last is None else np.where(row == 0, row, np.float32(123)))
            for row in rows
        ]
        for scale, history, row, maximum in zip(scales, histories, rows, maxima, strict=True):
            history[0] = row.tolist()
            oracle(scale, history, maximum, most_recent)
        made.append(
            (heads, last, [np.float32(s) for s in scales], [np.float32(h) for h in histories])
        )
    return first, maxima, made


def check_steps(
    on_every_path: Callable[..., None], length: int, most_recent: bool, steps: int
) -> None:
    first, maxima, made = steps_of(length, most_recent, steps)

    def run() -> None:
        scales, histories = (
            [torch.ones(n) for n in COUNTS],
            [torch.from_numpy(h.copy()) for h in first],
        )
        for step, (heads, last, expected_scales, expected_histories) in enumerate(made):
            for history, head in zip(histories, heads, strict=True):
                history[0] = head
            flat = [m for row in maxima for m in row]
            kernels.update_scales(scales, histories, flat, most_recent=most_recent, last=last)
            assert_same(scales, expected_scales, note=f"scales after step {step}")
            assert_same(histories, expected_histories, note=f"histories after step {step}")

    on_every_path(run)


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize(("length", "steps"), [(1, 12), (2, 30), (16, 60), (1024, 6)])
def test_steps(
    on_every_path: Callable[..., None], length: int, steps: int, most_recent: bool
) -> None:
    check_steps(on_every_path, length, most_recent, steps)


@pytest.mark.slow
@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length", [1, 2, 16, 1024])
def test_two_hundred_steps(
    on_every_path: Callable[..., None], length: int, most_recent: bool
) -> None:
    check_steps(on_every_path, length, most_recent, 200)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.floats(width=32, min_value=0.0), min_size=1, max_size=20),
    st.integers(1, 5),
    st.booleans(),
)
def test_any_amaxes(
    on_every_path: Callable[..., None], amaxes: list[float], length: int, most_recent: bool
) -> None:
    def run() -> None:
        scale, history = torch.ones(1), torch.zeros(length, 1)
        mine = (scale.tolist(), history.tolist(), [448.0])
        for amax in amaxes:
            history[0] = amax
            mine[1][0][0] = amax
            kernels.update_scales([scale], [history], [448.0], most_recent=most_recent)
            oracle(*mine, most_recent)
            assert scale.tolist() == mine[0]
            assert history.tolist() == mine[1]

    on_every_path(run)
