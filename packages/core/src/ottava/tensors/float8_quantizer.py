"""``Float8QuantizerBase``: what quantizers with one scale a tensor have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.formats import fp8_format
from ottava.tensors.float8 import Float8Tensor, Float8TensorStorage
from ottava.tensors.layout import columnwise_is_transpose
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage


class Float8QuantizerBase(Quantizer):
    """What quantizers with one scale a tensor share: the format, empty results and wrapping of kernel outputs."""

    def __init__(self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        fp8_format(fp8_dtype)
        self.fp8_dtype = fp8_dtype

    def needs(self, device: torch.device) -> tuple[bool, bool]:
        """``(data, transpose)``: which buffers the usages set need on ``device``."""
        transposed = self.columnwise_usage and columnwise_is_transpose(device)
        return self.rowwise_usage or not transposed, transposed

    def wrap(
        self,
        data: torch.Tensor | None,
        transpose: torch.Tensor | None,
        scale_inv: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedTensorStorage:
        """Codes as a storage when ``internal``, else as a :class:`Float8Tensor`."""
        cls = Float8TensorStorage if self.internal else Float8Tensor
        return cls(
            data=data,
            fp8_scale_inv=scale_inv,
            fp8_dtype=self.fp8_dtype,
            dtype=dtype,
            data_transpose=transpose,
            quantizer=self,
        )

    def wrap_made(
        self,
        data: torch.Tensor | None,
        transpose: torch.Tensor | None,
        scale_inv: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedTensorStorage:
        """:meth:`wrap` of what one call of a kernel made, which fits together: a bare storage is not checked."""
        if self.internal:
            return Float8TensorStorage.around(data, transpose, scale_inv, self.fp8_dtype, dtype, self)
        return self.wrap(data, transpose, scale_inv, dtype)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensorStorage:
        shape, place = self.check_empty(shape, dtype, device, requires_grad)
        with_data, with_transpose = self.needs(place)
        if with_transpose and len(shape) == 0:
            with_data, with_transpose = True, False
        codes = torch.empty(shape, dtype=torch.uint8, device=place) if with_data else None
        transposed = None
        if with_transpose:
            transposed = torch.empty((shape[-1], *shape[:-1]), dtype=torch.uint8, device=place)
        made = self.wrap(codes, transposed, torch.ones((), dtype=torch.float32, device=place), dtype)
        if requires_grad and isinstance(made, torch.Tensor):
            made.requires_grad_(True)
        return made
