"""The compiled kernels on many tensors: one call for all of them, from addresses that are gathered here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava import _cpu
from ottava.formats import MX_BLOCK
from ottava.kernels.addresses import Buffers, addresses, dense, format_codes, sources


def multi_amax(xs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """The largest magnitude of each."""
    held = dense(xs)
    out = torch.empty(len(held), dtype=torch.float32)
    _cpu.multi_amax(sources(held, dtypes), out.data_ptr(), torch.get_num_threads())
    return out


def multi_cast(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    scales: torch.Tensor,
    fp8_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
) -> None:
    """Codes of each, with a scale of its own."""
    held, scales = dense(xs), scales.contiguous()
    jobs = [
        (source, code, out.data_ptr())
        for source, code, out in zip(sources(held, dtypes), format_codes(fp8_dtypes), outs, strict=True)
    ]
    _cpu.multi_cast(jobs, scales.data_ptr(), torch.get_num_threads())


def mx_multi_amax(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    two_dimensional: Sequence[bool],
) -> torch.Tensor:
    """The amaxes of all matrices, of what the shards hold of them."""
    held = dense(xs)
    total = 0
    jobs = []
    for source, (rows, cols), start, square in zip(sources(held, dtypes), shapes, starts, two_dimensional, strict=True):
        jobs.append((source, (rows, cols, start), square))
        across, down = -(-cols // MX_BLOCK), -(-rows // MX_BLOCK)
        total += across * down if square else rows * across + down * cols
    out = torch.zeros(total, dtype=torch.float32)
    _cpu.mx_multi_amax(jobs, out.data_ptr(), total, torch.get_num_threads())
    return out


def mx_multi_cast(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    fp8_dtypes: Sequence[torch.dtype],
    rowwise: Sequence[Buffers | None],
    columnwise: Sequence[Buffers | None],
) -> None:
    """Codes of each shard, with the scales of its matrix."""
    held = dense(xs)
    jobs = [
        (source, (rows, cols, start), code, by_row, by_column)
        for source, (rows, cols), start, code, by_row, by_column in zip(
            sources(held, dtypes),
            shapes,
            starts,
            format_codes(fp8_dtypes),
            addresses(rowwise),
            addresses(columnwise),
            strict=True,
        )
    ]
    _cpu.mx_multi_cast(jobs, torch.get_num_threads())
