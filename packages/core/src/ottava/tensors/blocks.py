"""Storages as a GEMM takes them: by their values, as they are, or in blocks with scales of their own."""

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


class Operand:
    """How a storage becomes an operand of a product: by its values, unless it overrides one of these methods."""

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This tensor as a GEMM operand ``[rows, columns]`` in ``dtype``, and a float32 scalar still to multiply.

        The default dequantizes in high precision and leaves no factor. A storage whose elements are exact in
        ``dtype`` returns the bare elements and its scale.
        """
        values: torch.Tensor = self.dequantize(dtype)  # type: ignore[attr-defined]
        return values.reshape(-1, values.shape[-1]), None

    def block_operand(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This tensor as a GEMM operand in MX blocks, or None for :meth:`gemm_operand`, as is the default.

        Returns:
            Elements of an FP8 dtype, ``[rows, columns]``, and the E8M0 codes of their scales, uint8 and unpadded:
            ``[rows, ceil(columns / 32)]``, or with ``columnwise`` ``[ceil(rows / 32), columns]``.

        Raises:
            UsageError: the data held does not serve the usage.
        """
        return None

    def scaled_lines(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """This tensor for hardware that multiplies FP8, or None for :meth:`gemm_operand`, as is the default.

        Returns:
            Elements of an FP8 dtype ``[rows, columns]``, or with ``columnwise`` ``[columns, rows]``, best contiguous;
            and the float32 scales still to multiply: one element, one for each of these lines, or None.
        """
        return None

    def gemm_cache(self) -> GemmCache | None:
        """Where the GEMM keeps what it makes of an operand, shared by all aliases that count writes."""
        return None
