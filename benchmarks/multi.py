"""Times many shards of float32 weights, quantized as bf16: one call against loops over them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernels import MX, TENSOR, Buffers, copies, torch_mx
from benchmarks.timing import Row, Run, Timing
from ottava import kernels
from ottava.kernels import table as operations
from ottava.kernels.backends import backend_module
from ottava.kernels.checks import Shards

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
COUNT, SIZE = 400, 10_000
# An MX shard is a quarter of a weight and has whole blocks, so that loops can quantize it too.
MX_SHAPE, MX_SHARD = (128, 320), (32, 320)

Tensors = list[torch.Tensor]


def _eager(xs: Tensors, outs: Tensors) -> None:
    # The numerator is a tensor, because the quotient of a Python number may be rounded twice.
    largest = torch.tensor(448.0)
    for x, out in zip(xs, outs, strict=True):
        values = x.bfloat16().float()
        scale = largest / values.abs().amax()
        out.copy_((values * scale).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8))


def _single(xs: Tensors, outs: Tensors) -> None:
    for x, out in zip(xs, outs, strict=True):
        values = x.bfloat16()
        scale, _ = kernels.scale_from_amax(kernels.amax(values), E4M3)
        operations.cast_amax.into([out, None, None], values, scale, None, None, E4M3)


def _multi(xs: Tensors, outs: Tensors) -> None:
    count = len(xs)
    places = xs, [BF16] * count, [(1, x.numel()) for x in xs], [0] * count, [TENSOR] * count
    scales, _ = kernels.scale_from_amax(kernels.grid_multi_amax(*places), E4M3)
    kernels.grid_multi_cast(
        *places, list(zip(scales.view(-1, 1, 1).unbind(), outs, strict=True)), [None] * count
    )


def _mx_eager(xs: Tensors, rowwise: list[Buffers], columnwise: list[Buffers]) -> None:
    for x, by_row, by_column in zip(xs, rowwise, columnwise, strict=True):
        torch_mx(x.bfloat16(), by_row, by_column, True)


def _mx_single(xs: Tensors, rowwise: list[Buffers], columnwise: list[Buffers]) -> None:
    for x, by_row, by_column in zip(xs, rowwise, columnwise, strict=True):
        operations.grid_quantize.into([*by_row, *by_column], x.bfloat16(), MX.text, True, True)


def _mx_multi(xs: Tensors, row_codes: Tensors, column_codes: Tensors) -> tuple[Tensors, Tensors]:
    """Quantize shards as a rank does, without the reduction of amaxes over ranks.

    The amaxes and scales are those of whole weights.
    """
    count, start = len(xs), MX_SHARD[0] * MX_SHARD[1]
    places = xs, [BF16] * count, [MX_SHAPE] * count, [start] * count, [MX] * count
    sizes = kernels.grid_amax_sizes(*MX_SHAPE, MX)
    _, scales = kernels.grid_scales(kernels.grid_multi_amax(*places), MX)
    by_row, by_column = scales.view(count, sum(sizes)).split(sizes, 1)
    row_shape, column_shape = (MX.scale_shape(MX_SHAPE, columnwise) for columnwise in (False, True))
    row_scales = [s.view(row_shape) for s in by_row.unbind()]
    column_scales = [s.view(column_shape) for s in by_column.unbind()]
    kernels.grid_multi_cast(
        *places,
        list(zip(row_scales, row_codes, strict=True)),
        list(zip(column_scales, column_codes, strict=True)),
    )
    return row_scales, column_scales


def timings(count: int = COUNT) -> list[Timing]:
    """One call against loops that make the same bytes.

    One row is for layouts with one scale for a weight, one for MX blocks along rows and columns.
    """
    xs = [torch.randn(SIZE) for _ in range(count)]
    outs, theirs, eager = (
        list(torch.empty(count, SIZE, dtype=torch.uint8).unbind()) for _ in range(3)
    )
    _multi(xs, outs)
    _single(xs, theirs)
    _eager(xs, eager)
    assert all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(outs, theirs, eager, strict=True)
    )

    parts = [torch.randn(MX_SHARD) for _ in range(count)]
    row_codes, column_codes, *more = (
        list(torch.empty(count, *MX_SHARD, dtype=torch.uint8).unbind()) for _ in range(4)
    )
    pairs = [
        [
            (codes, torch.empty(MX.scale_shape(MX_SHARD, columnwise), dtype=torch.uint8))
            for codes in buffers
        ]
        for buffers, columnwise in zip(more, (False, True), strict=True)
    ]
    row_scales, column_scales = _mx_multi(parts, row_codes, column_codes)
    for other in (_mx_eager, _mx_single):
        other(parts, *pairs)
        for i, (by_row, by_column) in enumerate(zip(*pairs, strict=True)):
            assert torch.equal(by_row[0], row_codes[i])
            assert torch.equal(by_column[0], column_codes[i])
            assert torch.equal(by_row[1], row_scales[i][MX_SHARD[0] : 2 * MX_SHARD[0]])
            assert torch.equal(by_column[1], column_scales[i][1:2])
    plain: dict[str, Callable[[], Run]] = {
        "ottava": lambda: lambda: _multi(xs, outs),
        "eager": lambda: lambda: _eager(xs, outs),
        "single": lambda: lambda: _single(xs, outs),
    }
    blocks: dict[str, Callable[[], Run]] = {
        "ottava": lambda: lambda: _mx_multi(parts, row_codes, column_codes),
        "eager": lambda: lambda: _mx_eager(parts, *pairs),
        "single": lambda: lambda: _mx_single(parts, *pairs),
    }
    return [
        Timing(f"{count} of {SIZE}, one scale each", plain),
        Timing(f"{count} of {MX_SHARD[0] * MX_SHARD[1]}, MX rows and columns", blocks),
    ]


def table(rows: list[Row]) -> list[Row]:
    """Milliseconds of one call, and the ratios of the loops' times to it."""
    return [
        {
            "shards": row["name"],
            "milliseconds": 1e3 * row["seconds"]["ottava"],
            "times eager, a loop": row["seconds"]["eager"] / row["seconds"]["ottava"],
            "times single kernels, a loop": row["seconds"]["single"] / row["seconds"]["ottava"],
        }
        for row in rows
    ]


def calls(
    device: torch.device, count: int = 200, size: int = 1 << 18, steps: int = 1024
) -> list[Timing]:
    """Timings of single calls against copies.

    The calls are those for shards of float32 weights, and the update of many slots.
    """
    if device.type == "cpu":
        count, size, steps = 20, SIZE, 16
    xs, outs = (
        torch.randn(count, size, device=device),
        torch.empty(count, size, dtype=torch.uint8, device=device),
    )
    slots, histories = (
        torch.ones(count, 3, device=device),
        torch.rand(count, steps, 3, device=device),
    )
    x, out, slot, history = (list(tensor.unbind()) for tensor in (xs, outs, slots, histories))
    shards = Shards(x, [BF16] * count, [(1, size)] * count, [0] * count)
    texts, pairs = (
        [TENSOR.text] * count,
        [(torch.full((1, 1), 50.0, device=device), each) for each in out],
    )
    amaxes, backend = torch.zeros(count, device=device), backend_module(device.type)
    # The first rows are given, as after a reduction over ranks. Without them the first call would
    # leave zeros in the first rows of the histories, and later calls would update nothing.
    last, maxima = torch.rand(3 * count, device=device) + 0.5, [448.0] * (3 * count)
    runs: dict[str, tuple[int, Run]] = {
        "multi_amax": (4 * xs.numel(), lambda: backend.grid_multi_amax(shards, texts, amaxes)),
        "multi_cast": (
            5 * xs.numel(),
            lambda: backend.grid_multi_cast(shards, texts, pairs, [None] * count),
        ),
        "update_scales": (
            8 * histories.numel(),
            lambda: kernels.update_scales(slot, history, maxima, last=last),
        ),
    }
    return [
        Timing(
            f"{name}, {count}",
            {"ottava": lambda run=run: run, "copy": lambda m=moved: copies(m, 1, device)},
            moved,
        )
        for name, (moved, run) in runs.items()
    ]
