"""Measures what statistics cost in the demo's training.

``python -m benchmarks.debug`` prints the table of ``docs/debug.md``; ``--write`` puts it there. The
same model takes steps in turns, without statistics and with statistics of activations, weights and
gradients of all layers. A step in which no statistics are due costs only the lookups of layers.
These take less time than two steps differ by, so they are timed alone, many times over.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import ottava
import ottava_debug
from benchmarks.markdown import markdown
from ottava.nn import function
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import SIZES
from ottava_demo.training import Trainee

PAGE = Path(__file__).parents[1] / "docs" / "debug.md"
BEGIN, END = "<!-- benchmarks.debug -->", "<!-- end of benchmarks.debug -->"
EVERY = 100
STATS = {
    "amax": ["cur_amax"],
    "amax, underflow, saturation, SQNR": ["cur_amax", "underflows%", "saturation%", "sqnr"],
    "these, and exponents": ["cur_amax", "underflows%", "saturation%", "sqnr", "exponents"],
}


def seconds(recipe: str, size: str, stats: list[str], rounds: int) -> dict[str, float]:
    """Median seconds of a step without and with statistics, and seconds of the lookups in a step.

    They are seconds of the processor, so that other programs on the machine do not count.
    """
    shape, corpus = SIZES[size], load_corpus(1 << 18)
    trainee, generator = Trainee(recipe, size=shape), torch.Generator().manual_seed(0)
    data = batch(corpus.train, shape.batch, shape.length, generator)
    times: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(-2, rounds):
        for name, values in times.items():
            on = name == "with"
            with (
                ottava_debug.statistics(trainee.model, stats, layers="blocks.*")
                if on
                else nullcontext() as run
            ):
                start = time.process_time()
                trainee.step(data)
                if run is not None:
                    run.step()
                if turn >= 0:
                    values.append(time.process_time() - start)
    layers = [layer for layer in trainee.model.modules() if isinstance(layer, ottava.nn.Linear)]
    with ottava_debug.statistics(trainee.model, stats, layers="blocks.*", start_step=1):
        start = time.process_time()
        for _ in range(100):
            assert not any(function.inspector(layer) for layer in layers)
        lookups = (time.process_time() - start) / 100
    extra = statistics.median(a - b for a, b in zip(times["with"], times["without"], strict=True))
    without = statistics.median(times["without"])
    return {"without": without, "with statistics": without + extra, "lookups": lookups}


def share(times: Mapping[str, float], every: int = EVERY) -> float:
    """The percentage that statistics in every ``every``-th step add to the time of all steps."""
    extra = times["with statistics"] - times["without"] + (every - 1) * times["lookups"]
    return 100 * extra / every / times["without"]


def table(recipes: list[str], size: str, rounds: int) -> str:
    """A table of the times of steps, for each recipe and choice of statistics."""
    rows = []
    for recipe in recipes:
        for name, stats in STATS.items():
            times = seconds(recipe, size, stats, rounds)
            row: dict[str, object] = {"recipe": recipe, "statistics": name}
            row |= {f"{kind}, ms": f"{1000 * value:.2f}" for kind, value in times.items()}
            rows.append(row | {f"every {EVERY} steps": f"{share(times):+.2f} %"})
    return markdown(rows)


def draw(path: Path, steps: int = 30) -> None:
    """Draw the exponents of the demo's tensors under current scaling.

    A red line in each row marks the values below which FP8 gives zero.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shape, corpus = SIZES["small"], load_corpus(1 << 18)
    trainee, generator = Trainee("current", size=shape), torch.Generator().manual_seed(0)
    stats, tensors = ["exponents", "cur_amax"], ["activation", "weight", "gradient"]
    with ottava_debug.statistics(
        trainee.model, stats, layers="blocks.*", tensors=tensors, start_step=steps
    ) as run:
        for _ in range(steps + 1):
            trainee.step(batch(corpus.train, shape.batch, shape.length, generator))
            run.step()
    latest = run.latest()
    layers = list(dict.fromkeys(layer for layer, _, _ in latest))
    figure, axes = plt.subplots(1, 3, figsize=(12, 5), sharey=True, layout="constrained")
    for axis, tensor in zip(axes, tensors, strict=True):
        counts: list[Any] = [latest[layer, tensor, "exponents"] for layer in layers]
        low, high = -52 if tensor == "gradient" else -26, max(max(each) for each in counts) + 1
        shares = [
            [each.get(e, 0) / sum(each.values()) or math.nan for e in range(low, high)]
            for each in counts
        ]
        image = axis.imshow(
            shares,
            aspect="auto",
            norm="log",
            cmap="viridis",
            extent=(low, high, len(layers) - 0.5, -0.5),
            vmin=1e-5,
        )
        element = ottava.E5M2 if tensor == "gradient" else ottava.E4M3
        smallest = math.log2(element.min_subnormal / element.max)
        for row, layer in enumerate(layers):
            amax = latest[layer, tensor, "cur_amax"]
            assert isinstance(amax, float)
            # Values below half of the smallest element become zero.
            zero = math.log2(amax) + smallest - 1
            axis.plot([zero, zero], [row - 0.5, row + 0.5], color="red", lw=2)
        axis.set(title=f"{tensor}, {element.name}", xlabel="exponent")
    axes[0].set_yticks(range(len(layers)), layers, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the values")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure and print the table, or draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.debug", description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=["current", "mxfp8"])
    parser.add_argument("--size", default="small")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--draw", action="store_true", help="draw docs/_static/exponents.png instead"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/debug.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.draw:
        draw(PAGE.parent / "_static" / "exponents.png")
        return
    text = table(options.recipes, options.size, options.rounds)
    print(text)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
