"""The sections of the benchmarks: what each measures, and where the docs show it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    ablation,
    analysis,
    comparison,
    grids,
    imports,
    ingredient_pictures,
    ingredients,
    kernels,
    layers,
    levels,
    resources,
    rounding,
    shards,
    spike,
    watching,
)
from benchmarks.markdown import markdown
from benchmarks.timing import Row, Timing, interleaved, measure

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
GPU_RESULTS = FOLDER / "gpu_results.json"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """How sections are run.

    Attributes:
        rounds: the number of turns.
        quick: whether sizes are tiny and figures mean nothing.
        threads: the number of threads.
    """

    rounds: int = 15
    quick: bool = False
    threads: int = 2

    @property
    def compiler(self) -> str:
        """The backend of torch.compile; Inductor takes long, which a quick run has not."""
        return "eager" if self.quick else "inductor"


@dataclass(frozen=True)
class Timed:
    """A section of the page of benchmarks, whose figures belong to a kind of machine.

    Attributes:
        title: its title, with places for the sizes.
        sizes: the sizes that are measured.
        tiny: the sizes of a quick run.
        timings: the rows of named alternatives that are measured, for sizes and settings.
        table: the rows of the page, for measured rows.
        host: whether the host's time for bursts of calls is measured, on one thread. The fastest
            burst counts, because other work of the machine can only slow a burst.
    """

    title: str
    sizes: Sequence[int]
    tiny: Sequence[int]
    timings: Callable[[Sequence[int], Settings], Iterable[Timing]]
    table: Callable[[list[Row]], list[Row]]
    host: bool = False

    def measure(self, settings: Settings) -> tuple[str, list[Row]]:
        """The title, and the rows of the page."""
        sizes = self.tiny if settings.quick else self.sizes
        rounds = 1 if settings.quick else settings.rounds
        seconds = partial(interleaved, rounds=rounds, warmup=0 if settings.quick else 3)
        if self.host:
            seconds = partial(seconds, host=True, calls=10, statistic=min, rounds=10 * rounds)
        torch.set_num_threads(1 if self.host else settings.threads)
        rows = [measure(timing, seconds) for timing in self.timings(sizes, settings)]
        return self.title.format(*sizes), self.table(rows)


@dataclass(frozen=True)
class Part:
    """Parts of other pages that are made of one measurement.

    Attributes:
        measure: what is measured, for settings.
        page: the page that has a text between marks with the section's name.
        text: the text, for what was measured.
        picture: the file of a picture.
        draw: draws the picture into a file, for what was measured.
        results: the file that keeps what was measured.
        threads: the number of threads, if it is always the same.
    """

    measure: Callable[[Settings], Any]
    page: str = ""
    text: Callable[[Any], str] = str
    picture: str = ""
    draw: Callable[[Any, Path], None] | None = None
    results: Path | None = None
    threads: int | None = None


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _kernels(sizes: Sequence[int], settings: Settings) -> list[Timing]:
    kernels.check_same_bytes(kernels.Set(torch.randn(256, 256).bfloat16()))
    return kernels.timings(sizes[0], compiler=settings.compiler)


def _levels(sizes: Sequence[int], _: Settings) -> list[Timing]:
    levels.check_same_bytes(torch.randn(256, 256).bfloat16())
    return levels.timings(sizes[0])


def _host(sizes: Sequence[int], _: Settings) -> list[Timing]:
    rows, features_in, features_out = sizes
    return layers.host_timings((rows, features_in, features_out), CPU)


TIMED: dict[str, Timed] = {
    "kernels": Timed("Kernels, bf16 {}²", (4096,), (256,), _kernels, kernels.table),
    "shards": Timed(
        "Shards of float32 weights, quantized as bf16",
        (400,),
        (4,),
        lambda sizes, _: shards.timings(*sizes),
        shards.table,
    ),
    "four_bits": Timed("Small elements, bf16 {}²", (4096,), (256,), _levels, levels.table),
    "linear": Timed(
        "Linear without bias, forward and backward, BF16 in and out",
        (512, 1024, 2048),
        (64,),
        lambda sizes, _: layers.timings(sizes),
        layers.table,
    ),
    "host": Timed(
        "Host time of a bound layer, {}x{}x{}, float32, one thread",
        (16, 64, 64),
        (16, 64, 64),
        _host,
        layers.host_table,
        host=True,
    ),
    "imports": Timed("Imports", (), (), lambda *_: imports.timings(), imports.table),
}

PARTS: dict[str, Part] = {
    "recipes": Part(lambda _: comparison.recipes(), "which-recipe.md"),
    "memory": Part(lambda _: comparison.memory(), "memory.md"),
    "noise": Part(lambda _: comparison.noise(), "numerics.md"),
    "speed": Part(
        lambda _: comparison.speed(load(RESULTS), load(GPU_RESULTS)),
        "speed.md",
    ),
    "statistics": Part(
        lambda settings: (
            watching.rows(1, "tiny") if settings.quick else watching.rows(settings.rounds)
        ),
        "debug.md",
        markdown,
        threads=1,
    ),
    "exponents": Part(
        lambda settings: watching.exponents(*((1, "tiny") if settings.quick else ())),
        picture="exponents.png",
        draw=watching.draw_exponents,
    ),
    "rounding": Part(
        lambda settings: rounding.measure(settings.quick),
        "mxfp8.md",
        rounding.table,
        "mx_rounding.png",
        rounding.draw,
        FOLDER / "rounding.json",
    ),
    "resources": Part(
        lambda settings: resources.measure(*resources.QUICK if settings.quick else ()),
        "gpu_resources.md",
        resources.text,
    ),
    "analysis": Part(
        lambda settings: analysis.report(1 if settings.quick else analysis.STEPS),
        picture="analyze.png",
        draw=analysis.draw,
    ),
    "layouts": Part(lambda _: grids.LAYOUTS, picture="layouts.png", draw=grids.draw),
    "spike": Part(lambda _: spike.runs(), picture="delayed_spike.png", draw=spike.draw),
    "nvfp4_block": Part(
        lambda _: ingredient_pictures.block(),
        picture="nvfp4_block.svg",
        draw=ingredient_pictures.draw_block,
    ),
    "second_level": Part(
        lambda _: ingredients.second_level(),
        picture="second_level.svg",
        draw=ingredient_pictures.draw_second_level,
    ),
    "rotations": Part(
        lambda settings: ingredients.rotations(*((1,) if settings.quick else ())),
        "four-bits.md",
        ingredients.rotations_text,
        "rotations.svg",
        ingredient_pictures.draw_rotations,
        FOLDER / "rotations.json",
    ),
    "random_rounding": Part(
        lambda _: ingredients.random_rounding(),
        picture="random_rounding.svg",
        draw=ingredient_pictures.draw_random_rounding,
    ),
    "squares": Part(
        lambda _: ingredients.squares(),
        picture="squares.svg",
        draw=ingredient_pictures.draw_squares,
    ),
    "four_over_six": Part(
        lambda _: ingredients.four_over_six(),
        "four-bits.md",
        ingredients.four_over_six_text,
        "four_over_six.svg",
        ingredient_pictures.draw_four_over_six,
    ),
    "ablation": Part(
        lambda settings: ablation.measure(
            settings.threads, *((1, "tiny") if settings.quick else ())
        ),
        "four-bits.md",
        ablation.text,
        results=FOLDER / "ablation.json",
    ),
}
#: The parts that are made of results that are kept.
KEPT = ("speed", "rounding", "rotations", "ablation")
