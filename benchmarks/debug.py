"""What statistics cost the demo: ``python -m benchmarks.debug`` prints the table of ``docs/debug.md``, ``--write`` puts
it there.

The same model takes three kinds of step in turns: with nothing switched on, with statistics that wait for their step,
and with statistics of activations, weights and gradients of all layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

import ottava_debug
from benchmarks.markdown import markdown
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


def seconds(recipe: str, size: str, stats: list[str], rounds: int) -> Mapping[str, list[float]]:
    """Seconds of each kind of step, in turns; of the processor, so that what else runs there does not count."""
    shape, corpus = SIZES[size], load_corpus(1 << 18)
    trainee, generator = Trainee(recipe, size=shape), torch.Generator().manual_seed(0)
    data = batch(corpus.train, shape.batch, shape.length, generator)

    def collecting(**steps: int) -> AbstractContextManager[ottava_debug.Statistics]:
        return ottava_debug.statistics(trainee.model, stats, layers="blocks.*", **steps)

    kinds: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "without": nullcontext,
        "waiting": lambda: collecting(start_step=1),
        "collecting": lambda: collecting(),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(-2, rounds):
        for name, make in kinds.items():
            with make() as run:
                # The first step with a feature looks up which layers it is for.
                trainee.step(data)
                start = time.process_time()
                trainee.step(data)
                if isinstance(run, ottava_debug.Statistics):
                    run.step()
                if turn >= 0:
                    times[name].append(time.process_time() - start)
    return times


def share(times: Mapping[str, list[float]], every: int = EVERY) -> float:
    """Percent that statistics every so many steps add to the time of the steps, by the differences in each turn."""
    without = times["without"]
    more = {
        name: statistics.median(a - b for a, b in zip(times[name], without, strict=True))
        for name in ("waiting", "collecting")
    }
    return 100 * (more["collecting"] + (every - 1) * more["waiting"]) / every / statistics.median(without)


def table(recipes: list[str], size: str, rounds: int) -> str:
    """For each recipe and choice of statistics what steps take."""
    rows = []
    for recipe in recipes:
        for name, stats in STATS.items():
            found = seconds(recipe, size, stats, rounds)
            row: dict[str, object] = {"recipe": recipe, "statistics": name}
            row |= {f"{kind}, ms": f"{1000 * statistics.median(values):.1f}" for kind, values in found.items()}
            rows.append(row | {f"every {EVERY} steps": f"{share(found):+.2f} %"})
    return markdown(rows)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.debug", description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=["current", "mxfp8"])
    parser.add_argument("--size", default="small")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the table into docs/debug.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    made = table(options.recipes, options.size, options.rounds)
    print(made)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
