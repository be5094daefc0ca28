"""Times many shards of float32 weights, quantized as bf16: one call against loops over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels import E4M3, MX, TENSOR, Buffers, torch_mx
from benchmarks.timing import Row, Timing, ready
from ottava import Layout, kernels
from ottava.kernels import table as operations

BF16 = torch.bfloat16
Tensor = torch.Tensor


@dataclass(frozen=True)
class Job:
    """Shards of weights that are alike.

    Attributes:
        layout: the layout of the weights.
        weight: the shape of a weight.
        shard: the shape of a shard; shards of MX blocks have whole blocks, so that loops can
            quantize them too.
        start: where a shard begins in its flattened weight.
        eager: quantizes one shard in plain torch into buffers for rowwise and columnwise data and
            scales.
        single: the same with kernels for one tensor.
    """

    layout: Layout
    weight: tuple[int, int]
    shard: tuple[int, int]
    start: int
    eager: Callable[[Tensor, Buffers, Buffers], object]
    single: Callable[[Tensor, Buffers, Buffers], object]

    def at_once(self, xs: list[Tensor], *data: list[Tensor]) -> list[list[Tensor]]:
        """Quantize all shards as a rank does, without the reduction of amaxes over ranks.

        Returns:
            The scales of whole weights, for each of the two directions of ``data``.
        """
        count = len(xs)
        places = (
            xs,
            [BF16] * count,
            [self.weight] * count,
            [self.start] * count,
            [self.layout] * count,
        )
        factors, stored = kernels.grid_scales(kernels.grid_multi_amax(*places), self.layout)
        scales = (stored if factors is None else factors).view(count, -1)
        sizes = kernels.grid_amax_sizes(*self.weight, self.layout)
        directions, pairs = [], []
        for columnwise, (part, codes) in enumerate(zip(scales.split(sizes, 1), data, strict=True)):
            if not part.numel():
                pairs.append([None] * count)
                continue
            grid = self.layout.grid(self.weight, bool(columnwise))
            directions.append([each.view(grid) for each in part.unbind()])
            pairs.append(list(zip(directions[-1], codes, strict=True)))
        kernels.grid_multi_cast(*places, *pairs)
        return directions


def _eager_tensor(x: Tensor, rowwise: Buffers, _: Buffers) -> None:
    values = x.bfloat16().float()
    # The numerator is a tensor, because the quotient of a Python number may be rounded twice.
    scale = torch.tensor(448.0) / values.abs().amax()
    rowwise[0].copy_((values * scale).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8))


def _single_tensor(x: Tensor, rowwise: Buffers, _: Buffers) -> None:
    values = x.bfloat16()
    scale, _inverse = kernels.scale_from_amax(kernels.amax(values), E4M3)
    operations.cast_amax.into([rowwise[0], None, None], values, scale, None, None, E4M3)


def _single_mx(x: Tensor, rowwise: Buffers, columnwise: Buffers) -> None:
    operations.grid_quantize.into([*rowwise, *columnwise], x.bfloat16(), MX.text, True, True)


JOBS = {
    "one scale each": Job(TENSOR, (1, 10_000), (1, 10_000), 0, _eager_tensor, _single_tensor),
    "MX rows and columns": Job(
        MX,
        (128, 320),
        (32, 320),
        32 * 320,
        lambda x, rowwise, columnwise: torch_mx(x.bfloat16(), rowwise, columnwise, True),
        _single_mx,
    ),
}


def _timing(name: str, job: Job, count: int) -> Timing:
    xs = [torch.randn(job.shard) for _ in range(count)]
    data = [list(torch.zeros(count, *job.shard, dtype=torch.uint8).unbind()) for _ in range(2)]
    buffers = [
        [
            (torch.zeros_like(codes), torch.zeros(size, dtype=job.layout.stored_scale))
            for codes in data[columnwise]
        ]
        for columnwise, size in enumerate(
            job.layout.scale_shape(job.shard, columnwise) for columnwise in (False, True)
        )
    ]

    def loop(quantize: Callable[[Tensor, Buffers, Buffers], object]) -> None:
        for x, rowwise, columnwise in zip(xs, *buffers, strict=True):
            quantize(x, rowwise, columnwise)

    job.at_once(xs, *data)
    for quantize in (job.eager, job.single):
        loop(quantize)
        for codes, pairs in zip(data, buffers, strict=True):
            assert all(torch.equal(a, b) for a, (b, _) in zip(codes, pairs, strict=True)), name
    return Timing(
        f"{count} of {xs[0].numel()}, {name}",
        {
            "ottava": ready(lambda: job.at_once(xs, *data)),
            "eager": ready(lambda: loop(job.eager)),
            "single": ready(lambda: loop(job.single)),
        },
    )


def timings(count: int) -> list[Timing]:
    """One call against loops that make the same bytes, a row for each kind of shards."""
    return [_timing(name, job, count) for name, job in JOBS.items()]


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
