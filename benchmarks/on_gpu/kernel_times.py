"""Times of the kernels, as parts of the bandwidth of a copy on the device that moves as many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.on_gpu import peers
from benchmarks.on_gpu.clock import Clock, Run, rotated
from benchmarks.on_gpu.place import Gpu
from ottava import kernels

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
# Buffers of one rotation together: several times the second-level cache.
_ROTATION = 512 << 20
Row = dict[str, Any]


@dataclass(frozen=True)
class Set:
    """The memory of one call."""

    x: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor
    saturated: torch.Tensor
    row_scales: torch.Tensor
    column_scales: torch.Tensor


def _sets(n: int, dtype: torch.dtype, device: torch.device) -> list[Set]:
    count = max(2, -(-_ROTATION // (3 * n * n))) if device.type == "cuda" else 2
    made = []
    for _ in range(min(count, 24)):
        x = torch.randn(n, n, device=device).to(dtype)
        scalars = torch.tensor(50.0, device=device), torch.zeros((), device=device)
        codes = kernels.cast(x, scalars[0], E4M3)
        # Codes of scales near that of 1, as those of such values are.
        blocks = [torch.randint(110, 130, s, dtype=torch.uint8, device=device) for s in ((n, n // 32), (n // 32, n))]
        made.append(Set(x, codes, *scalars, torch.zeros((), dtype=torch.int64, device=device), *blocks))
    return made


#: Name -> bytes moved for an element whose own size is ``b`` (read plus written, each once), and the call.
KINDS: dict[str, tuple[Callable[[float], float], Callable[[Set], Any]]] = {
    "cast": (lambda b: b + 1, lambda s: kernels.cast(s.x, s.scale, E4M3)),
    "cast recording amax": (
        lambda b: b + 1,
        lambda s: kernels.cast_amax(s.x, s.scale, s.amax, E4M3, saturated=s.saturated),
    ),
    "cast, transpose": (lambda b: b + 2, lambda s: kernels.cast_transpose(s.x, s.scale, E4M3)),
    "cast recording amax, transpose": (
        lambda b: b + 2,
        lambda s: kernels.cast_amax(s.x, s.scale, s.amax, E4M3, saturated=s.saturated, transposed=True),
    ),
    "amax": (lambda b: b, lambda s: kernels.amax(s.x)),
    "current scaling": (lambda b: b + 1, lambda s: kernels.quantize(s.x, E4M3)),
    "current scaling, transpose": (lambda b: b + 2, lambda s: kernels.quantize(s.x, E4M3, transposed=True)),
    "current scaling, transpose alone": (
        lambda b: b + 1,
        lambda s: kernels.quantize(s.x, E4M3, rowwise=False, transposed=True),
    ),
    "mx rows and columns": (lambda b: b + 2 + 2 / 32, lambda s: kernels.mx_quantize(s.x, E4M3)),
    "mx rows": (lambda b: b + 1 + 1 / 32, lambda s: kernels.mx_quantize(s.x, E4M3, columnwise=False)),
    "mx columns": (lambda b: b + 1 + 1 / 32, lambda s: kernels.mx_quantize(s.x, E4M3, rowwise=False)),
    "mx squares": (lambda b: b + 2 + 2 / 32, lambda s: kernels.mx_quantize(s.x, E4M3, two_dimensional=True)),
    "transpose": (lambda b: 2.0, lambda s: kernels.transpose(s.codes)),
    "decode": (lambda b: 1 + b, lambda s: kernels.decode(s.codes, s.scale, E4M3, s.x.dtype)),
    "mx decode rows": (lambda b: 1 + b + 1 / 32, lambda s: kernels.mx_decode(s.codes, s.row_scales, E4M3, s.x.dtype)),
    "mx decode columns": (
        lambda b: 1 + b + 1 / 32,
        lambda s: kernels.mx_decode(s.codes, s.column_scales, E4M3, s.x.dtype, columnwise=True),
    ),
}

#: Name -> the same arithmetic in plain torch.
PLAIN: dict[str, Callable[[Set], Any]] = {
    "cast": lambda s: peers.torch_cast(s.x, s.scale),
    "cast, transpose": lambda s: peers.torch_cast_transpose(s.x, s.scale),
    "current scaling": lambda s: peers.torch_quantize(s.x),
    "current scaling, transpose": lambda s: peers.torch_quantize_transpose(s.x),
    "mx rows and columns": lambda s: peers.torch_mx(s.x),
}
_TORCHAO = {"quantize": "current scaling", "mx rows": "mx rows", "mx columns": "mx columns"}


def _copies(total: float, sets: int, device: torch.device) -> list[Run]:
    """Copies that move ``total`` bytes each, half of them read and half written."""
    half = max(1, int(total / 2))
    pairs = [
        (
            torch.randint(0, 256, (half,), dtype=torch.uint8, device=device),
            torch.empty(half, dtype=torch.uint8, device=device),
        )
        for _ in range(sets)
    ]
    return [lambda a=a, b=b: b.copy_(a) for a, b in pairs]


def ceiling(place: Gpu, clock: Clock, total: int = 4 << 30) -> float:
    """Bytes read plus written a second of a large copy on the device."""
    (run,) = _copies(total, 1, place.device)
    return total / clock.seconds({"copy": run})["copy"]


def _alternatives(name: str, compiler: str, with_peers: bool) -> dict[str, Callable[[Set], Any]]:
    runs: dict[str, Callable[[Set], Any]] = {"ottava": KINDS[name][1]}
    if with_peers and name in PLAIN:
        runs["eager"] = PLAIN[name]
        runs["compile"] = torch.compile(PLAIN[name], backend=compiler, dynamic=False)
    if with_peers:
        for own, cast in peers.torchao_casts().items():
            if _TORCHAO[own] == name:
                runs["torchao"] = lambda s, cast=cast: cast(s.x)
    return runs


def measure(
    place: Gpu,
    clock: Clock,
    n: int,
    dtype: torch.dtype,
    *,
    best: float,
    compiler: str,
    with_peers: bool,
    deadline: float,
    only: tuple[str, ...] = (),
) -> list[Row]:
    """One row for each kernel on ``[n, n]``.

    ``of copy`` is the part of a copy's bandwidth that it reaches, of the better of a copy of as many bytes, timed in
    turns with it, and of ``best``, a large one's. What cannot run is left out of its row, with the reason.
    """
    rows: list[Row] = []
    with place.serving():
        sets = _sets(n, dtype, place.device)
        for name, (bytes_of, _) in KINDS.items():
            if (only and name not in only) or time.monotonic() > deadline:
                continue
            total = bytes_of(dtype.itemsize) * n * n
            row: Row = {"kernel": name, "size": n, "dtype": str(dtype).removeprefix("torch.")}
            runs: dict[str, Run] = {}
            for who, call in _alternatives(name, compiler, with_peers).items():
                try:
                    # Peers make temporaries: few of their results fit beside each other.
                    own = sets if who == "ottava" else sets[:2]
                    runs[who], count = rotated(place, [lambda s=s, call=call: call(s) for s in own])
                    row[f"{who}, calls"] = count
                except Exception as error:
                    row[f"{who}, error"] = f"{type(error).__name__}: {str(error)[:300]}"
            if "ottava" in runs:
                runs["copy"], row["copy, calls"] = rotated(place, _copies(total, min(len(sets), 4), place.device))
                seconds = {who: t / row[f"{who}, calls"] for who, t in clock.seconds(runs).items()}
                row |= {"seconds": seconds["ottava"], "gigabytes a second": total / seconds["ottava"] / 1e9}
                row["of copy"] = min(seconds["copy"] / seconds["ottava"], total / seconds["ottava"] / best)
                row |= {
                    f"times {who}": seconds[who] / seconds["ottava"] for who in seconds if who not in ("ottava", "copy")
                }
            rows.append(row)
            del runs
    return rows


def measure_many(place: Gpu, clock: Clock, count: int = 200, size: int = 1 << 18) -> list[Row]:
    """Shards of float32 weights in one call, and the update of many slots."""
    device = place.device
    xs = [torch.randn(size, device=device) for _ in range(count)]
    dtypes, formats = [BF16] * count, [E4M3] * count
    outs = [torch.empty(size, dtype=torch.uint8, device=device) for _ in xs]
    scales = torch.full((count,), 50.0, device=device)
    slots, steps = [torch.ones(3, device=device) for _ in range(count)], 1024
    histories = [torch.rand(steps, 3, device=device) for _ in slots]
    maxima = [448.0] * (3 * count)
    # As after a reduction over ranks: a history whose first row was taken is all zeros, and nothing moves.
    last = torch.rand(3 * count, device=device) + 0.5
    read = 4 * count * size
    calls: dict[str, tuple[int, Run]] = {
        "multi_amax": (read, lambda: kernels.multi_amax(xs, dtypes, checked=True)),
        "multi_cast": (
            read + count * size,
            lambda: kernels.multi_cast(xs, dtypes, scales, formats, outs, checked=True),
        ),
        "update_scales": (
            2 * 4 * steps * 3 * count,
            lambda: kernels.update_scales(slots, histories, maxima, last=last),
        ),
    }
    rows = []
    with place.serving():
        for name, (total, call) in calls.items():
            row: Row = {
                "kernel": name,
                "size": f"{count} x {steps * 3 if name == 'update_scales' else size}",
                "dtype": "float32",
            }
            try:
                call()
                # Without the host, which takes longer to list so many tensors than the device to read them.
                replayed, _ = rotated(place, [call])
                copied, _ = rotated(place, _copies(total, 1, device))
                seconds = clock.seconds({"graph": replayed, "copy": copied, "eager": call})
                row |= {"seconds": seconds["graph"], "of copy": seconds["copy"] / seconds["graph"]}
                row |= {"gigabytes a second": total / seconds["graph"] / 1e9, "eager, seconds": seconds["eager"]}
            except Exception as error:
                row["ottava, error"] = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append(row)
    return rows
