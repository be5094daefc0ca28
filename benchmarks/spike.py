"""Draws ``docs/_static/delayed_spike.png``, a run of delayed scaling with a spike in its inputs.

The picture shows amaxes, scales and clamped elements. ``python -m benchmarks.spike`` needs
``ottava-recipes-delayed`` and matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import ottava

STEPS, SPIKE, FACTOR = 80, 30, 12.0
CASES = {
    "history 16": {"amax_history_len": 16},
    "history 16, margin 2": {"amax_history_len": 16, "margin": 2},
    "most recent": {"amax_compute_algo": "most_recent"},
}


def run(options: dict[str, object]) -> dict[str, list[float]]:
    """Train one layer, and record its input in each step.

    Returns:
        ``amax``, ``limit`` (the largest value at the step's scale) and ``clamped`` (percent of the
        elements) of each step.
    """
    from ottava_delayed import DelayedScaling, scaling_statistics

    torch.manual_seed(0)
    recipe = DelayedScaling(**options)  # type: ignore[arg-type]
    layer = ottava.convert(torch.nn.Linear(64, 64), recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(1)
    record: dict[str, list[float]] = {"amax": [], "limit": [], "clamped": []}
    before = 0
    for step in range(STEPS):
        x = torch.randn(256, 64, generator=random) * (FACTOR if step == SPIKE else 1.0)
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        slot = scaling_statistics(layer)[""]["input"]
        record["amax"].append(x.abs().max().item())
        record["limit"].append(448.0 / slot.scale)
        record["clamped"].append(100.0 * (slot.saturated - before) / x.numel())
        before = slot.saturated
    return record


def main() -> None:
    """Run every case and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spike", description=__doc__)
    default = Path(__file__).parents[1] / "docs" / "_static" / "delayed_spike.png"
    parser.add_argument("--out", type=Path, default=default)
    out: Path = parser.parse_args().out
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = {name: run(options) for name, options in CASES.items()}
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    amax = next(iter(results.values()))["amax"]
    above.plot(amax, color="black", marker=".", linewidth=0.8, label="amax of the step's input")
    for (name, curves), color in zip(
        results.items(), ("#e69f00", "#0072b2", "#009e73"), strict=True
    ):
        above.step(
            range(STEPS),
            curves["limit"],
            where="mid",
            color=color,
            label=f"largest value at this scale: {name}",
        )
        below.plot(curves["clamped"], color=color, marker=".", linewidth=0.8)
    above.set_yscale("log")
    above.set_ylabel("magnitude")
    above.legend(fontsize=8)
    below.set_ylabel("clamped (%)")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    above.set_title(f"One input {FACTOR:.0f} times larger, at step {SPIKE}")
    figure.savefig(out, dpi=130)
    for name, curves in results.items():
        print(
            f"{name}: clamped {max(curves['clamped'][1:]):.2f} % at the worst step after the first"
        )
    print(f"Picture {out}")


if __name__ == "__main__":
    main()
