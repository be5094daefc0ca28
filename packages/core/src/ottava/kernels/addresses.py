"""What the compiled modules are told of tensors: addresses, dtypes, sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.formats import fp8_format

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ABSENT = (0, 0)

#: Scales and codes of one direction.
Buffers = tuple[torch.Tensor, torch.Tensor]


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


def sources(xs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[tuple[int, int, int, int]]:
    """For each its address, the code of its dtype, its size, and the code of the dtype that its elements count as."""
    codes = DTYPE_CODES
    return [(x.data_ptr(), codes[x.dtype], x.numel(), codes[dtype]) for x, dtype in zip(xs, dtypes, strict=True)]


def format_codes(fp8_dtypes: Sequence[torch.dtype]) -> list[int]:
    """The code of each format."""
    codes = {dtype: fp8_format(dtype).code for dtype in set(fp8_dtypes)}
    return [codes[dtype] for dtype in fp8_dtypes]


def addresses(pairs: Sequence[Buffers | None]) -> list[tuple[int, int]]:
    """Those of scales and codes, zeros where there are none."""
    return [_ABSENT if pair is None else (pair[0].data_ptr(), pair[1].data_ptr()) for pair in pairs]
