"""What statistics of tensors cost in the demo's training, and the exponents that they show."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ottava
import ottava_debug
from benchmarks.timing import Row
from ottava.nn import function
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import SIZES
from ottava_demo.training import Batch, Trainee

#: Layer, tensor and statistic -> its value.
Statistics = dict[tuple[str, str, str], Any]
EVERY = 100
RECIPES = ("current", "mxfp8")
STATS = {
    "amax": ["cur_amax"],
    "amax, underflow, saturation, SQNR": ["cur_amax", "underflows%", "saturation%", "sqnr"],
    "these, and exponents": ["cur_amax", "underflows%", "saturation%", "sqnr", "exponents"],
}
_LOOKUPS = 100


def _trainee(recipe: str, size: str) -> tuple[Trainee, Callable[[], Batch]]:
    """A model in training, and a function that gives batches for it."""
    shape, corpus = SIZES[size], load_corpus(1 << 18).train
    generator = torch.Generator().manual_seed(0)
    return Trainee(recipe, size=shape), lambda: batch(corpus, shape.batch, shape.length, generator)


def _seconds(recipe: str, size: str, stats: list[str], rounds: int) -> Row:
    """Seconds of a step without and with statistics, and of the lookups of layers in a step.

    They are seconds of the processor, so that other programs on the machine do not count. Steps
    with and without statistics alternate. A step in which no statistics are due costs only the
    lookups, which take less time than two steps differ by, so they are timed alone.
    """
    trainee, batches = _trainee(recipe, size)
    watch = partial(ottava_debug.statistics, trainee.model, stats, layers="blocks.*")
    data = batches()
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(-2, rounds):
        for on, values in times.items():
            with watch() if on else nullcontext() as run:
                start = time.process_time()
                trainee.step(data)
                if run is not None:
                    run.step()
                if turn >= 0:
                    values.append(time.process_time() - start)
    layers = [layer for layer in trainee.model.modules() if isinstance(layer, ottava.nn.Linear)]
    with watch(start_step=1):
        start = time.process_time()
        for _ in range(_LOOKUPS):
            assert not any(function.inspector(layer) for layer in layers)
        lookups = (time.process_time() - start) / _LOOKUPS
    pairs = zip(times[True], times[False], strict=True)
    without, extra = statistics.median(times[False]), statistics.median(a - b for a, b in pairs)
    return {"without": without, "with statistics": without + extra, "lookups": lookups}


def rows(rounds: int = 20, size: str = "small") -> list[Row]:
    """Milliseconds of a step, and what a hundred steps cost of which one collects statistics."""
    table: list[Row] = []
    for recipe in RECIPES:
        for name, stats in STATS.items():
            times = _seconds(recipe, size, stats, rounds)
            extra = times["with statistics"] - times["without"] + (EVERY - 1) * times["lookups"]
            table.append(
                {
                    "recipe": recipe,
                    "statistics": name,
                    **{f"{kind}, ms": 1e3 * seconds for kind, seconds in times.items()},
                    f"every {EVERY} steps": f"{100 * extra / EVERY / times['without']:+.2f} %",
                }
            )
    return table


def exponents(steps: int = 30, size: str = "small") -> Statistics:
    """Exponents and amaxes of the demo's tensors under current scaling, after some steps."""
    trainee, batches = _trainee("current", size)
    with ottava_debug.statistics(
        trainee.model,
        ["exponents", "cur_amax"],
        layers="blocks.*",
        tensors=["activation", "weight", "gradient"],
        start_step=steps,
    ) as run:
        for _ in range(steps + 1):
            trainee.step(batches())
            run.step()
    return dict(run.latest())


def draw_exponents(latest: Statistics, out: Path) -> None:
    """Draw a histogram for each layer and tensor.

    A red line in each row marks the values below which FP8 gives zero.
    """
    from matplotlib import pyplot as plt

    layers = list(dict.fromkeys(layer for layer, _, _ in latest))
    figure, axes = plt.subplots(1, 3, figsize=(12, 5), sharey=True, layout="constrained")
    for axis, tensor in zip(axes, ("activation", "weight", "gradient"), strict=True):
        counts: list[Any] = [latest[layer, tensor, "exponents"] for layer in layers]
        low, high = -52 if tensor == "gradient" else -26, max(max(each) for each in counts) + 1
        shares = [
            [each.get(e, 0) / sum(each.values()) or math.nan for e in range(low, high)]
            for each in counts
        ]
        extent = (low, high, len(layers) - 0.5, -0.5)
        image = axis.imshow(
            shares, aspect="auto", norm="log", cmap="viridis", extent=extent, vmin=1e-5
        )
        element = ottava.E5M2 if tensor == "gradient" else ottava.E4M3
        smallest = math.log2(element.min_subnormal / element.max)
        for row, layer in enumerate(layers):
            # Values below half of the smallest element become zero.
            zero = math.log2(latest[layer, tensor, "cur_amax"]) + smallest - 1
            axis.plot([zero, zero], [row - 0.5, row + 0.5], color="red", lw=2)
        axis.set(title=f"{tensor}, {element.name}", xlabel="exponent")
    axes[0].set_yticks(range(len(layers)), layers, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the values")
    figure.savefig(out, dpi=110)
    plt.close(figure)
