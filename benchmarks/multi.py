"""Many shards of float32 weights, quantized as bf16: one call for all of them against loops over them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernels import Buffers, torch_mx
from benchmarks.timing import interleaved
from ottava import kernels
from ottava.formats import mx_scale_shapes

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
COUNT, SIZE = 400, 10_000
# For MX a quarter of a weight, of whole blocks, so that the loops can do it as well.
MX_SHAPE, MX_SHARD = (128, 320), (32, 320)

Tensors = list[torch.Tensor]


def _eager(xs: Tensors, outs: Tensors) -> None:
    largest = torch.tensor(448.0)  # a number's quotient would not be correctly rounded
    for x, out in zip(xs, outs, strict=True):
        values = x.bfloat16().float()
        scale = largest / values.abs().amax()
        out.copy_((values * scale).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8))


def _single(xs: Tensors, outs: Tensors) -> None:
    for x, out in zip(xs, outs, strict=True):
        values = x.bfloat16()
        scale, _ = kernels.scale_from_amax(kernels.amax(values), E4M3)
        kernels.cast_out(values, scale, E4M3, out)


def _multi(xs: Tensors, outs: Tensors) -> None:
    dtypes = [BF16] * len(xs)
    scales, _ = kernels.scale_from_amax(kernels.multi_amax(xs, dtypes), E4M3)
    kernels.multi_cast(xs, dtypes, scales, [E4M3] * len(xs), outs)


def _mx_eager(xs: Tensors, rowwise: list[Buffers], columnwise: list[Buffers]) -> None:
    for x, by_row, by_column in zip(xs, rowwise, columnwise, strict=True):
        torch_mx(x.bfloat16(), by_row, by_column, True)


def _mx_single(xs: Tensors, rowwise: list[Buffers], columnwise: list[Buffers]) -> None:
    for x, by_row, by_column in zip(xs, rowwise, columnwise, strict=True):
        kernels.mx_quantize_out(x.bfloat16(), E4M3, by_row, by_column)


def _mx_multi(xs: Tensors, row_codes: Tensors, column_codes: Tensors) -> tuple[Tensors, Tensors]:
    """As a rank does it, but for the exchange of amaxes: those of whole weights, and scales of them."""
    count, start = len(xs), MX_SHARD[0] * MX_SHARD[1]
    dtypes, shapes, starts = [BF16] * count, [MX_SHAPE] * count, [start] * count
    sizes = kernels.mx_amax_sizes(*MX_SHAPE, False)
    scales = kernels.mx_scale_from_amax(kernels.mx_multi_amax(xs, dtypes, shapes, starts, [False] * count), E4M3)
    by_row, by_column = scales.view(count, sum(sizes)).split(sizes, 1)
    row_shape, column_shape = mx_scale_shapes(MX_SHAPE)
    row_scales = [s.view(row_shape) for s in by_row.unbind()]
    column_scales = [s.view(column_shape) for s in by_column.unbind()]
    kernels.mx_multi_cast(
        xs,
        dtypes,
        shapes,
        starts,
        [E4M3] * count,
        list(zip(row_scales, row_codes, strict=True)),
        list(zip(column_scales, column_codes, strict=True)),
    )
    return row_scales, column_scales


def _row(name: str, runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, object]:
    seconds = interleaved(runs, rounds=rounds)
    return {
        "shards": name,
        "milliseconds": 1e3 * seconds["multi"],
        "times eager, a loop": seconds["eager"] / seconds["multi"],
        "times single kernels, a loop": seconds["single"] / seconds["multi"],
    }


def measure(rounds: int) -> list[dict[str, object]]:
    """One row for one scale a weight, and one for MX blocks along rows and columns."""
    xs = [torch.randn(SIZE) for _ in range(COUNT)]
    outs, theirs, eager = (list(torch.empty(COUNT, SIZE, dtype=torch.uint8).unbind()) for _ in range(3))
    _multi(xs, outs)
    _single(xs, theirs)
    _eager(xs, eager)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(outs, theirs, eager, strict=True))

    parts = [torch.randn(MX_SHARD) for _ in range(COUNT)]
    row_codes, column_codes, *more = (list(torch.empty(COUNT, *MX_SHARD, dtype=torch.uint8).unbind()) for _ in range(4))
    pairs = [
        [(codes, torch.empty(shape, dtype=torch.uint8)) for codes in buffers]
        for buffers, shape in zip(more, mx_scale_shapes(MX_SHARD), strict=True)
    ]
    row_scales, column_scales = _mx_multi(parts, row_codes, column_codes)
    for other in (_mx_eager, _mx_single):
        other(parts, *pairs)
        for i, (by_row, by_column) in enumerate(zip(*pairs, strict=True)):
            assert torch.equal(by_row[0], row_codes[i])
            assert torch.equal(by_column[0], column_codes[i])
            assert torch.equal(by_row[1], row_scales[i][MX_SHARD[0] : 2 * MX_SHARD[0]])
            assert torch.equal(by_column[1], column_scales[i][1:2])
    return [
        _row(
            f"{COUNT} of {SIZE}, one scale each",
            {
                "multi": lambda: _multi(xs, outs),
                "eager": lambda: _eager(xs, outs),
                "single": lambda: _single(xs, outs),
            },
            rounds,
        ),
        _row(
            f"{COUNT} of {MX_SHARD[0] * MX_SHARD[1]}, MX rows and columns",
            {
                "multi": lambda: _mx_multi(parts, row_codes, column_codes),
                "eager": lambda: _mx_eager(parts, *pairs),
                "single": lambda: _mx_single(parts, *pairs),
            },
            rounds,
        ),
    ]
