"""The oracle of the kernels on many tensors, in plain PyTorch, one tensor after the other, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.formats import fp8_format
from ottava.kernels.reference_data import encode
from ottava.kernels.reference_mx import block_amax, multiplier, spread

Buffers = tuple[torch.Tensor, torch.Tensor]


def _values(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Every element as it counts, in one dimension."""
    return x.detach().reshape(-1).to(dtype).to(torch.float32)


def _magnitudes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    magnitude = _values(x, dtype).abs()
    return torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude)


def multi_amax(xs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], out: torch.Tensor) -> None:
    """The largest magnitude of each."""
    for i, (x, dtype) in enumerate(zip(xs, dtypes, strict=True)):
        if x.numel():
            out[i] = _magnitudes(x, dtype).amax()


def multi_cast(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    scales: torch.Tensor,
    fp8_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
) -> None:
    """Data of each, with a scale of its own."""
    for x, dtype, scale, fp8_dtype, out in zip(xs, dtypes, scales.detach(), fp8_dtypes, outs, strict=True):
        out.copy_(encode(_values(x, dtype) * scale, fp8_format(fp8_dtype)).view(out.shape))


def mx_multi_amax(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    two_dimensional: Sequence[bool],
    out: torch.Tensor,
) -> None:
    """The amaxes of whole matrices, whose elements that are not in the shard are zero."""
    found: list[torch.Tensor] = []
    for x, dtype, shape, start, square in zip(xs, dtypes, shapes, starts, two_dimensional, strict=True):
        matrix = torch.zeros(tuple(shape), dtype=torch.float32, device=x.device)
        matrix.view(-1)[start : start + x.numel()] = _magnitudes(x, dtype)
        by_row = block_amax(matrix, 1)
        found += [block_amax(by_row, 0)] if square else [by_row, block_amax(matrix, 0)]
    out.copy_(torch.cat([amaxes.reshape(-1) for amaxes in found]))


def mx_multi_cast(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    fp8_dtypes: Sequence[torch.dtype],
    rowwise: Sequence[Buffers | None],
    columnwise: Sequence[Buffers | None],
) -> None:
    """Data of each shard, with the scales of its matrix."""
    for x, dtype, (rows, cols), start, fp8_dtype, by_row, by_column in zip(
        xs, dtypes, shapes, starts, fp8_dtypes, rowwise, columnwise, strict=True
    ):
        values = _values(x, dtype)
        for pair, dim, size in ((by_row, 1, cols), (by_column, 0, rows)):
            if pair is None:
                continue
            scales, out = pair
            multipliers = spread(multiplier(scales), dim, size).reshape(-1)[start : start + x.numel()]
            out.copy_(encode(values * multipliers, fp8_format(fp8_dtype)).view(out.shape))
