"""``CurrentScalingQuantizerRef``: quantizer and products of current scaling in plain PyTorch."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from ottava.contract import Contract
from ottava.distributed import reduce_amax
from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.gemm import as_matrix
from ottava.kernels.checks import check_fits
from ottava.kernels.products import mm
from ottava.layout import Layout
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava.tensors.quantizer import epsilon_option, flag_option, fp8_option
from ottava_custom.reference.arithmetic import amax, cast, scale_from_amax
from ottava_custom.reference.tensor import CurrentScalingTensorRef, CurrentScalingTensorRefStorage


class CurrentScalingQuantizerRef(Quantizer):
    """Quantizes by the amax of the tensor itself, and multiplies, without any kernel.

    Args:
        dtype: format of the elements, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        pow_2_scales: floor scales to powers of two.
        eps: a smaller amax counts as this.

    Raises:
        DTypeError: ``dtype`` is not an FP8 element format.
        OptionError: ``eps`` is negative or not finite, or ``pow_2_scales`` is no bool.
    """

    custom = True
    dtype: torch.dtype = fp8_option()
    pow_2_scales: bool = flag_option()
    eps: float = epsilon_option()

    @property
    def fp8_dtype(self) -> torch.dtype:
        """``dtype``, by its name in other quantizers."""
        return self.dtype

    @fp8_dtype.setter
    def fp8_dtype(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __init__(
        self,
        dtype: torch.dtype,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype
        self.pow_2_scales = pow_2_scales
        self.eps = eps
        # The group over which the amaxes of a weight's shards are reduced, because all shards have
        # the scale of the whole weight.
        self.shard_group: Any = None

    process_attributes = ("shard_group",)

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be pickled.
        return self.__dict__ | {"shard_group": None}

    def for_shards(self, group: Any) -> CurrentScalingQuantizerRef:
        copy = self.copy()
        copy.shard_group = group
        return copy

    def is_requantization_safe(self) -> bool:
        return True

    @property
    def contract(self) -> Contract:
        rounding = "floor" if self.pow_2_scales else "nearest"
        layout = Layout(
            self.dtype, (None, None), rounding=rounding, epsilon=self.eps, columnwise="same"
        )
        return Contract.of_layout(layout, ranks="this" if self.shard_group is None else "group")

    def quantize_impl(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        dtype = dtype or tensor.dtype
        largest = amax(tensor)
        if self.shard_group is not None:
            largest = reduce_amax(largest, self.shard_group)
        scale = scale_from_amax(largest, self.dtype, self.eps, self.pow_2_scales)
        cls = CurrentScalingTensorRefStorage if self.internal else CurrentScalingTensorRef
        return cls(
            data=cast(tensor, scale, self.dtype).contiguous(),
            # A quotient of two tensors is rounded once; see scale_from_amax.
            scale=torch.div(torch.ones_like(scale), scale),
            dtype=dtype,
            quant_dtype=self.dtype,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            quantizer=self,
        )

    def qgemm(
        self,
        qx: Any,
        qw: Any,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: torch.Tensor | None,
        sw: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        gemm_type: str = "fprop",
        qresult_x: Any = None,
        qresult_w: Any = None,
    ) -> torch.Tensor:
        """The product of two quantized operands: elements in float32, ``torch.mm``, the scales, the
        bias, one rounding.

        The scales multiply the product and not the elements, as in every other product of quantized
        tensors, so that all of them give the same bits.

        Args:
            qx, qw: quantized tensors, or elements ``[rows, columns]``, in the order of
                :meth:`Quantizer.qgemm`.
            m_params: unused.
            out_dtype: the dtype of the result.
            sx, sw: the scales of bare elements; quantized tensors have their own.
            bias: ``[N]``, added in float32.
            out: the result is written here, or added with ``accumulate``.
            qresult_x, qresult_w: the quantized tensors whose elements ``qx`` and ``qw`` are.

        Raises:
            OptionError: ``gemm_type`` is unknown, or ``accumulate`` is set without ``out``.
            UsageError: the product reads rows of an operand that has none.
            DTypeError, ShapeError, DeviceError: operands, scales, bias or out do not fit together.
        """
        if gemm_type not in ("fprop", "dgrad", "wgrad"):
            raise OptionError(f"gemm_type is {gemm_type!r}", expected="fprop, dgrad or wgrad")
        if accumulate and out is None:
            raise OptionError("accumulate=True without out", expected="the tensor to add to")
        x, scale_x = _operand(qx if qresult_x is None else qresult_x, sx, gemm_type == "wgrad")
        w, scale_w = _operand(qw if qresult_w is None else qresult_w, sw, gemm_type != "fprop")
        left = x.t() if gemm_type == "wgrad" else x
        right = w.t() if gemm_type == "fprop" else w
        _check_product(left, right, bias, out)
        result = mm(left, right)
        scales = [scale.to(torch.float32) for scale in (scale_x, scale_w) if scale is not None]
        if scales:
            # The product of the scales is rounded before it multiplies the sums.
            result = result * reduce(torch.mul, scales)
        if bias is not None:
            result = result + bias.to(torch.float32)
        if out is None:
            return result.to(out_dtype)
        return out.add_(result) if accumulate else out.copy_(result)


def _operand(x: Any, scale: Any, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements in float32 ``[rows, columns]``, and the scale by which they are to be multiplied."""
    if isinstance(x, QuantizedTensorStorage):
        return x.gemm_operand(columnwise=columnwise, dtype=torch.float32)
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise DTypeError(
            f"an operand is of {kind}",
            expected="a quantized tensor, or elements of a floating-point dtype",
            remedy="view bytes as their dtype: data.view(torch.float8_e4m3fn)",
        )
    if scale is not None and (not isinstance(scale, torch.Tensor) or scale.numel() != 1):
        raise DTypeError(
            "the scale of an operand is no tensor with one element",
            expected="a float32 tensor, or None",
        )
    matrix = as_matrix(x.detach().to(torch.float32))
    return matrix, None if scale is None else scale.reshape(())


def _check_product(left: torch.Tensor, right: torch.Tensor, bias: Any, out: Any) -> None:
    """Raises a typed error where operands, bias and result do not fit together."""
    if left.shape[1] != right.shape[0]:
        raise ShapeError(
            f"a product of {tuple(left.shape)} and {tuple(right.shape)}",
            expected="equal reduced dimensions",
        )
    if bias is not None:
        check_fits(bias, (right.shape[1],), left.device, "bias")
    if out is not None:
        check_fits(out, (left.shape[0], right.shape[1]), left.device, "out")
