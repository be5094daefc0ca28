"""Draws a run of delayed scaling with a spike in its inputs."""

from __future__ import annotations

from pathlib import Path

import torch

import ottava

STEPS, SPIKE, FACTOR = 80, 30, 12.0
#: Name of a curve -> the options of the recipe, and a color.
CASES: dict[str, tuple[dict[str, object], str]] = {
    "history 16": ({"amax_history_len": 16}, "#e69f00"),
    "history 16, margin 2": ({"amax_history_len": 16, "margin": 2}, "#0072b2"),
    "most recent": ({"amax_compute_algo": "most_recent"}, "#009e73"),
}
Curves = dict[str, list[float]]


def _curves(options: dict[str, object]) -> Curves:
    """Train one layer, and record its input in each step.

    Returns:
        ``amax``, ``limit`` (the largest value at the step's scale) and ``clamped`` (percent of the
        elements) of each step.
    """
    from ottava_delayed import scaling_statistics

    torch.manual_seed(0)
    layer = ottava.convert(torch.nn.Linear(64, 64), ottava.get_recipe("delayed", **options))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(1)
    curves: Curves = {"amax": [], "limit": [], "clamped": []}
    before = 0
    for step in range(STEPS):
        x = torch.randn(256, 64, generator=random) * (FACTOR if step == SPIKE else 1.0)
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        slot = scaling_statistics(layer)[""]["input"]
        curves["amax"].append(x.abs().max().item())
        curves["limit"].append(448.0 / slot.scale)
        curves["clamped"].append(100.0 * (slot.saturated - before) / x.numel())
        before = slot.saturated
    return curves


def runs() -> dict[str, Curves]:
    """The curves of every case."""
    return {name: _curves(options) for name, (options, _) in CASES.items()}


def draw(results: dict[str, Curves], out: Path) -> None:
    """Draw amaxes, scales and clamped elements."""
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    amax = next(iter(results.values()))["amax"]
    above.plot(amax, color="black", marker=".", linewidth=0.8, label="amax of the step's input")
    for name, curves in results.items():
        color, label = CASES[name][1], f"largest value at this scale: {name}"
        above.step(range(STEPS), curves["limit"], where="mid", color=color, label=label)
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
    plt.close(figure)
