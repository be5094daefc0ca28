"""Draws the elements that share a scale in some layouts.

The drawings, and the shapes beneath them, are computed from the layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ottava import Layout

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
_CELLS = {8: 2, 32: 4, 64: 4, 128: 4}
_COLORS = (
    ("#cfe0f5", "#9dbfe8"),
    ("#fbe3c4", "#f3c489"),
    ("#d5ecd4", "#a9d7a7"),
    ("#e6d3ee", "#cba6dc"),
)
_EDGE = "#444444"


def blocks(layout: Layout, columnwise: bool) -> list[list[tuple[int, int]]]:
    """The block of each cell of the stored data."""
    shape = (COLUMNS, ROWS) if columnwise and layout.transposed else (ROWS, COLUMNS)
    sides = layout.shared or layout.stored_block(columnwise)
    high, wide = (
        count if side is None else _CELLS.get(side, 1)
        for side, count in zip(sides, shape, strict=True)
    )
    return [
        [(row // high, column // wide) for column in range(shape[1])] for row in range(shape[0])
    ]


def shapes(layout: Layout, columnwise: bool) -> str:
    """The shapes of stored data and scales of a tensor ``[M, K]``."""
    names = ("K", "M") if columnwise and layout.transposed else ("M", "K")
    grid = [
        {None: "1", 1: name}.get(side, f"{name}/{side}")
        for side, name in zip(layout.stored_block(columnwise), names, strict=True)
    ]
    return f"data [{', '.join(names)}]\nscales [{', '.join(grid)}]"


def _title(layout: Layout, columnwise: bool) -> str:
    if layout.columnwise == "same":
        return "rowwise and columnwise"
    if not columnwise:
        return "rowwise"
    return "columnwise, transposed" if layout.transposed else "columnwise"


def _panel(axes: Any, layout: Layout, columnwise: bool) -> None:
    from matplotlib.patches import Rectangle

    cells = blocks(layout, columnwise)
    height, width = len(cells), len(cells[0])
    for top, row in enumerate(cells):
        for left, (down, across) in enumerate(row):
            color = _COLORS[down % len(_COLORS)][across % 2]
            cell = Rectangle((left, top), 1, 1, facecolor=color, edgecolor="white", linewidth=0.5)
            axes.add_patch(cell)
            # A dark line separates blocks.
            if left and row[left - 1] != row[left]:
                axes.plot((left, left), (top, top + 1), color=_EDGE, linewidth=1.1)
            if top and cells[top - 1][left] != row[left]:
                axes.plot((left, left + 1), (top, top), color=_EDGE, linewidth=1.1)
    axes.add_patch(Rectangle((0, 0), width, height, fill=False, edgecolor=_EDGE, linewidth=1.3))
    axes.set(xlim=(-0.2, COLUMNS + 0.2), ylim=(COLUMNS + 0.2, -0.2), aspect="equal", anchor="NW")
    axes.axis("off")
    axes.set_title(_title(layout, columnwise), fontsize=9, pad=3, loc="left")
    text = shapes(layout, columnwise)
    axes.text(0, height + 0.4, text, fontsize=8.5, va="top", family="monospace")


def draw(layouts: dict[str, Layout], out: Path) -> None:
    """Draw layouts, two beside each other."""
    from matplotlib import pyplot as plt

    lines = [list(layouts.items())[at : at + 2] for at in range(0, len(layouts), 2)]
    # Transposed data have more rows, so they need a higher figure.
    heights = [3.35 if any(layout.transposed for _, layout in line) else 2.6 for line in lines]
    figure = plt.figure(figsize=(10, sum(heights)), facecolor="white")
    strips = figure.subfigures(len(lines), 1, height_ratios=heights)
    for height, line, strip in zip(heights, lines, strips, strict=True):
        for (name, layout), half in zip(line, strip.subfigures(1, 2), strict=True):
            top = 1 - 0.1 / height
            half.suptitle(name, fontsize=12, fontweight="bold", x=0.05, y=top, ha="left")
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
