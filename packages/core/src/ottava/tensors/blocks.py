"""Operands whose blocks have scales of their own, as a GEMM takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class BlockOperand:
    """A matrix of element codes in MX blocks.

    Attributes:
        codes: uint8 ``[rows, columns]``.
        scales: uint8 codes of E8M0, unpadded: ``[rows, ceil(columns / 32)]``, or ``[ceil(rows / 32), columns]``.
        fp8_dtype: element format.
        columnwise: whether blocks lie along the columns.
        cache: where the GEMM keeps what it makes of the operand; the owner of the codes clears it when it writes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    fp8_dtype: torch.dtype
    columnwise: bool
    cache: dict[bool, Any] = field(default_factory=dict, compare=False, repr=False)
