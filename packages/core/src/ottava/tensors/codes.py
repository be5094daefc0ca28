"""Codes are uint8 tensors; who has them as an 8-bit float dtype may pass that."""

from __future__ import annotations

from typing import Any

import torch

from ottava.errors import DTypeError


def as_codes(data: Any, float_dtype: torch.dtype, what: str) -> torch.Tensor | None:
    """``data`` as uint8: as it is, a view of a tensor of ``float_dtype``, or None as it is.

    Raises:
        DTypeError: it is something else.
    """
    if data is None:
        return None
    dtype = data.dtype if isinstance(data, torch.Tensor) else type(data).__name__
    if dtype == torch.uint8:
        codes: torch.Tensor = data
        return codes
    if dtype == float_dtype:
        return data.view(torch.uint8)  # type: ignore[no-any-return]
    raise DTypeError(
        f"{what} is of {dtype}",
        expected=f"torch.uint8 codes or a {float_dtype} tensor",
        remedy="quantize high-precision values with a quantizer",
    )
