"""What statistics cost the demo: ``python -m benchmarks.debug`` prints the table of
``docs/debug.md``, ``--write`` puts it there.

The same model takes steps in turns, with nothing in force and with statistics of activations,
weights and gradients of all layers. What a step costs in which statistics wait for theirs is less
than two such times differ by: the layers are looked up many times over.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

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
    """Median seconds of a step without and with statistics, and of the lookups of a step that
    waits; of the processor, so that what else runs on the machine does not count."""
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
        looked_up = (time.process_time() - start) / 100
    more = statistics.median(a - b for a, b in zip(times["with"], times["without"], strict=True))
    without = statistics.median(times["without"])
    return {"without": without, "with statistics": without + more, "lookups": looked_up}


def share(found: Mapping[str, float], every: int = EVERY) -> float:
    """Percent that statistics every so many steps add to the time of the steps."""
    more = found["with statistics"] - found["without"] + (every - 1) * found["lookups"]
    return 100 * more / every / found["without"]


def table(recipes: list[str], size: str, rounds: int) -> str:
    """For each recipe and choice of statistics what steps take."""
    rows = []
    for recipe in recipes:
        for name, stats in STATS.items():
            found = seconds(recipe, size, stats, rounds)
            row: dict[str, object] = {"recipe": recipe, "statistics": name}
            row |= {f"{kind}, ms": f"{1000 * value:.2f}" for kind, value in found.items()}
            rows.append(row | {f"every {EVERY} steps": f"{share(found):+.2f} %"})
    return markdown(rows)


def draw(path: Path, steps: int = 30) -> None:
    """Exponents of the demo's tensors under current scaling, and what its elements hold of them."""
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
    found = run.latest()
    layers = list(dict.fromkeys(layer for layer, _, _ in found))
    figure, axes = plt.subplots(1, 3, figsize=(12, 5), sharey=True, layout="constrained")
    for axis, tensor in zip(axes, tensors, strict=True):
        counts: list[dict[int, int]] = [found[layer, tensor, "exponents"] for layer in layers]  # type: ignore[misc]
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
            amax = found[layer, tensor, "cur_amax"]
            assert isinstance(amax, float)
            # Half of the smallest element is the last that does not become zero.
            zero = math.log2(amax) + smallest - 1
            axis.plot([zero, zero], [row - 0.5, row + 0.5], color="red", lw=2)
        axis.set(title=f"{tensor}, {element.name}", xlabel="exponent")
    axes[0].set_yticks(range(len(layers)), layers, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the values")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
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
    made = table(options.recipes, options.size, options.rounds)
    print(made)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
