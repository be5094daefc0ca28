"""Quantizing with a known scale, in one pass, against current scaling's two: amax, then cast."""

from __future__ import annotations

import torch

from benchmarks.timing import interleaved
from ottava import kernels

E4M3 = torch.float8_e4m3fn


def measure(n: int, rounds: int) -> list[dict[str, object]]:
    """One row with and one without the transpose, bf16 ``[n, n]``."""
    x = torch.randn(n, n).bfloat16()
    # Nothing is clamped: counting would be a second pass.
    scale, amax, saturated = torch.tensor(50.0), torch.zeros(()), torch.zeros((), dtype=torch.int64)
    rows: list[dict[str, object]] = []
    for transposed in (False, True):
        seconds = interleaved(
            {
                "known": lambda transposed=transposed: kernels.cast_amax(
                    x, scale, amax, E4M3, saturated=saturated, transposed=transposed
                ),
                "current": lambda transposed=transposed: kernels.quantize(x, E4M3, transposed=transposed),
            },
            rounds=rounds,
        )
        rows.append(
            {
                "quantize": "with transpose" if transposed else "rows only",
                "known scale, ms": 1e3 * seconds["known"],
                "current scaling, ms": 1e3 * seconds["current"],
                "times faster": seconds["current"] / seconds["known"],
            }
        )
    assert saturated.item() == 0
    return rows
