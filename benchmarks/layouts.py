"""Products of every layout of their operands, in bfloat16 and of the same operands in float32,
conversions included."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import Row, Run, Timing

#: What fprop, dgrad and wgrad make of their operands, and what nothing makes: ``t`` is a transposed
#: view.
LAYOUTS = {"nn": "dgrad", "nt": "fprop", "tn": "wgrad", "tt": "-"}


def _operand(n: int, transposed: bool) -> torch.Tensor:
    made = torch.randn(n, n).bfloat16()
    return made.t() if transposed else made


def _bfloat16(a: torch.Tensor, b: torch.Tensor) -> Run:
    return lambda: torch.mm(a, b)


def _float32(a: torch.Tensor, b: torch.Tensor) -> Run:
    return lambda: torch.mm(a.float(), b.float()).bfloat16()


def _untransposed(a: torch.Tensor, b: torch.Tensor) -> Run:
    """As ``_float32``, of operands that are laid out anew."""
    return lambda: torch.mm(a.float().contiguous(), b.float().contiguous()).bfloat16()


_WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], Run]] = {
    "bfloat16": _bfloat16,
    "float32": _float32,
    "float32, laid out": _untransposed,
}


def timings(n: int) -> list[Timing]:
    """A row for each layout, of matrices of ``n`` by ``n``."""
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
    """Milliseconds of each way."""
    made = []
    for row in rows:
        seconds = {f"{name}, ms": 1e3 * value for name, value in row["seconds"].items()}
        made.append({"layout": row["name"], "product": LAYOUTS[row["name"]], **seconds})
    return made
