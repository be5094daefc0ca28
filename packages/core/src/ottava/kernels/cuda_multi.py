"""The CUDA kernels on many tensors and many slots: one launch for hundreds, from addresses that are gathered here.

The addresses travel with the launch: nothing is copied to the device for them, and a CUDA graph keeps what it captured.
What is made contiguous here may be freed once the kernels are queued: its memory is used again on the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.formats import MX_BLOCK
from ottava.kernels.addresses import Buffers, addresses, dense, format_codes, sources
from ottava.kernels.cuda_memory import place, pointer
from ottava.kernels.cuda_native import _cuda


def multi_amax(xs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """The largest magnitude of each."""
    held = dense(xs)
    out = torch.zeros(len(held), dtype=torch.float32, device=held[0].device)
    _cuda.multi_amax(sources(held, dtypes), out.data_ptr(), *place(held[0]))
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
    _cuda.multi_cast(jobs, scales.data_ptr(), *place(scales))


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
    out = torch.zeros(total, dtype=torch.float32, device=held[0].device)
    _cuda.mx_multi_amax(jobs, out.data_ptr(), total, *place(held[0]))
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
    _cuda.mx_multi_cast(jobs, *place(held[0]))


def update_scales(
    scales: list[torch.Tensor],
    histories: list[torch.Tensor],
    maxima: list[float],
    most_recent: bool,
    last: torch.Tensor | None,
) -> None:
    """Every slot of every tensor, in one launch for thousands of slots."""
    if not scales:
        return
    slots = [
        (scale.data_ptr(), history.data_ptr(), scale.numel()) for scale, history in zip(scales, histories, strict=True)
    ]
    _cuda.update_scales(slots, histories[0].shape[0], maxima, most_recent, pointer(last), *place(scales[0]))
