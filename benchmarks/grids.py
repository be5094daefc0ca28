"""Draws ``docs/_static/layouts.png``, which shows the elements that share a scale in some layouts.

``python -m benchmarks.grids`` needs matplotlib. The drawings, and the shapes beneath them, are
computed from the layouts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ottava import Layout

PICTURE = Path(__file__).parents[1] / "docs" / "_static" / "layouts.png"
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LAYOUTS = {
    "per tensor": Layout(_E4M3, (None, None), columnwise="same"),
    "by row": Layout(_E4M3, (1, None)),
    "MXFP8, 1 × 32": Layout(_E4M3, (1, 32), _E8M0, "up"),
    "MXFP8, 32 × 32": Layout(_E4M3, (1, 32), _E8M0, "up", shared=(32, 32)),
    "blockwise, 1 × 128": Layout(_E4M3, (1, 128), columnwise="transposed"),
    "blockwise, 128 × 128": Layout(_E4M3, (128, 128), columnwise="transposed"),
    "a stranger's INT8, 8 × 64": Layout(torch.int8, (8, 64), rounding="floor"),
    "a stranger's E5M2 by column": Layout(torch.float8_e5m2, (None, 1)),
}
# The cells that are drawn of a tensor.
ROWS, COLUMNS = 8, 12
# Side of a block that is neither 1 nor all -> the number of cells that stand for it.
SIDES = {8: 2, 32: 4, 64: 4, 128: 4}
_COLORS = (
    ("#cfe0f5", "#9dbfe8"),
    ("#fbe3c4", "#f3c489"),
    ("#d5ecd4", "#a9d7a7"),
    ("#e6d3ee", "#cba6dc"),
)


def cells(side: int | None, count: int) -> list[int]:
    """The number of the block that each cell is in, along a dimension of ``count`` cells."""
    width = count if side is None else SIDES.get(side, 1)
    return [at // width for at in range(count)]


def blocks(layout: Layout, columnwise: bool) -> list[list[tuple[int, int]]]:
    """The block of each cell of the stored data."""
    rows, columns = (COLUMNS, ROWS) if columnwise and layout.transposed else (ROWS, COLUMNS)
    block = layout.shared or layout.stored_block(columnwise)
    return [[(row, column) for column in cells(block[1], columns)] for row in cells(block[0], rows)]


def size(side: int | None, name: str) -> str:
    """The number of blocks along the dimension ``name``, as a text."""
    if side is None:
        return "1"
    return name if side == 1 else f"{name}/{side}"


def shapes(layout: Layout, columnwise: bool) -> str:
    """The shapes of stored data and scales of a tensor ``[M, K]``."""
    names = ("K", "M") if columnwise and layout.transposed else ("M", "K")
    grid = (
        size(side, name) for side, name in zip(layout.stored_block(columnwise), names, strict=True)
    )
    return f"data [{', '.join(names)}]\nscales [{', '.join(grid)}]"


def _panel(axes: Any, layout: Layout, columnwise: bool) -> None:
    from matplotlib.patches import Rectangle

    every = blocks(layout, columnwise)
    for top, row in enumerate(every):
        for left, (down, across) in enumerate(row):
            color = _COLORS[down % len(_COLORS)][across % 2]
            axes.add_patch(
                Rectangle((left, top), 1, 1, facecolor=color, edgecolor="white", linewidth=0.5)
            )
            # A dark line separates blocks.
            if left and row[left - 1] != row[left]:
                axes.plot((left, left), (top, top + 1), color="#444444", linewidth=1.1)
            if top and every[top - 1][left] != row[left]:
                axes.plot((left, left + 1), (top, top), color="#444444", linewidth=1.1)
    height, width = len(every), len(every[0])
    axes.add_patch(Rectangle((0, 0), width, height, fill=False, edgecolor="#444444", linewidth=1.3))
    axes.set_xlim(-0.2, COLUMNS + 0.2)
    axes.set_ylim(COLUMNS + 0.2, -0.2)
    axes.set_anchor("NW")
    axes.set_aspect("equal")
    axes.axis("off")
    title = "rowwise"
    if layout.columnwise == "same":
        title = "rowwise and columnwise"
    elif columnwise:
        title = "columnwise, transposed" if layout.transposed else "columnwise"
    axes.set_title(title, fontsize=9, pad=3, loc="left")
    axes.text(
        0, height + 0.4, shapes(layout, columnwise), fontsize=8.5, va="top", family="monospace"
    )


def draw(out: Path) -> None:
    """Draw all layouts, two beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = [list(LAYOUTS.items())[at : at + 2] for at in range(0, len(LAYOUTS), 2)]
    # Transposed data have more rows, so they need a higher figure.
    heights = [3.35 if any(layout.transposed for _, layout in line) else 2.6 for line in lines]
    figure = plt.figure(figsize=(10, sum(heights)), facecolor="white")
    strips = figure.subfigures(len(lines), 1, height_ratios=heights)
    for height, line, strip in zip(heights, lines, strips, strict=True):
        for (name, layout), half in zip(line, strip.subfigures(1, 2), strict=True):
            half.suptitle(
                name, fontsize=12, fontweight="bold", x=0.05, y=1 - 0.1 / height, ha="left"
            )
            for columnwise, axes in enumerate(half.subplots(1, 2)):
                if columnwise and layout.columnwise == "same":
                    axes.axis("off")
                else:
                    _panel(axes, layout, bool(columnwise))
            half.subplots_adjust(
                left=0.05, right=0.99, top=1 - 0.55 / height, bottom=0.0, wspace=0.08
            )
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grids", description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE)
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
