"""Times kernels, layers and training on a GPU against alternatives, and compares with targets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product, zip_longest
from typing import Any

import torch

from benchmarks import kernels, layers
from benchmarks.installed import recipes
from benchmarks.on_gpu.model_cases import OWN
from benchmarks.on_gpu.runner import Gpu
from benchmarks.timing import Row, Run, measure
from ottava_demo.data import load_corpus
from ottava_demo.training import train

LARGE = 16384
#: Rows, features in and features out of layers whose host time counts.
_SMALL = ((16, 64, 64), (128, 128, 128))
#: Kernel -> the share of a copy's bandwidth that it should reach.
BANDWIDTHS = {"cast": 0.90, "cast, transpose": 0.80, "MX, rows and columns": 0.75}
#: M = K = N -> the target for a layer: how many times faster than bfloat16 it is.
LINEAR = {4096: 1.25, 8192: 1.45, 16384: 1.6}
#: Recipe -> the largest relative difference of a validation loss from bfloat16's. The custom
#: recipe's default is current scaling.
LOSSES = {"current": 0.02, "delayed": 0.02, "mxfp8": 0.01, "custom": 0.02}


def kernels_rows(place: Gpu, seconds: float) -> Iterator[Row]:
    """Times of calls in replayed graphs, on more memory than caches hold.

    The times do not include the launches of small kernels.
    """
    stop, (big, medium) = time.monotonic() + seconds, (64, 32) if place.rehearsal else (LARGE, 4096)
    few = ("cast", "cast, transpose", "current scaling", "MX, rows and columns", "decode")
    outputs: list[Any] = []

    def graph(run: Run) -> Run:
        results, replay = place.capture(run)
        outputs.append(results)  # each has memory of its own, as long as its graph is replayed
        return replay

    plan: list[tuple[int, torch.dtype, bool, tuple[str, ...]]] = [
        (big, torch.bfloat16, False, ()),
        (medium, torch.bfloat16, False, ()),
        (big, torch.float32, False, few),
        (big, torch.float16, False, few),
        (big, torch.bfloat16, True, ()),
    ]
    for n, dtype, peers, only in plan:
        sets = 2
        if not (peers or place.rehearsal):
            sets = min(24, max(2, -(-(512 << 20) // (3 * n**2))))
        make = partial(kernels.timings, sets=sets, compiler=place.compiler, peers=peers, only=only)
        with place.serving():
            for timing in make(n, dtype, place.device):
                row = measure(timing, place.seconds, graph, stop)
                yield row | {"size": n, "dtype": str(dtype)[6:], "peers": peers}
                outputs.clear()


def linear_rows(place: Gpu, seconds: float) -> Iterator[Row]:
    """Times of linear layers; compiled layers that targets compare come first, as time may end."""
    sizes, stop = ((32,) if place.rehearsal else tuple(LINEAR)), time.monotonic() + seconds
    pairs = zip_longest(OWN, ("torchao tensorwise", "torchao rowwise"))
    compiled = [*(f"{name} compiled" for pair in pairs for name in pair if name), "bf16 compiled"]
    for number, n in enumerate(sizes):
        deadline = time.monotonic() + (stop - time.monotonic()) / (len(sizes) - number)
        # Other recipes may quantize in plain PyTorch, as custom's default does, which takes minutes
        # at large sizes.
        names = dict.fromkeys(["bf16", *OWN, *(recipes() if n <= 4096 else ()), *compiled])
        timing = layers.timing(n, names, place.device, place.compiler)
        with place.serving():
            yield measure(timing, place.seconds, until=deadline) | {"size": n}


def host_rows(place: Gpu, seconds: float) -> Iterator[Row]:
    """The host's time for an eager step."""
    rounds, calls, shapes = (15, 25, _SMALL) if not place.rehearsal else (1, 1, _SMALL[:1])
    bursts = partial(place.seconds, rounds=rounds, calls=calls, host=True, statistic=min)
    for shape in shapes:
        with place.serving():
            timings = layers.host_timings(shape, place.device, torch.bfloat16)
            for row in layers.host_table([measure(timing, bursts) for timing in timings]):
                yield row | {"shape": "x".join(map(str, shape))}


def demo_rows(place: Gpu, seconds: float) -> Iterator[Row]:
    """Validation loss, peak memory and speed of the demo's training, with and without recipes."""
    stop = time.monotonic() + seconds
    size, steps = ("tiny", 2) if place.rehearsal else ("small", 300)
    run = partial(train, corpus=load_corpus(), size=size, device=str(place.device), seed=0)
    # The libraries that multiply matrices allocate some memory once in a process. This run makes
    # them do so, so that it is not in the peak of any recipe.
    run(None, steps=1)
    for name in (None, *recipes()):
        if time.monotonic() > stop:
            return
        with place.serving():
            result = run(name, steps=steps)
        yield {
            "demo": name or "bf16",
            "validation": result.validation,
            "peak": result.peak_bytes,
            "tokens a second": result.tokens_per_second,
        }


def _target(name: str, sign: str, bound: float, a: float | None, b: float | None) -> Row:
    """The target that ``a / b`` is at most, or at least, ``bound``; without a figure, unknown."""
    value = a / b if a is not None and b else None
    holds = None
    if value is not None:
        holds = value <= bound if sign == "<=" else value >= bound
    return {"target": name, "bound": f"{sign} {bound:g}", "measured": value, "holds": holds}


def _kernel_targets(rows: list[Row]) -> Iterator[Row]:
    key = {"size": LARGE, "dtype": "bfloat16", "peers": False}
    timed = {row["name"]: row["seconds"] for row in rows if key.items() <= row.items()}
    ours, copy = ({k: row.get(who) for k, row in timed.items()} for who in ("ottava", "copy"))
    for name, bound in BANDWIDTHS.items():
        title = f"{name}, of a copy's bandwidth"
        yield _target(title, ">=", bound, copy.get(name), ours.get(name))
    for end in ("", ", transpose"):
        name, base = f"current scaling{end}", f"cast{end}"
        yield _target(f"{name}, of {base}'s time", "<=", 1.6, ours.get(name), ours.get(base))


def _linear_targets(rows: list[Row]) -> Iterator[Row]:
    timed: dict[int, Row] = {row["size"]: row["seconds"] for row in rows}
    for (size, bound), recipe in product(LINEAR.items(), ("current", "delayed")):
        seconds, name = timed.get(size, {}), f"Linear {recipe} {size}"
        eager, compiled = seconds.get(recipe), seconds.get(f"{recipe} compiled")
        best = min(filter(None, (eager, compiled)), default=None)
        torchao = seconds.get("torchao tensorwise compiled")
        title = f"{name}, times faster than bf16"
        yield _target(title, ">=", bound, seconds.get("bf16"), eager)
        yield _target(f"{name}, of torchao's time", "<=", 1.0, best, torchao)
        yield _target(f"{name}, eager of compiled's time", "<=", 1.1, eager, compiled)


def _demo_targets(rows: list[Row]) -> Iterator[Row]:
    for row in rows[1:]:
        name, bf16 = row["demo"], rows[0]
        loss, bound = abs(row["validation"] - bf16["validation"]), LOSSES.get(name, 0.02)
        yield _target(f"demo {name}, loss from bf16", "<=", bound, loss, bf16["validation"])
        if name != "custom":  # quantizes in plain PyTorch, to be read and not to be fast
            title = f"demo {name}, peak memory of bf16's"
            yield _target(title, "<=", 0.9999, row["peak"], bf16["peak"])


def targets(rows: dict[str, list[Row]]) -> Iterator[Row]:
    """Every target of speed and of training; ``holds`` is None where nothing was measured."""
    yield from _kernel_targets(rows["kernels"])
    yield from _linear_targets(rows["linear"])
    for row in rows["host"]:
        if row["step"] == "forward" and row["recipe"] in OWN:
            title = f"host, {row['recipe']} {row['shape']}, of nn.Linear's"
            yield _target(title, "<=", 2.5, row["times nn.Linear"], 1.0)
    yield from _demo_targets(rows["demo"])
