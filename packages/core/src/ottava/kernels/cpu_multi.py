"""The compiled kernels on many tensors: one call for all of them, from addresses that are gathered here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava import _cpu
from ottava.formats import MX_BLOCK, fp8_format

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ABSENT = (0, 0)

Buffers = tuple[torch.Tensor, torch.Tensor]


def _dense(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """To be kept until the call is over: what was not contiguous is a copy that nobody else holds."""
    return [x if x.is_contiguous() else x.contiguous() for x in xs]


def _sources(xs: list[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[tuple[int, int, int, int]]:
    codes = _DTYPE_CODES
    return [(x.data_ptr(), codes[x.dtype], x.numel(), codes[dtype]) for x, dtype in zip(xs, dtypes, strict=True)]


def _format_codes(fp8_dtypes: Sequence[torch.dtype]) -> list[int]:
    codes = {dtype: fp8_format(dtype).code for dtype in set(fp8_dtypes)}
    return [codes[dtype] for dtype in fp8_dtypes]


def _addresses(pairs: Sequence[Buffers | None]) -> list[tuple[int, int]]:
    return [_ABSENT if pair is None else (pair[0].data_ptr(), pair[1].data_ptr()) for pair in pairs]


def multi_amax(xs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """The largest magnitude of each."""
    dense = _dense(xs)
    out = torch.empty(len(dense), dtype=torch.float32)
    _cpu.multi_amax(_sources(dense, dtypes), out.data_ptr(), torch.get_num_threads())
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
    _cpu.multi_cast(jobs, scales.data_ptr(), torch.get_num_threads())


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
    _cpu.mx_multi_cast(jobs, torch.get_num_threads())
