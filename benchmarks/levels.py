"""Times quantization into small elements, against plain torch, and options against none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from benchmarks.timing import Row, Timing, ready
from ottava import Layout
from ottava.formats import E4M3, E8M0
from ottava.kernels import reference
from ottava.kernels import table as operations
from ottava.layout import Rotation

Tensor = torch.Tensor
#: The signs of NVFP4's transform.
_ROTATION = Rotation(16, 0xA7E8)


def _nvfp4(block: tuple[int, int] = (1, 16), **options: Any) -> Layout:
    return Layout(
        "E2M1",
        block,
        E4M3.torch_dtype,
        columnwise="transposed",
        second_level="tensor",
        **options,
    )


def _mx(element: str, rule: str, **options: Any) -> Layout:
    return Layout(element, (1, 32), E8M0.torch_dtype, rule, columnwise="transposed", **options)


class Case(NamedTuple):
    """A layout, quantized along rows and columns.

    Attributes:
        layout: the layout.
        plain: the name of the case that has none of its options; None for one without options.
        eager: whether the same in plain torch is timed, which takes seconds.
    """

    layout: Layout
    plain: str | None = None
    eager: bool = False


CASES: dict[str, Case] = {
    "NVFP4": Case(_nvfp4(), eager=True),
    "NVFP4, stochastic rounding": Case(_nvfp4(stochastic=True), "NVFP4"),
    "NVFP4, rotated columns": Case(_nvfp4(rotation=_ROTATION), "NVFP4"),
    "NVFP4, rotated columns, stochastic rounding": Case(
        _nvfp4(rotation=_ROTATION, stochastic=True), "NVFP4"
    ),
    "NVFP4, 4-over-6": Case(_nvfp4(candidates=(1.0, 1.5), bound=256.0), "NVFP4"),
    "NVFP4, 16 × 16": Case(_nvfp4((16, 16))),
    "NVFP4, 16 × 16, stochastic rounding": Case(
        _nvfp4((16, 16), stochastic=True), "NVFP4, 16 × 16"
    ),
    "NVFP4, 16 × 16, 4-over-6": Case(
        _nvfp4((16, 16), candidates=(1.0, 1.5), bound=256.0), "NVFP4, 16 × 16"
    ),
    "MXFP4, even": Case(_mx("E2M1", "even"), eager=True),
    "MXFP4, even, 32 × 32, two candidates": Case(
        _mx("E2M1", "even", shared=(32, 32), candidates=(1.0, 0.5))
    ),
    "MXFP6 E2M3, floor": Case(_mx("E2M3", "floor")),
    "MXINT8, floor": Case(_mx("MXINT8", "floor")),
}


class Call:
    """A call on an input with its seed, and room for the results."""

    def __init__(self, x: Tensor, layout: Layout) -> None:
        self._text = layout.text
        self._x = x
        self._seed = torch.tensor(0x5EED) if layout.stochastic else None
        self.outputs = operations.grid_quantize_levels.outputs(
            x, self._seed, 0, self._text, True, True
        )

    def ours(self) -> None:
        """With the kernels of the device."""
        operations.grid_quantize_levels.into(
            self.outputs, self._x, self._seed, 0, self._text, True, True
        )

    def eager(self) -> None:
        """In plain torch."""
        reference.grid_quantize_levels(self._x, self._seed, 0, self._text, self.outputs)


def check_same_bytes(x: Tensor) -> None:
    """Check that kernels and plain torch make the same bytes.

    Raises:
        AssertionError: they do not.
    """
    for name, case in CASES.items():
        ours, plain = Call(x, case.layout), Call(x, case.layout)
        ours.ours()
        plain.eager()
        pairs = zip(ours.outputs, plain.outputs, strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs), name


def timings(n: int, dtype: torch.dtype = torch.bfloat16) -> list[Timing]:
    """A timing for each case on ``[n, n]``, beside that of the case without its options."""
    x = torch.randn(n, n).to(dtype)
    rows = []
    for name, case in CASES.items():
        call = Call(x, case.layout)
        runs = {"ottava": ready(call.ours)}
        if case.plain is not None:
            runs["plain"] = ready(Call(x, CASES[case.plain].layout).ours)
        if case.eager:
            runs["eager"] = ready(call.eager)
        rows.append(Timing(name, runs))
    return rows


def table(rows: list[Row]) -> list[Row]:
    """Milliseconds, and the ratios to plain torch and to the case without the options."""
    table_rows = []
    for row in rows:
        seconds = row["seconds"]
        ours = seconds["ottava"]
        table_rows.append(
            {
                "rows and columns": row["name"],
                "milliseconds": 1e3 * ours,
                "times eager": seconds["eager"] / ours if "eager" in seconds else None,
                "of the time without options": ours / seconds["plain"]
                if "plain" in seconds
                else None,
            }
        )
    return table_rows
