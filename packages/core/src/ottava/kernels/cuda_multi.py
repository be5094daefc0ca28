"""The CUDA kernels on many tensors and many slots: one launch for hundreds, from addresses that are gathered here.

The addresses travel with the launch: nothing is copied to the device for them, and a CUDA graph keeps what it captured.
What is made contiguous here may be freed once the kernels are queued: its memory is used again on the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.formats import MX_BLOCK, fp8_format
from ottava.kernels.cuda_memory import DTYPE_CODES, place, pointer
from ottava.kernels.cuda_native import _cuda

_ABSENT = (0, 0)

Buffers = tuple[torch.Tensor, torch.Tensor]


def _dense(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """To be kept until the kernels are queued."""
    return [x if x.is_contiguous() else x.contiguous() for x in xs]


def _sources(xs: list[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[tuple[int, int, int, int]]:
    codes = DTYPE_CODES
    return [(x.data_ptr(), codes[x.dtype], x.numel(), codes[dtype]) for x, dtype in zip(xs, dtypes, strict=True)]


def _format_codes(fp8_dtypes: Sequence[torch.dtype]) -> list[int]:
    codes = {dtype: fp8_format(dtype).code for dtype in set(fp8_dtypes)}
    return [codes[dtype] for dtype in fp8_dtypes]


def _addresses(pairs: Sequence[Buffers | None]) -> list[tuple[int, int]]:
    return [_ABSENT if pair is None else (pair[0].data_ptr(), pair[1].data_ptr()) for pair in pairs]


def multi_amax(xs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """The largest magnitude of each."""
    dense = _dense(xs)
    out = torch.zeros(len(dense), dtype=torch.float32, device=dense[0].device)
    _cuda.multi_amax(_sources(dense, dtypes), out.data_ptr(), *place(dense[0]))
    return out


def multi_cast(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    scales: torch.Tensor,
    fp8_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
) -> None:
    """Codes of each, with a scale of its own."""
    dense, scales = _dense(xs), scales.contiguous()
    jobs = [
        (source, code, out.data_ptr())
        for source, code, out in zip(_sources(dense, dtypes), _format_codes(fp8_dtypes), outs, strict=True)
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
    dense = _dense(xs)
    total = 0
    jobs = []
    for source, (rows, cols), start, square in zip(
        _sources(dense, dtypes), shapes, starts, two_dimensional, strict=True
    ):
        jobs.append((source, (rows, cols, start), square))
        across, down = -(-cols // MX_BLOCK), -(-rows // MX_BLOCK)
        total += across * down if square else rows * across + down * cols
    out = torch.zeros(total, dtype=torch.float32, device=dense[0].device)
    _cuda.mx_multi_amax(jobs, out.data_ptr(), total, *place(dense[0]))
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
    dense = _dense(xs)
    jobs = [
        (source, (rows, cols, start), code, by_row, by_column)
        for source, (rows, cols), start, code, by_row, by_column in zip(
            _sources(dense, dtypes),
            shapes,
            starts,
            _format_codes(fp8_dtypes),
            _addresses(rowwise),
            _addresses(columnwise),
            strict=True,
        )
    ]
    _cuda.mx_multi_cast(jobs, *place(dense[0]))


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
