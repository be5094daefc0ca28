"""What is timed on a GPU, in turns with alternatives, and the targets that this is held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from benchmarks import host, kernels, linear, multi
from benchmarks.installed import recipes
from benchmarks.on_gpu.model_cases import OWN
from benchmarks.on_gpu.place import Gpu
from benchmarks.timing import Row, Run, Timing, measure
from ottava.cli.demo.data import load_corpus
from ottava.cli.demo.training import train

LARGE = 16384
#: M = K = N -> how many times faster than bfloat16 a layer is to be.
LINEAR = {4096: 1.25, 8192: 1.45, 16384: 1.6}
#: How far a validation loss may be from bfloat16's, relatively. The custom recipe's default is current scaling.
LOSSES = {"current": 0.02, "delayed": 0.02, "mxfp8": 0.01, "custom": 0.02}


def kernel_rows(place: Gpu, seconds: float) -> Iterator[Row]:
    """A call of a replayed graph, on memory beyond what caches hold; the launch of a small kernel is not in it."""
    stop, (big, medium) = time.monotonic() + seconds, (64, 32) if place.rehearsal else (LARGE, 4096)
    few, kept = ("cast", "cast, transpose", "current scaling", "MX, rows and columns", "decode"), list[Any]()

    def graph(run: Run) -> Run:
        results, replay = place.capture(run)
        kept.append(results)  # each has memory of its own, as long as its graph is replayed
        return replay

    plan: list[tuple[int, torch.dtype, bool, tuple[str, ...]]] = [(big, torch.bfloat16, False, ())]
    plan += [(medium, torch.bfloat16, False, ()), (big, torch.float32, False, few), (big, torch.float16, False, few)]
    for n, dtype, peers, only in [*plan, (big, torch.bfloat16, True, ()), (0, torch.float32, False, ())]:
        sets = 2 if peers or place.rehearsal else min(24, max(2, -(-(512 << 20) // (3 * max(n, 1) ** 2))))
        options: dict[str, Any] = {"sets": sets, "compiler": place.compiler, "peers": peers, "only": only}
        with place.serving():
            made = kernels.timings(n, dtype, place.device, **options) if n else multi.calls(place.device)
            for timing in made:
                if time.monotonic() < stop:
                    row = measure(timing, place.medians, graph)
                    yield row | {"size": n, "dtype": str(dtype)[6:], "peers": peers}
                kept.clear()


def linear_rows(place: Gpu, seconds: float) -> Iterator[Row]:
    """What targets compare comes first among what has to be compiled: time may run out."""
    sizes, stop = ((32,) if place.rehearsal else tuple(LINEAR)), time.monotonic() + seconds
    for number, n in enumerate(sizes):
        deadline = time.monotonic() + (stop - time.monotonic()) / (len(sizes) - number)
        # Any other recipe may quantize in plain PyTorch, as custom's default does: minutes at large sizes.
        names = list(dict.fromkeys([*OWN, *(recipes() if n <= 4096 else ())]))
        pairs = zip_longest(OWN, ("torchao tensorwise", "torchao rowwise"))
        compiled = [f"{name} compiled" for pair in pairs for name in pair if name]
        timing = linear.timing(n, ["bf16", *names, *compiled, "bf16 compiled"], place.device, compiler=place.compiler)

        def in_time(make: Callable[[], Run], deadline: float = deadline) -> Run:
            if time.monotonic() > deadline:
                raise TimeoutError("not run for want of time")
            return make()

        runs = {name: partial(in_time, make) for name, make in timing.runs.items()}
        with place.serving():
            yield measure(Timing(timing.name, runs, flops=timing.flops), place.medians) | {"size": n}


def host_rows(place: Gpu, seconds: float) -> Iterator[Row]:
    """What an eager step costs the host."""
    rounds, calls = (1, 2) if place.rehearsal else (15, 25)
    for shape in ((16, 64, 64), (128, 128, 128)):
        with place.serving():
            made = host.measure(shape, torch.bfloat16, place.device, rounds=rounds, calls=calls)
        yield from (row | {"shape": "x".join(map(str, shape))} for row in made)


def demo_rows(place: Gpu, seconds: float) -> Iterator[Row]:
    """The demo's training in bfloat16 and every recipe: validation loss, peak memory, tokens a second."""
    stop, size, steps = time.monotonic() + seconds, *(("tiny", 2) if place.rehearsal else ("small", 300))
    run = partial(train, corpus=load_corpus(), size=size, device=str(place.device), seed=0)
    # What is allocated once in a process, by the libraries that multiply matrices, is nobody's peak.
    run(None, steps=1)
    for name in (None, *recipes()):
        runs: list[Any] = []
        if time.monotonic() < stop:
            with place.serving():
                peak = place.memory(lambda name=name, runs=runs: runs.append(run(name, steps=steps)))[0]  # type: ignore[misc]
            rate, loss = runs[0].tokens_per_second, runs[0].validation
            yield {"demo": name or "bf16", "validation": loss, "peak": peak, "tokens a second": rate}


def _target(name: str, bound: float, value: float | None, most: bool = True) -> Row:
    holds = None if value is None else value <= bound if most else value >= bound
    return {"target": name, "bound": f"{'<=' if most else '>='} {bound:g}", "measured": value, "holds": holds}


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def targets(rows: dict[str, list[Row]]) -> list[Row]:
    """Every target of speed and of training; ``holds`` is None where nothing was measured."""
    key = {"size": LARGE, "dtype": "bfloat16", "peers": False}
    chosen = {row["name"]: row["seconds"] for row in rows["kernels"] if key.items() <= row.items()}
    ours, made = {name: seconds.get("ottava") for name, seconds in chosen.items()}, []
    for name, bound in {"cast": 0.90, "cast, transpose": 0.80, "MX, rows and columns": 0.75}.items():
        part = _ratio(chosen.get(name, {}).get("copy"), ours.get(name))
        made.append(_target(f"{name}, of a copy's bandwidth", bound, part, most=False))
    for name, base in {"current scaling": "cast", "current scaling, transpose": "cast, transpose"}.items():
        made.append(_target(f"{name}, of {base}'s time", 1.6, _ratio(ours.get(name), ours.get(base))))
    for size, bound in LINEAR.items():
        seconds = next((row["seconds"] for row in rows["linear"] if row["size"] == size), {})
        for recipe in ("current", "delayed"):
            eager, compiled, name = seconds.get(recipe), seconds.get(f"{recipe} compiled"), f"Linear {recipe} {size}"
            peer, best = seconds.get("torchao tensorwise compiled"), min(filter(None, (eager, compiled)), default=None)
            made.append(
                _target(f"{name}, times faster than bf16", bound, _ratio(seconds.get("bf16"), eager), most=False)
            )
            made.append(_target(f"{name}, of torchao's time", 1.0, _ratio(best, peer)))
            made.append(_target(f"{name}, eager of compiled's time", 1.1, _ratio(eager, compiled)))
    for row in (row for row in rows["host"] if row["step"] == "forward" and row["recipe"] in OWN):
        made.append(_target(f"host, {row['recipe']} {row['shape']}, of nn.Linear's", 2.5, row["times nn.Linear"]))
    for row in rows["demo"][1:]:
        name, bf16 = row["demo"], rows["demo"][0]
        loss = abs(row["validation"] / bf16["validation"] - 1)
        made.append(_target(f"demo {name}, loss from bf16", LOSSES.get(name, 0.02), loss))
        if name != "custom":  # quantizes in plain PyTorch, to be read and not to be fast
            made.append(_target(f"demo {name}, peak memory of bf16's", 0.9999, _ratio(row["peak"], bf16["peak"])))
    return made
