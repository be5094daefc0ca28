"""Kernel speed on a bf16 matrix: ours, torch eager, ``torch.compile`` and memcpy, into buffers that are reused."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import interleaved
from ottava import kernels

E4M3 = torch.float8_e4m3fn


def _torch_cast(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_((x.float() * scale).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8))


def _torch_quantize(x: torch.Tensor, out: torch.Tensor, out_t: torch.Tensor) -> None:
    amax = x.abs().amax().float()
    codes = (x.float() * (448.0 / amax)).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8)
    out.copy_(codes)
    out_t.copy_(codes.t())


def _copy(total_bytes: int) -> Callable[[], object]:
    """A copy that moves ``total_bytes``, half of them read and half written."""
    source, target = (torch.zeros(total_bytes // 2, dtype=torch.uint8) for _ in range(2))
    return lambda: target.copy_(source)


def measure(n: int, rounds: int) -> list[dict[str, object]]:
    """One row for each kernel: seconds, ratios, and the part of memcpy's bandwidth that it reaches."""
    x = torch.randn(n, n).bfloat16()
    scale, scale_inv, amax = torch.tensor(3.0), torch.empty(()), torch.empty(())
    out, out_t = torch.empty(n, n, dtype=torch.uint8), torch.empty(n, n, dtype=torch.uint8)
    decoded = torch.empty(n, n, dtype=torch.bfloat16)
    compiled_cast, compiled_quantize = torch.compile(_torch_cast), torch.compile(_torch_quantize)
    values = x.numel()
    cases: list[tuple[str, int, dict[str, Callable[[], object]]]] = [
        (
            "cast",
            3 * values,
            {
                "ottava": lambda: kernels.cast_out(x, scale, E4M3, out),
                "eager": lambda: _torch_cast(x, scale, out),
                "compile": lambda: compiled_cast(x, scale, out),
            },
        ),
        (
            "amax, cast, transpose",
            6 * values,
            {
                "ottava": lambda: kernels.quantize_out(x, E4M3, 0.0, False, out, out_t, scale, scale_inv, amax),
                "eager": lambda: _torch_quantize(x, out, out_t),
                "compile": lambda: compiled_quantize(x, out, out_t),
            },
        ),
        (
            "amax",
            2 * values,
            {
                "ottava": lambda: kernels.amax_out(x, amax),
                "eager": lambda: x.abs().amax(),
            },
        ),
        (
            "decode",
            3 * values,
            {
                "ottava": lambda: kernels.decode_out(out, None, E4M3, decoded),
                "eager": lambda: decoded.copy_(out.view(E4M3)),
            },
        ),
        (
            "transpose",
            2 * values,
            {"ottava": lambda: kernels.transpose_out(out, out_t), "eager": lambda: out_t.copy_(out.t())},
        ),
    ]
    rows: list[dict[str, object]] = []
    for name, moved, runs in cases:
        seconds = interleaved({**runs, "memcpy": _copy(moved)}, rounds=rounds)
        ours = seconds["ottava"]
        rows.append(
            {
                "kernel": name,
                "milliseconds": 1e3 * ours,
                "times eager": seconds["eager"] / ours,
                "times compile": seconds["compile"] / ours if "compile" in seconds else None,
                "of memcpy's bandwidth": seconds["memcpy"] / ours,
            }
        )
    return rows
