"""Kernel speed on a bf16 matrix: ours, torch eager, ``torch.compile`` and memcpy, into buffers that are reused."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import interleaved
from ottava import kernels
from ottava.formats import mx_scale_shapes

E4M3 = torch.float8_e4m3fn
Buffers = tuple[torch.Tensor, torch.Tensor]


def _torch_cast(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_((x.float() * scale).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8))


def _torch_quantize(x: torch.Tensor, out: torch.Tensor, out_t: torch.Tensor) -> None:
    amax = x.abs().amax().float()
    codes = (x.float() * (448.0 / amax)).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8)
    out.copy_(codes)
    out_t.copy_(codes.t())


def _torch_mx_direction(
    blocks: torch.Tensor, dim: int, codes: torch.Tensor, scales: torch.Tensor, finite: bool
) -> None:
    magnitude = blocks.abs()
    if not finite:
        magnitude = torch.where(magnitude.isnan(), 0, magnitude)
    bits = (magnitude.amax(dim, keepdim=True).float() * (1 / 448)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    scale = (exponent + torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)).clamp(max=254)
    multiplier = torch.where(scale == 254, 0x400000, (254 - scale) << 23).view(torch.float32)
    scales.copy_(scale.squeeze(dim))
    values = blocks.float() * multiplier
    encoded = values.clamp(-448.0, 448.0).to(E4M3).view(torch.uint8)
    codes.copy_((encoded if finite else torch.where(values.isnan(), 0x7F, encoded)).view(codes.shape))


def torch_mx(x: torch.Tensor, rowwise: Buffers, columnwise: Buffers, finite: bool = False) -> None:
    """The same bytes for every input; with ``finite``, for every input without NaN."""
    rows, columns = x.shape
    _torch_mx_direction(x.view(rows, columns // 32, 32), 2, *rowwise, finite)
    _torch_mx_direction(x.view(rows // 32, 32, columns), 1, *columnwise, finite)


def _torch_mx_decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    blocks = codes.view(E4M3).to(torch.bfloat16).view(*scales.shape, 32)
    torch.mul(blocks, scales.view(torch.float8_e8m0fnu).to(torch.bfloat16).unsqueeze(2), out=out.view(blocks.shape))


def _copy(total_bytes: int) -> Callable[[], object]:
    """A copy that moves ``total_bytes``, half of them read and half written."""
    source, target = (torch.zeros(total_bytes // 2, dtype=torch.uint8) for _ in range(2))
    return lambda: target.copy_(source)


def _check_mx(x: torch.Tensor, rowwise: Buffers, columnwise: Buffers, others: list[Callable[..., None]]) -> None:
    """What is compared in speed makes the same bytes, of NaN and infinities as well."""
    hard = x.clone()
    hard.view(-1)[:: x.numel() // 97] = float("nan")
    hard.view(-1)[1 :: x.numel() // 89] = float("-inf")
    theirs = [torch.empty_like(tensor) for tensor in (*rowwise, *columnwise)]
    for values, finite in ((x, True), (hard, False)):
        kernels.mx_quantize_out(values, E4M3, rowwise, columnwise)
        for other in others:
            other(values, tuple(theirs[:2]), tuple(theirs[2:]), finite)
            assert all(torch.equal(a, b) for a, b in zip((*rowwise, *columnwise), theirs, strict=True))


def measure(n: int, rounds: int) -> list[dict[str, object]]:
    """One row for each kernel: seconds, ratios, and the part of memcpy's bandwidth that it reaches."""
    x = torch.randn(n, n).bfloat16()
    scale, scale_inv, amax = torch.tensor(3.0), torch.empty(()), torch.empty(())
    out, out_t = torch.empty(n, n, dtype=torch.uint8), torch.empty(n, n, dtype=torch.uint8)
    decoded = torch.empty(n, n, dtype=torch.bfloat16)
    compiled_cast, compiled_quantize = torch.compile(_torch_cast), torch.compile(_torch_quantize)
    compiled_mx = torch.compile(torch_mx)
    rowwise, columnwise = (
        (torch.empty_like(out), torch.empty(shape, dtype=torch.uint8)) for shape in mx_scale_shapes(x.shape)
    )
    _check_mx(x, rowwise, columnwise, [torch_mx, compiled_mx])
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
            "MX, rows and columns",
            4 * values,
            {
                "ottava": lambda: kernels.mx_quantize_out(x, E4M3, rowwise, columnwise),
                "eager": lambda: torch_mx(x, rowwise, columnwise),
                "compile": lambda: compiled_mx(x, rowwise, columnwise),
            },
        ),
        (
            "MX, rows and columns, torch without NaN",
            4 * values,
            {
                "ottava": lambda: kernels.mx_quantize_out(x, E4M3, rowwise, columnwise),
                "eager": lambda: torch_mx(x, rowwise, columnwise, True),
                "compile": lambda: compiled_mx(x, rowwise, columnwise, True),
            },
        ),
        (
            "MX, decode",
            3 * values,
            {
                "ottava": lambda: kernels.mx_decode_out(rowwise[0], rowwise[1], E4M3, decoded),
                "eager": lambda: _torch_mx_decode(rowwise[0], rowwise[1], decoded),
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
