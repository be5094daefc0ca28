"""Storages as a product takes them: by their values, as they are, or in blocks with scales of their own."""

from __future__ import annotations

import torch

from ottava.tensors.freshness import GemmCache


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
            Elements of an FP8 dtype, ``[rows, columns]``, and the bytes of their scales, E8M0 as uint8, unpadded:
            ``[rows, ceil(columns / 32)]``, or with ``columnwise`` ``[ceil(rows / 32), columns]``.

        Raises:
            UsageError: the data held does not serve the usage.
        """
        return None

    def scaled_operand(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """This tensor for hardware that multiplies FP8, or None for :meth:`gemm_operand`, as is the default.

        Returns:
            Elements of an FP8 dtype ``[rows, columns]``, or with ``columnwise`` ``[columns, rows]``, best contiguous;
            and the float32 scales still to multiply: one element, one for each of these rows, or None.
        """
        return None

    def gemm_cache(self) -> GemmCache | None:
        """Where the GEMM keeps what it makes of an operand, shared by all aliases that count writes."""
        return None
