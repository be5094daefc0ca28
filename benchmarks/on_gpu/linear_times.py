"""A linear layer, forward and backward, against torch's in bfloat16 and torchao's float8 ones, in turns in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch

from benchmarks.installed import recipes
from benchmarks.on_gpu import peers
from benchmarks.on_gpu.clock import Clock, Run
from benchmarks.on_gpu.layers import layer
from benchmarks.on_gpu.place import Gpu

Row = dict[str, Any]
# torch first, then what targets name, then the rest: time may run out.
_FIRST = ("current", "delayed", "mxfp8")


def _step(module: torch.nn.Module, call: Any, x: torch.Tensor, dy: torch.Tensor) -> Run:
    weights = list(module.parameters())

    def run() -> None:
        for weight in weights:
            weight.grad = None
        x.grad = None
        # As after an optimizer's step, so that nobody takes the weight for one that was quantized before.
        weights[0].detach().view(-1)[:0].zero_()
        call(x).backward(dy)

    return run


def _candidates(n: int, device: torch.device, compiler: str) -> dict[str, Callable[[], tuple[torch.nn.Module, Any]]]:
    """Name -> what makes the module, and what is called."""

    def plain(recipe: str | None) -> tuple[torch.nn.Module, Any]:
        module = layer(recipe, n, n, device, bias=False)
        return module, module

    def compiled(module: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
        return module, torch.compile(module, backend=compiler, fullgraph=True, dynamic=False)

    # Any other recipe may quantize in plain PyTorch, as custom's default does: minutes at large sizes.
    names = [name for name in (*_FIRST, *(recipes() if n <= 4096 else ())) if name in recipes()]
    made: dict[str, Callable[[], tuple[torch.nn.Module, Any]]] = {"bf16": lambda: plain(None)}
    made |= {name: lambda name=name: plain(name) for name in dict.fromkeys(names)}
    # What targets compare comes first among what has to be compiled.
    for kind, name in zip_longest(("tensorwise", "rowwise"), (name for name in names if name in _FIRST)):
        if name is not None:
            made[f"{name} compiled"] = lambda name=name: compiled(layer(name, n, n, device, bias=False))
        if kind is not None:
            made[f"torchao {kind} compiled"] = lambda kind=kind: compiled(
                peers.torchao_linear(kind, n, n, device, False)
            )
    made["bf16 compiled"] = lambda: compiled(layer(None, n, n, device, bias=False))
    return made


def measure(place: Gpu, clock: Clock, n: int, *, compiler: str, deadline: float) -> list[Row]:
    """One row for each: seconds of a step at M = K = N, and how many times faster than bfloat16 that is."""
    rows: list[Row] = []
    runs: dict[str, Run] = {}
    # Each size and recipe is a compilation of the same function: beyond a number of them torch refuses.
    torch._dynamo.reset()
    x = torch.randn(n, n, device=place.device).bfloat16().requires_grad_()
    dy = torch.randn(n, n, device=place.device).bfloat16()
    with place.serving():
        for name, make in _candidates(n, place.device, compiler).items():
            row: Row = {"linear": name, "size": n}
            rows.append(row)
            if time.monotonic() > deadline:
                row["error"] = "not run for want of time"
                continue
            if name.startswith("torchao") and peers.torchao_version() is None:
                row["error"] = "torchao is not installed"
                continue
            try:
                run = _step(*make(), x, dy)
                run()
                runs[name] = run
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        samples = clock.samples(runs, 20e-3, 2)
    base = _median(samples.get("bf16", []))
    for row in rows:
        taken = samples.get(row["linear"])
        if taken:
            seconds = _median(taken)
            row |= {"seconds": seconds, "spread": (max(taken) - min(taken)) / seconds}
            row["teraflops"] = 6 * n**3 / seconds / 1e12
            row["times bf16"] = base / seconds if base else None
    return rows


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
