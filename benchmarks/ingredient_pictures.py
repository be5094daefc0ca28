"""Draws what :mod:`benchmarks.ingredients` measures, and the bytes of a block in NVFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks import ingredients
from benchmarks.timing import Row
from ottava_nvfp4 import NVFP4Quantizer

BLUE, ORANGE, GREEN, PINK, GREY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#555555"
#: Widths in inches, and sizes of text, that are readable in a column of the pages.
_WIDTH = 9.0


def _subplots(columns: int, height: float, **options: Any) -> Any:
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "ottava"  # or the ids of each file are others
    return plt.subplots(
        1, columns, figsize=(_WIDTH, height), layout="constrained", facecolor="white", **options
    )


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, out: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)


# -- the format --


def block() -> Row:
    """A block of 16 in a tensor of NVFP4: its values and what is stored."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(4, 64, generator=random)
    x[2, 40] = 9.0
    q = NVFP4Quantizer(columnwise=False)(x)
    scale = q._rowwise_scale_inv.view(torch.float8_e4m3fn)[0, 0]
    data = q._rowwise_data[0, :8].tolist()
    return {
        "values": x[0, :16].tolist(),
        "codes": [code for byte in data for code in (byte & 15, byte >> 4)],
        "bytes": data,
        "scale": scale.float().item(),
        "scale_byte": int(scale.view(torch.uint8)),
        "amax": q._amax_rowwise.item(),
        "decoded": q.dequantize()[0, :16].tolist(),
    }


def _number(code: int) -> float:
    """The number of a code of E2M1."""
    return (-1.0 if code & 8 else 1.0) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7]


def _cells(axes: Any, name: str, top: float, height: float, color: str, texts: list[str]) -> None:
    """A row of cells that fill the width of the 16 elements, with its name on the left."""
    from matplotlib.patches import Rectangle

    width, middle = 16 / len(texts), top + height / 2 + 0.02
    axes.text(-0.25, middle, name, ha="right", va="center", fontsize=10)
    for at, text in enumerate(texts):
        corner, style = (at * width, top), {"edgecolor": "white", "linewidth": 1.5}
        axes.add_patch(Rectangle(corner, width, height, facecolor=color, **style))
        axes.text((at + 0.5) * width, middle, text, ha="center", va="center", fontsize=9.5)


def draw_block(results: Row, out: Path) -> None:
    """Draw the values of a block, its elements, bytes and scales, and what they stand for."""
    figure, axes = _subplots(1, 4.2)
    codes = results["codes"]
    _cells(axes, "values", 0, 0.8, "#eeeeee", [f"{v:.2f}" for v in results["values"]])
    _cells(axes, "elements, E2M1", 1.3, 0.8, "#cfe0f5", [f"{_number(c):g}" for c in codes])
    _cells(axes, "their bits", 2.1, 0.8, "#cfe0f5", [f"{c:04b}" for c in codes])
    pairs = [f"{byte >> 4:04b} {byte & 15:04b}\n0x{byte:02x}" for byte in results["bytes"]]
    _cells(axes, "bytes", 2.9, 1.2, "#9dbfe8", pairs)
    block_scale = (
        f"for the block, E4M3: 0x{results['scale_byte']:02x}, which is {results['scale']:g}"
    )
    tensor_scale = f"for the tensor, float32: its amax {results['amax']:g}"
    _cells(axes, "scale", 4.4, 0.8, "#fbe3c4", [block_scale])
    _cells(axes, "second level", 5.2, 0.8, "#e6d3ee", [tensor_scale])
    _cells(axes, "decoded", 6.9, 0.8, "#d5ecd4", [f"{v:.2f}" for v in results["decoded"]])
    formula = "element × scale × amax / (448 × 6)"
    axes.text(8, 6.45, formula, ha="center", va="center", fontsize=10)
    axes.set(xlim=(-2.8, 16.1), ylim=(7.8, -0.1))
    axes.axis("off")
    _save(figure, out)


# -- the ingredients --


def draw_second_level(results: dict[str, list[float]], out: Path) -> None:
    """Draw errors against the size of the tensor."""
    figure, axes = _subplots(1, 3.8)
    styles = ((ORANGE, "-", 1.8), (PINK, "-", 1.8), (BLUE, "-", 2.4), (GREEN, "--", 1.8))
    for (name, errors), (color, style, width) in zip(results.items(), styles, strict=True):
        percent = [100 * error for error in errors]
        axes.plot(ingredients.EXPONENTS, percent, style, color=color, linewidth=width, label=name)
    axes.set_xticks(range(-32, 25, 8), [f"$2^{{{e}}}$" for e in range(-32, 25, 8)])
    axes.set(xlabel="standard deviation of a normal tensor", ylabel="relative error (%)")
    axes.set_ylim(0, 105)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    axes.set_title("Error against the size of the tensor", fontsize=11)
    _tidy(axes)
    _save(figure, out)


_ROTATED_COLORS = (GREEN, PINK, ORANGE, BLUE)


def _draw_pairs(axes: Any, at: list[float], pairs: dict[str, list[list[float]]]) -> None:
    """Lines of SQNR, dashed without and solid with the rotation."""
    for (name, rows), color in zip(pairs.items(), _ROTATED_COLORS, strict=True):
        plain, rotated = zip(*rows, strict=True)
        axes.plot(at, plain, "--", color=color, linewidth=1.5)
        axes.plot(at, rotated, "-", color=color, linewidth=2, label=name)
    _tidy(axes)


def draw_rotations(results: Row, out: Path) -> None:
    """Draw SQNR against the fraction and the size of outliers."""
    figure, (left, right) = _subplots(2, 4.2, sharey=True)
    percent = [100 * fraction for fraction in ingredients.FRACTIONS]
    _draw_pairs(left, percent, results["fractions"])
    left.set_xscale("symlog", linthresh=0.01)
    ticks = (0, 0.01, 0.1, 1, 10)
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set(xlabel="elements that are 10 times larger (%)", ylabel="SQNR (dB)", ylim=(12, 45))
    left.set_title("Fraction of outliers", fontsize=11)
    _draw_pairs(right, list(ingredients.SIZES), results["sizes"])
    right.set_xscale("log")
    sizes = (1, 3, 10, 30, 100)
    right.set_xticks(sizes, [str(size) for size in sizes])
    right.set_xlabel("times that 1 % of the elements are larger")
    right.set_title("Size of outliers", fontsize=11)
    left.plot([], [], "--", color=GREY, label="without rotation")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    _save(figure, out)


def draw_random_rounding(results: Row, out: Path) -> None:
    """Draw means of roundings, and errors of sums of gradients."""
    figure, (left, right) = _subplots(2, 3.8)
    styles = {"nearest": (ORANGE, "nearest"), "random": (BLUE, "at random")}
    left.plot((0, 6), (0, 6), color=GREY, linewidth=0.8)
    for name, means in results["means"].items():
        color, label = styles[name]
        left.plot(results["values"], means, ".", color=color, markersize=3.5, label=label)
    left.set(xlabel="value, in units of the block's scale", aspect="equal")
    left.set_ylabel(f"mean of {ingredients.ROUNDINGS} roundings")
    left.set_title("One value", fontsize=11)
    steps = [2**power for power in range(len(results["errors"]["nearest"]))]
    for name, errors in results["errors"].items():
        color, label = styles[name]
        right.plot(steps, [100 * e for e in errors], "o-", color=color, markersize=4, label=label)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_yticks((2, 5, 10, 20, 50), ["2", "5", "10", "20", "50"])
    right.minorticks_off()
    right.set(xlabel="gradients in the sum", ylabel="relative error of the sum (%)")
    right.set_title("A sum of small gradients beside large ones", fontsize=11)
    for axes in (left, right):
        _tidy(axes)
        axes.legend(fontsize=9)
    _save(figure, out)


def draw_squares(results: Row, out: Path) -> None:
    """Draw errors of weights, and the difference between their directions."""
    figure, (bars, *patches) = _subplots(3, 3.4, width_ratios=(1.45, 1, 1))
    names = [row["layout"] for row in results["rows"]]
    columns = {"forward": BLUE, "backward": GREEN, "difference": ORANGE}
    for at, (column, color) in enumerate(columns.items()):
        heights = [index + 0.27 * (at - 1) for index in range(len(names))]
        lengths = [100 * row[column] for row in results["rows"]]
        label = "between them" if column == "difference" else f"{column} pass"
        bars.barh(heights, lengths, height=0.25, color=color, label=label)
    bars.set_yticks(range(len(names)), names, fontsize=9)
    bars.invert_yaxis()
    bars.set_xlabel("relative error or difference (%)")
    bars.legend(
        fontsize=8.5,
        loc="lower left",
        bbox_to_anchor=(-0.45, 1),
        ncols=3,
        frameon=False,
        columnspacing=1,
        handlelength=1,
    )
    _tidy(bars)
    for axes, name in zip(patches, names[:2], strict=True):
        patch = results["patches"][name]
        # A clip path of an image has another id in each process.
        image = axes.imshow(patch, cmap="RdBu", vmin=-0.6, vmax=0.6, clip_on=False)
        axes.set_title(name, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    bar = figure.colorbar(image, ax=patches, shrink=0.72, pad=0.03)
    bar.set_label("forward - backward, σ = 1", fontsize=9)
    _save(figure, out)


def draw_four_over_six(results: Row, out: Path) -> None:
    """Draw the distribution of the errors of blocks."""
    import numpy as np

    figure, (left, right) = _subplots(2, 3.6, width_ratios=(1.5, 1))
    edges = np.linspace(0, 18, 73)
    styles = {"without": (GREY, "-"), "MAE": (BLUE, "-"), "MSE": (ORANGE, "--")}
    for name, (color, style) in styles.items():
        counts, _ = np.histogram(100 * np.array(results["blocks"][name]), edges)
        shares = 100 * counts / counts.sum()
        left.stairs(shares, edges, color=color, linestyle=style, linewidth=1.8, label=name)
    left.set(xlabel="relative error of a block (%)", ylabel="blocks (%)")
    left.set_title("Blocks of a normal tensor", fontsize=11)
    left.legend(fontsize=9)
    rows = [row for row in results["rows"] if row["4-over-6"] in styles]
    for at, column in enumerate(("mean error", "root mean square")):
        for index, row in enumerate(rows):
            height, length = at + 0.27 * (index - 1), 100 * row[column]
            right.barh(height, length, height=0.25, color=styles[row["4-over-6"]][0])
            right.text(length + 0.1, height, f"{length:.2f}", va="center", fontsize=9)
    right.set_yticks((0, 1), ("mean\nerror", "root mean\nsquare"), fontsize=9)
    right.invert_yaxis()
    right.set_xlim(0, 11.5)
    right.set_xlabel("relative error of the tensor (%)")
    right.set_title("All elements", fontsize=11)
    for axes in (left, right):
        _tidy(axes)
    _save(figure, out)
