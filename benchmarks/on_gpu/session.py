"""The sections of a run, each with its part of the time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import host
from benchmarks.on_gpu import (
    checks,
    demo_runs,
    exact,
    kernel_times,
    large,
    layers,
    linear_times,
    products,
    sanitizer,
)
from benchmarks.on_gpu.block_cases import KERNELS, cases
from benchmarks.on_gpu.build import ROOT
from benchmarks.on_gpu.checks import Outcome
from benchmarks.on_gpu.clock import Clock
from benchmarks.on_gpu.place import Gpu
from benchmarks.on_gpu.rehearsal import elsewhere

Results = dict[str, Any]


class Session:
    """One run: its place, its clock, its time, its results.

    Args:
        weights: section -> its part of the time.
        end: when it is to be over, by ``time.monotonic``.
    """

    def __init__(self, options: argparse.Namespace, place: Gpu, weights: dict[str, float], end: float) -> None:
        self.options, self.place, self.weights, self.end = options, place, weights, end
        self.results: Results = {}
        self.clock = Clock(place, 9)
        self.tiny: bool = place.rehearsal
        self.compiler = "aot_eager" if self.tiny else "inductor"
        self.seed = int(time.time()) % 100_000 if options.seed is None else options.seed

    def share(self, section: str) -> float:
        """Seconds for a section: its part of what is left, of the sections that are left."""
        left = [name for name in self.options.sections if name not in self.results]
        total = sum(self.weights[name] for name in left)
        return max(0.0, self.end - time.monotonic()) * self.weights[section] / total

    def _outcomes(self, runs: list[tuple[str, Callable[[float], Any]]], seconds: float) -> Results:
        """Checks one after the other, each with an equal part of what is left; one that raises has failed."""
        stop, rows = time.monotonic() + seconds, []
        for number, (name, run) in enumerate(runs):
            left = stop - time.monotonic()
            made: Any
            if left <= 0:
                made = Outcome(name, left_out=1)
            else:
                try:
                    # What one does not need is there for the rest.
                    made = run(left / (len(runs) - number))
                except Exception as error:
                    traceback.print_exc()
                    made = Outcome(name)
                    made.note(name, f"{type(error).__name__}: {error}")
            for outcome in made if isinstance(made, list) else [made]:
                rows.append(dataclasses.asdict(outcome) | {"passed": outcome.passed})
                for failure in outcome.failures:
                    print(f"FAILED {outcome.name}: {failure}", flush=True)
        return {"rows": rows}

    def run_bytes(self, seconds: float) -> Results:
        small = self.options.small or self.tiny
        if self.tiny:
            seconds = min(seconds, 12.0)
        # A few cases of every kernel before all of any, and the longest tables last: time may run out.
        modes = ["some bytes", "bytes"] if self.options.small else list(checks.MODES)
        names = sorted(KERNELS, key=lambda kernel: len(cases(kernel, small)))
        runs: list[tuple[str, Callable[[float], Any]]] = []
        for mode in modes:
            for kernel in names:
                runs.append(
                    (
                        f"{kernel}, {mode}",
                        lambda s, k=kernel, m=mode: checks.check(
                            k, m, self.place, small=small, seed=self.seed, seconds=s
                        ),
                    )
                )
        other = elsewhere(self.place)
        if other is not None and not self.options.small:
            runs[-len(names) : -len(names)] = [
                (
                    f"{kernel}, {other.name}",
                    lambda s, k=kernel: checks.check(k, "some bytes", other, small=True, seconds=s),
                )
                for kernel in names
            ]
        return self._outcomes(runs, seconds) | {"seed": self.seed}

    def run_products(self, seconds: float) -> Results:
        shapes = products.SHAPES[:4] if self.tiny else products.SHAPES
        runs: list[tuple[str, Callable[[float], Any]]] = [
            (f"products, {name}", lambda s, name=name: products.check(self.place, name, shapes=shapes, seconds=s))
            for name in products.QUANTIZERS
        ]
        runs.insert(0, ("kernels against float64", lambda s: exact.check(self.place)))
        runs.append(("products of small integers", lambda s: products.check_integers(self.place)))
        runs.append(("products of MX blocks beyond float32's range", lambda s: products.check_far_blocks(self.place)))
        return self._outcomes(runs, seconds)

    def run_large(self, seconds: float) -> Results:
        shapes, step = ([(70, 41)], 32) if self.tiny else (large.SHAPES, 2048)
        runs: list[tuple[str, Callable[[float], Any]]] = [
            (f"large {shape}", lambda s, shape=shape: large.check(self.place, shape, step)) for shape in shapes
        ]
        return self._outcomes(runs, seconds)

    def run_layers(self, seconds: float) -> Results:
        runs = layers.check(self.place, self.compiler, small=self.tiny)
        return self._outcomes([(f"layers {n}", lambda s, run=run: run()) for n, run in enumerate(runs)], seconds)

    def run_sanitizer(self, seconds: float) -> Results:
        if self.tiny:
            return {"rows": {"memcheck": {"clean": None, "why": "a rehearsal"}}}
        return {"rows": sanitizer.run(ROOT / "benchmarks" / "gpu.py", self.options.site, seconds)}

    def run_kernels(self, seconds: float) -> Results:
        stop = time.monotonic() + seconds
        best = kernel_times.ceiling(self.place, self.clock, 1 << 16 if self.tiny else 4 << 30)
        few = ("cast", "cast, transpose", "current scaling", "mx rows and columns", "decode")
        big, medium = (64, 32) if self.tiny else (16384, 4096)
        plan: list[tuple[int, Any, bool, tuple[str, ...]]] = [
            (big, torch.bfloat16, False, ()),
            (medium, torch.bfloat16, False, ()),
            (big, torch.float32, False, few),
            (big, torch.float16, False, few),
            (big, torch.bfloat16, True, (*kernel_times.PLAIN, "mx rows", "mx columns")),
        ]
        rows: list[Any] = []
        for number, (n, dtype, with_peers, only) in enumerate(plan):
            deadline = time.monotonic() + (stop - time.monotonic()) / (len(plan) - number) * 2
            rows += kernel_times.measure(
                self.place,
                self.clock,
                n,
                dtype,
                best=best,
                compiler=self.compiler,
                with_peers=with_peers,
                deadline=min(deadline, stop),
                only=only,
            )
            if number == 1:
                rows += kernel_times.measure_many(self.place, self.clock, *((3, 64) if self.tiny else ()))
        return {"rows": rows, "copy, gigabytes a second": best / 1e9}

    def run_linear(self, seconds: float) -> Results:
        stop, rows = time.monotonic() + seconds, []
        sizes = (32,) if self.tiny else (4096, 8192, 16384)
        for number, n in enumerate(sizes):
            deadline = time.monotonic() + (stop - time.monotonic()) / (len(sizes) - number)
            rows += linear_times.measure(self.place, self.clock, n, compiler=self.compiler, deadline=deadline)
        return {"rows": rows}

    def run_host(self, seconds: float) -> Results:
        rounds, calls = (1, 2) if self.tiny else (15, 25)
        rows: list[Any] = []
        for shape in ((16, 64, 64), (128, 128, 128)):
            with self.place.serving():
                made = host.measure(shape, torch.bfloat16, self.place.device, rounds=rounds, calls=calls)
            rows += [row | {"shape": "x".join(map(str, shape))} for row in made]
        return {"rows": rows}

    def run_demo(self, seconds: float) -> Results:
        size, steps = ("tiny", 2) if self.tiny else ("small", 300)
        stop = time.monotonic() + seconds
        return {
            "rows": demo_runs.measure(self.place, steps=steps, size=size, deadline=stop),
            "bounds": demo_runs.BOUNDS,
        }

    def save(self) -> None:
        """What there is so far."""
        if str(self.options.out) != os.devnull:
            self.options.out.write_text(json.dumps(self.results, indent=1, default=str) + "\n", encoding="utf-8")
