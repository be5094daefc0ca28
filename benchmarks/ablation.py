"""Trains the demo's model in four bits, with ingredients of the recipes left out or added."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

import ottava
from benchmarks.machine import cpu_model, this_kind
from benchmarks.markdown import markdown
from benchmarks.timing import Row
from ottava_demo.data import load_corpus
from ottava_demo.training import train

SIZE, STEPS, SEEDS = "small", 150, (0, 1, 2)
#: Recipe -> the options of each of its runs.
CASES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "bf16": ({},),
    "mxfp8": ({},),
    "nvfp4": (
        {},
        {"disable_rht": True},
        {"disable_stochastic_rounding": True},
        {"disable_2d_quantization": True},
        {
            "disable_rht": True,
            "disable_stochastic_rounding": True,
            "disable_2d_quantization": True,
        },
        {"row_scaled_activation": True},
        {"four_over_six": "weights"},
        {"four_over_six": "weights", "four_over_six_error": "MSE"},
        {"four_over_six": "weights", "four_over_six_bound": 448},
        {"four_over_six": "activations", "disable_rht": True},
        {"four_over_six": "all", "disable_rht": True},
        {"backward": "high_precision"},
        {"backward": "dequantized"},
    ),
    "mx": (
        {},
        {"rotation": 64},
        {"stochastic_rounding": True},
        {"rotation": 64, "stochastic_rounding": True},
        {"with_2d_quantization": True},
        {"backward": "high_precision"},
    ),
}


def _loss(recipe: str, options: dict[str, Any], seed: int, steps: int, size: str) -> float:
    """The validation loss of one training, in nats, on one thread."""
    torch.set_num_threads(1)
    bound = None if recipe == "bf16" else ottava.get_recipe(recipe, **options)
    run = train(bound, load_corpus(), size=size, steps=steps, device="cpu", seed=seed)
    return run.validation


def measure(processes: int = 1, steps: int = STEPS, size: str = SIZE) -> Row:
    """Train every case once for each seed, and give the losses with what they were measured on.

    Args:
        processes: how many trainings run at the same time. It changes no loss.
        steps: the steps of the optimizer.
        size: a size of the demo's model.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        runs = [
            (recipe, options, [pool.submit(_loss, recipe, options, s, steps, size) for s in SEEDS])
            for recipe, several in CASES.items()
            for options in several
        ]
        rows = []
        for recipe, options, losses in runs:
            row = {"recipe": recipe, "options": options, "losses": [f.result() for f in losses]}
            rows.append(row)
            print(row, flush=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "kind": str(this_kind(threads=1)),
        "steps": steps,
        "size": size,
        "rows": rows,
    }


def text(results: Row) -> str:
    """The table of the page, and what it was measured on."""
    plain = results["rows"][0]["losses"]
    rows = []
    for row in results["rows"]:
        losses = row["losses"]
        ratios = [100 * (loss / of - 1) for loss, of in zip(losses, plain, strict=True)]
        options = ", ".join(f"`{name}={value!r}`" for name, value in row["options"].items())
        rows.append(
            {
                "recipe": "BF16" if row["recipe"] == "bf16" else f"`{row['recipe']}`",
                "options": options or "-",
                "loss": sum(losses) / len(losses),
                "above BF16": f"{sum(ratios) / len(ratios):.2f} %",
                "lowest and highest seed": f"{min(ratios):.2f} to {max(ratios):.2f} %",
            }
        )
    return (
        f"{markdown(rows, '{:.3f}')}\n\n"
        f"*`python -m benchmarks ablation` measured this on {results['date']} with torch "
        f"{results['torch']}, on {results['cpu']} ({results['kind']}).*"
    )
