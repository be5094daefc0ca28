"""What the compiled modules are told of tensors: addresses, dtypes, sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.formats import fp8_format

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ABSENT = (0, 0)

#: Scales and data of one direction.
Buffers = tuple[torch.Tensor, torch.Tensor]
_Source = tuple[int, int, int, int]
_Place = tuple[int, int, int]
_Pair = tuple[int, int]


def pointer(tensor: torch.Tensor | None) -> int:
    """The address of the elements, 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def matrix(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of ``[*leading, K]``."""
    columns = x.shape[-1] if x.dim() else 1
    return (x.numel() // columns if columns else 0), columns


def dense(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous ones, to be kept until the call is over: what was not is a copy that nobody else holds."""
    return [x if x.is_contiguous() else x.contiguous() for x in xs]


# Jobs of the kernels on many tensors. The tensors are contiguous.


def sources(xs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[_Source]:
    """For each its address, the code of its dtype, its size, and the code of the dtype that its elements count as."""
    codes = DTYPE_CODES
    return [(x.data_ptr(), codes[x.dtype], x.numel(), codes[dtype]) for x, dtype in zip(xs, dtypes, strict=True)]


def _format_codes(fp8_dtypes: Sequence[torch.dtype]) -> list[int]:
    codes = {dtype: fp8_format(dtype).code for dtype in set(fp8_dtypes)}
    return [codes[dtype] for dtype in fp8_dtypes]


def _addresses(pairs: Sequence[Buffers | None]) -> list[_Pair]:
    return [_ABSENT if pair is None else (pair[0].data_ptr(), pair[1].data_ptr()) for pair in pairs]


def _places(shapes: Sequence[tuple[int, int]], starts: Sequence[int]) -> list[_Place]:
    return [(rows, cols, start) for (rows, cols), start in zip(shapes, starts, strict=True)]


def cast_jobs(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    fp8_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
) -> list[tuple[_Source, int, int]]:
    """Of ``multi_cast``."""
    addresses = [out.data_ptr() for out in outs]
    return list(zip(sources(xs, dtypes), _format_codes(fp8_dtypes), addresses, strict=True))


def mx_amax_jobs(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    two_dimensional: Sequence[bool],
) -> list[tuple[_Source, _Place, bool]]:
    """Of ``mx_multi_amax``."""
    return list(zip(sources(xs, dtypes), _places(shapes, starts), two_dimensional, strict=True))


def mx_cast_jobs(
    xs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    fp8_dtypes: Sequence[torch.dtype],
    rowwise: Sequence[Buffers | None],
    columnwise: Sequence[Buffers | None],
) -> list[tuple[_Source, _Place, int, _Pair, _Pair]]:
    """Of ``mx_multi_cast``."""
    codes, places = _format_codes(fp8_dtypes), _places(shapes, starts)
    return list(zip(sources(xs, dtypes), places, codes, _addresses(rowwise), _addresses(columnwise), strict=True))


def slots(scales: Sequence[torch.Tensor], histories: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Of ``update_scales``."""
    return [(s.data_ptr(), h.data_ptr(), s.numel()) for s, h in zip(scales, histories, strict=True)]
