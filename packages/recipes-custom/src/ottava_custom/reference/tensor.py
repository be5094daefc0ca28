"""``CurrentScalingTensorRef``: FP8 elements and a scale, for rows, for columns, or both.

Invariant: ``original ≈ float32(data) * scale``. Unlike elsewhere, ``scale`` multiplies when
dequantizing, as users of this class's name expect. Rows and columns have the same elements, which
are held once, in the order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ottava.errors import ShapeError, UsageError
from ottava.formats import fp8_format
from ottava.gemm import as_matrix
from ottava.kernels.checks import check_scalar
from ottava.tensors import (
    InnerTensor,
    QuantizedTensor,
    Quantizer,
    StaticField,
    as_data,
    check_values_dtype,
    implements,
)
from ottava.torch_private import make_wrapper_subclass
from ottava_custom.identity import VIEWS, SharedElements, clone_of_elements, view_of_elements


class CurrentScalingTensorRefStorage(SharedElements):
    """FP8 elements with one scale, without the tensor interface.

    Args:
        data: elements ``[*leading, K]`` of ``quant_dtype``, or their bytes (uint8); None without
            the rowwise usage.
        scale: float32 with one element; multiplies when dequantizing.
        data_t: elements ``[K, *leading]``; None without the columnwise usage. Beside ``data``, it
            only asks for the columnwise usage, because its values are those of ``data``.
        scale_t: the scale of ``data_t``, which is that of ``data``.
        dtype: nominal dtype.
        quant_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        original_shape, shape: the shape of the tensor that was quantized, where ``data`` is the
            matrix of its rows.
        rowwise, columnwise: the usages; None: where ``data``, or ``data_t``, is given.
        quantizer: the quantizer of in-place updates.

    Raises:
        DTypeError, ShapeError: the arguments do not fit together.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", gather=True, native="quant_dtype"),
        InnerTensor("_scale", "scale"),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        *SharedElements.static_fields,
        StaticField("quant_dtype", "quant_dtype"),
    )
    # Products are computed by the quantizer's qgemm.
    custom = True

    _data: torch.Tensor | None
    _scale: torch.Tensor
    #: Format of the elements.
    quant_dtype: torch.dtype

    def __init__(
        self,
        data: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        data_t: torch.Tensor | None = None,
        scale_t: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        quant_dtype: torch.dtype = torch.float8_e4m3fn,
        original_shape: Sequence[int] | None = None,
        *,
        shape: Sequence[int] | None = None,
        rowwise: bool | None = None,
        columnwise: bool | None = None,
        quantizer: Quantizer | None = None,
    ) -> None:
        if not isinstance(self, torch.Tensor):
            self._dtype = dtype
        self._rowwise = data is not None if rowwise is None else rowwise
        self._columnwise = data_t is not None if columnwise is None else columnwise
        shape = original_shape if shape is None else shape
        self._data = _checked_data(data, data_t, quant_dtype, shape)
        self._scale = _checked_scale(scale, scale_t, self._data)
        self.quant_dtype = quant_dtype
        self._quantizer = quantizer

    # -- the data by the names of the reference --

    @property
    def data(self) -> torch.Tensor | None:
        """Elements ``[*leading, K]`` of ``quant_dtype``, or None."""
        if self._data is None or not self._rowwise:
            return None
        return self._data.view(self.quant_dtype)

    @property
    def data_t(self) -> torch.Tensor | None:
        """Elements ``[K, *leading]`` of ``quant_dtype``, a view; or None."""
        if self._data is None or not self._columnwise:
            return None
        data = self._data.movedim(-1, 0) if self._data.dim() else self._data
        return data.view(self.quant_dtype)

    @property
    def scale(self) -> torch.Tensor | None:
        """The factor of ``data`` when dequantizing; None without a rowwise usage."""
        return self._scale if self.get_usages()["rowwise"] else None

    @property
    def scale_t(self) -> torch.Tensor | None:
        """The factor of ``data_t`` when dequantizing; None without a columnwise usage."""
        return self._scale if self.get_usages()["columnwise"] else None

    @property
    def _scale_inv(self) -> torch.Tensor:
        """The scale under the name that products read: the same tensor, because torch's compiler
        guards it."""
        return self._scale

    @property
    def original_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that was quantized."""
        return tuple(self.size())

    def elements(self) -> torch.Tensor:
        """The elements as float32 ``[*leading, K]``, exactly, without the scale."""
        return self._elements().contiguous().view(self.quant_dtype).to(torch.float32)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``float32(element) * scale``, rounded once to ``dtype`` or the nominal dtype.

        Raises:
            DTypeError: ``dtype`` is not a floating-point dtype.
        """
        check_values_dtype(dtype)
        return (self.elements() * self._scale).to(dtype or self.dtype)

    def gemm_operand(
        self, *, columnwise: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The bare elements, exact in bfloat16 and float32, and the scale.

        Raises:
            UsageError: the product reads rows, and the storage was quantized for columns alone.
        """
        if not self._rowwise and not columnwise:
            raise UsageError(
                f"a {type(self).__name__} without rowwise data in a product that reads it",
                expected="an operand quantized for the usage",
                remedy="call quantizer.set_usage(rowwise=True) before quantizing",
            )
        return as_matrix(self.elements().to(dtype)), self._scale

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        if inner.argument == "data":
            tensor = tensor.view(torch.uint8)
        super().replace_inner(inner, tensor)


class CurrentScalingTensorRef(QuantizedTensor, CurrentScalingTensorRefStorage):
    """FP8 elements with one scale as a ``torch.Tensor`` of its nominal dtype.

    ``data`` is the elements. Of a parameter it is what torch calls ``data``: an alias without
    gradient.

    Args:
        requires_grad: as of any tensor. The other arguments are those of
            :class:`CurrentScalingTensorRefStorage`.

    Raises:
        DTypeError, ShapeError: the arguments do not fit together.
        UsageError: neither ``data`` nor ``data_t`` is given.
    """

    @staticmethod
    def __new__(
        cls, *args: Any, requires_grad: bool = False, **kwargs: Any
    ) -> CurrentScalingTensorRef:
        storage = CurrentScalingTensorRefStorage(*args, **kwargs)
        data = storage._data
        if data is None:
            raise UsageError("a CurrentScalingTensorRef needs data", expected="data or data_t")
        tensor: CurrentScalingTensorRef = make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=storage.dtype,
            device=data.device,
            requires_grad=requires_grad,
            storage_size=0,
        )
        return tensor

    def __init__(self, *args: Any, requires_grad: bool = False, **kwargs: Any) -> None:
        CurrentScalingTensorRefStorage.__init__(self, *args, **kwargs)

    @property
    def data(self) -> Any:
        if getattr(self, "_is_param", False):
            return self.detach()
        return CurrentScalingTensorRefStorage.data.fget(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        QuantizedTensor.data.fset(self, value)  # type: ignore[attr-defined]


implements(CurrentScalingTensorRef, *VIEWS)(view_of_elements)
implements(CurrentScalingTensorRef, torch.ops.aten.clone.default)(clone_of_elements)


def _checked_data(
    data: Any, data_t: Any, quant_dtype: torch.dtype, shape: Sequence[int] | None
) -> torch.Tensor | None:
    """The bytes of the elements in the order of rows, or a typed error where data do not fit."""
    fp8_format(quant_dtype)
    rows, columns = as_data(data, quant_dtype, "data"), as_data(data_t, quant_dtype, "data_t")
    if rows is not None:
        rows = _shaped(rows, shape, "data")
        shape = rows.shape
    if columns is not None:
        columns_shape = None if shape is None else (*shape[-1:], *shape[:-1])
        columns = _shaped(columns, columns_shape, "data_t")
    if rows is not None or columns is None:
        return rows
    if columns.dim():
        columns = columns.movedim(0, -1).contiguous()
    return columns


def _checked_scale(scale: Any, scale_t: Any, data: torch.Tensor | None) -> Any:
    """The scale of the data, without dimensions, or a typed error where it is none."""
    scale = scale_t if scale is None else scale
    if data is None and scale is None:
        return None
    check_scalar(scale, scale, "scale")
    return scale.reshape(())


def _shaped(data: torch.Tensor, shape: Sequence[int] | None, name: str) -> torch.Tensor:
    if shape is None or tuple(data.shape) == tuple(shape):
        return data
    if data.numel() != math.prod(shape):
        raise ShapeError(
            f"{name} has shape {tuple(data.shape)}", expected=f"the elements of {tuple(shape)}"
        )
    return data.reshape(tuple(shape))
