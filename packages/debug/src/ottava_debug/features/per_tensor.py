"""A feature that quantizes operands with one scale for the tensor, whatever the recipe."""

import math
from typing import Any, ClassVar

import torch
from nvdlfw_inspect.registry import api_method  # type: ignore[import-untyped]

from ottava import kernels
from ottava.errors import OptionError
from ottava.formats import E4M3, E5M2, FP8
from ottava.tensors import Float8QuantizerBase, QuantizedTensorStorage, Quantizer
from ottava_debug.features.base import Modifying, Target
from ottava_debug.located import Check, allowed
from ottava_debug.operands import BY_COLUMN, ROLES


def _is_margin(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # With a margin beyond 64, a format's maximum times 2^-margin would no longer be exact.
    return is_number and -64 <= value <= 64


class _PerTensorQuantizer(Float8QuantizerBase):
    """Quantizes with the scale ``max / (amax · 2^margin)`` of the tensor itself."""

    def __init__(self, fp8_dtype: torch.dtype, margin: float, *, columnwise: bool) -> None:
        super().__init__(fp8_dtype, rowwise=not columnwise, columnwise=columnwise)
        self.margin = margin
        self.internal = True

    def quantize_impl(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        dtype = dtype or tensor.dtype
        scale, scale_inv = kernels.scale_from_amax(kernels.amax(tensor), self.fp8_dtype)
        if self.margin:
            limits = torch.finfo(torch.float32)
            scale = (scale * math.pow(2.0, -self.margin)).clamp(limits.tiny, limits.max)
            scale_inv = torch.div(torch.ones_like(scale), scale)
        with_data, with_transpose = self.needs(tensor.device, tensor.dim())
        if not with_transpose:
            return self._wrap((kernels.cast(tensor, scale, self.fp8_dtype), None, scale_inv), dtype)
        data, transpose = kernels.cast_transpose(tensor, scale, self.fp8_dtype)
        return self._wrap((data if with_data else None, transpose, scale_inv), dtype)


class PerTensorScaling(Modifying):
    """Quantizes operands of products with one scale for the tensor, from the tensor's own amax.

    Options: ``gemms`` or ``gemms_struct``; ``tensors`` or ``tensors_struct``, with ``activation``,
    ``weight`` and ``gradient``; ``margin``, 0 by default, which multiplies the amax by
    ``2^margin``. The elements have the recipe's format. Where that is not an FP8 format, they are
    E4M3, and E5M2 for gradients. An operand that the product takes in high precision stays in high
    precision.
    """

    options: ClassVar[dict[str, Check]] = {"margin": allowed(_is_margin, "a number from -64 to 64")}

    def check_target(self, target: Target, where: str) -> None:
        """Raise OptionError for the result of a product."""
        if target.tensor not in ROLES:
            raise OptionError(
                f"{where}: {target.tensor} is the result of a product",
                expected=f"operands: {', '.join(ROLES)}",
            )

    @api_method  # type: ignore[untyped-decorator]
    def modify_tensor(
        self,
        config: Any,
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int = 0,
        default_quantizer: Quantizer | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensorStorage | None:
        """The operand, quantized with one scale; None where ``default_quantizer``, the recipe's
        quantizer, is None."""
        if default_quantizer is None:
            return None
        element = getattr(getattr(default_quantizer, "layout", None), "element", None)
        if element not in FP8:
            element = (E5M2 if tensor_name == "gradient" else E4M3).torch_dtype
        columnwise = (gemm, tensor_name) in BY_COLUMN
        quantizer = _PerTensorQuantizer(element, config.get("margin", 0.0), columnwise=columnwise)
        return quantizer.quantize_impl(tensor, dtype or tensor.dtype)
