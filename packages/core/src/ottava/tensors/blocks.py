"""Operands whose blocks have scales of their own, as a GEMM takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ottava.tensors.freshness import WriteCount


@dataclass
class GemmCache:
    """What the GEMM keeps of an operand.

    Attributes:
        entries: by whether blocks lie along the columns.
        writes: counts the writes to the operand, through whichever alias: what is kept is outdated by one.
    """

    entries: dict[bool, Any] = field(default_factory=dict)
    writes: WriteCount = field(default_factory=WriteCount)


@dataclass(frozen=True)
class BlockOperand:
    """A matrix in MX blocks.

    Attributes:
        elements: of an FP8 dtype, ``[rows, columns]``.
        scales: uint8 codes of E8M0, unpadded: ``[rows, ceil(columns / 32)]``, or ``[ceil(rows / 32), columns]``.
        columnwise: whether blocks lie along the columns.
        cache: where the GEMM may keep what it makes of the operand.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    columnwise: bool
    cache: GemmCache | None = None
