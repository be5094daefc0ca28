"""Times products of bfloat16 operands for every layout of the operands in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.timing import Row, Timing, ready

Tensor = torch.Tensor
#: Layout of the two operands, where ``t`` is a transposed view -> the product that has it.
LAYOUTS = {"nn": "dgrad", "nt": "fprop", "tn": "wgrad", "tt": "-"}
#: Ways to compute a product; those in float32 include the conversions.
_WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bfloat16": torch.mm,
    "float32": lambda a, b: torch.mm(a.float(), b.float()).bfloat16(),
    "float32, laid out": lambda a, b: torch.mm(
        a.float().contiguous(), b.float().contiguous()
    ).bfloat16(),
}


def timings(n: int) -> list[Timing]:
    """A row for each layout, with matrices ``[n, n]``."""
    x, y = (torch.randn(n, n).bfloat16() for _ in range(2))
    rows = []
    for layout in LAYOUTS:
        a, b = (m.t() if side == "t" else m for m, side in zip((x, y), layout, strict=True))
        runs = {name: ready(partial(way, a, b)) for name, way in _WAYS.items()}
        rows.append(Timing(layout, runs))
    return rows


def table(rows: list[Row]) -> list[Row]:
    """Milliseconds of each way to compute a product."""
    return [
        {
            "layout": row["name"],
            "product": LAYOUTS[row["name"]],
            **{f"{name}, ms": 1e3 * value for name, value in row["seconds"].items()},
        }
        for row in rows
    ]
