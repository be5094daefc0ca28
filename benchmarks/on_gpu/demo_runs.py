"""The demo's training on the GPU: every recipe against bfloat16, in loss and in memory."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.installed import recipes
from benchmarks.on_gpu.place import Gpu
from ottava.cli.demo.data import load_corpus
from ottava.cli.demo.training import Run, train

Row = dict[str, Any]
#: How far a validation loss may be from bfloat16's, relatively. The custom recipe's default is current scaling.
BOUNDS = {"current": 0.02, "delayed": 0.02, "mxfp8": 0.01, "custom": 0.02}


def measure(place: Gpu, *, steps: int, size: str, deadline: float) -> list[Row]:
    """One row for each recipe, bfloat16 first: losses, the distance from bfloat16's, peak memory, tokens a second."""
    corpus = load_corpus()
    rows: list[Row] = []
    # What is allocated once in a process, by the libraries that multiply matrices, is nobody's peak.
    train(None, corpus, size=size, steps=1, device=str(place.device), seed=0)
    for name in (None, *recipes()):
        row: Row = {"demo": name or "bf16", "steps": steps, "model": size}
        rows.append(row)
        if time.monotonic() > deadline:
            row["error"] = "not run for want of time"
            continue
        runs: list[Run] = []
        device = str(place.device)

        def run(name: str | None = name, runs: list[Run] = runs, device: str = device) -> None:
            runs.append(train(name, corpus, size=size, steps=steps, device=device, seed=0))

        try:
            with place.serving():
                row["peak bytes"] = place.peak_memory(run)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        made, base = runs[0], rows[0]
        row |= {"validation": made.validation, "tokens a second": made.tokens_per_second, "saved": made.saved_bytes}
        row["first loss"] = made.losses[0]
        if "validation" in base:
            row["from bf16"] = made.validation / base["validation"] - 1
            row["peak, of bf16"] = row["peak bytes"] / base["peak bytes"] if base["peak bytes"] else None
    return rows
