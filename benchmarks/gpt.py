"""Times a training step of the demo's GPT under every recipe, in eager mode and compiled.

``python -m benchmarks.gpt`` prints the table. Inductor takes a minute for each recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import ottava
from benchmarks.installed import recipes
from benchmarks.markdown import markdown
from benchmarks.timing import Row, Run, Timing, interleaved, measure


def _runnable(recipe: str, size: str, compiler: str | None) -> Run:
    from ottava_demo.model import GPT, SIZES, VOCABULARY

    torch.manual_seed(0)
    shape = SIZES[size]
    model: Any = GPT(shape).bfloat16()
    if recipe != "bf16":
        ottava.convert(model, recipe, exclude=ottava.HEADS)
    tokens = torch.randint(VOCABULARY, (shape.batch, shape.length + 1))
    call: Callable[..., torch.Tensor] = model
    if compiler is not None:
        call = torch.compile(model, backend=compiler, fullgraph=True, dynamic=False)

    def run() -> None:
        model.zero_grad()
        F.cross_entropy(
            call(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()

    return run


def timings(size: str = "small", *, compiler: str = "inductor") -> list[Timing]:
    """A row for each recipe."""
    ways = {"eager": None, "compiled": compiler}
    # Each recipe compiles the same function again, and torch limits the number of recompilations.
    torch.compiler.reset()
    return [
        Timing(
            recipe,
            {name: lambda r=recipe, c=way: _runnable(r, size, c) for name, way in ways.items()},
        )
        for recipe in ("bf16", *recipes())
    ]


def table(rows: list[Row]) -> list[Row]:
    """Milliseconds of a forward and a backward pass."""
    return [
        {
            "recipe": row["name"],
            **{f"{name}, ms": 1e3 * value for name, value in row["seconds"].items()},
            "compiled, of eager": row["seconds"]["compiled"] / row["seconds"]["eager"],
        }
        for row in rows
        if len(row["seconds"]) == 2
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpt", description="Eager and compiled steps of a GPT."
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", default="small", help="of the demo's models")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = partial(interleaved, rounds=options.rounds)
    print(markdown(table([measure(timing, seconds) for timing in timings(options.size)])))


if __name__ == "__main__":
    main()
