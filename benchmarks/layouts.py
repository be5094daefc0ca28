"""Times products for every layout of their operands.

They are computed in bfloat16, and in float32 with the conversions included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import Row, Run, Timing

#: Layout of the two operands, where ``t`` is a transposed view -> the product that has it.
LAYOUTS = {"nn": "dgrad", "nt": "fprop", "tn": "wgrad", "tt": "-"}


def _operand(n: int, transposed: bool) -> torch.Tensor:
    matrix = torch.randn(n, n).bfloat16()
    return matrix.t() if transposed else matrix


def _bfloat16(a: torch.Tensor, b: torch.Tensor) -> Run:
    return lambda: torch.mm(a, b)


def _float32(a: torch.Tensor, b: torch.Tensor) -> Run:
    return lambda: torch.mm(a.float(), b.float()).bfloat16()


def _untransposed(a: torch.Tensor, b: torch.Tensor) -> Run:
    """The same as ``_float32``, with operands that are made contiguous first."""
    return lambda: torch.mm(a.float().contiguous(), b.float().contiguous()).bfloat16()


_WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], Run]] = {
    "bfloat16": _bfloat16,
    "float32": _float32,
    "float32, laid out": _untransposed,
}


def timings(n: int) -> list[Timing]:
    """A row for each layout, with matrices ``[n, n]``."""
    rows = []
    for layout in LAYOUTS:
        a, b = (_operand(n, letter == "t") for letter in layout)
        rows.append(
            Timing(
                layout, {name: lambda way=way, a=a, b=b: way(a, b) for name, way in _WAYS.items()}
            )
        )
    return rows


def table(rows: list[Row]) -> list[Row]:
    """Milliseconds of each way to compute a product."""
    table_rows = []
    for row in rows:
        milliseconds = {f"{name}, ms": 1e3 * value for name, value in row["seconds"].items()}
        table_rows.append({"layout": row["name"], "product": LAYOUTS[row["name"]], **milliseconds})
    return table_rows
