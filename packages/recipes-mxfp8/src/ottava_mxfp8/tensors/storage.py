"""``MXFP8TensorStorage``: element data and the scales of their blocks, along rows, columns or both.

Invariant: ``original ≈ element * 2^(scale - 127)``, in each direction for itself.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.errors import DeviceError, OptionError, ShapeError, UsageError
from ottava.formats import E8M0, MX_BLOCK, fp8_format, mx_scale_shapes
from ottava.kernels.checks import check_dtype
from ottava.tensors import InnerTensor, QuantizedTensorStorage, StaticField, as_data, check_values_dtype

# Data and scales of one direction.
Direction = tuple[torch.Tensor, torch.Tensor]
# What to do where a direction is missing that no quantizer was asked for.
_WITHOUT = {
    "rowwise": "a weight that FSDP2 gathers for the backward pass alone has columnwise data only, and recomputing the "
    "forward pass from it takes reshard_after_forward=False or with_2d_quantization=True, or "
    "gather_quantized(model, recomputes=True)",
    "columnwise": "a weight that was made under no_grad has columns of its initial values alone: before it is written "
    "to or gives them up, call weight.update_usage(columnwise_usage=True)",
}


def _checked_direction(name: str, declared: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Data and scales of one direction by their arguments, or a typed error for what does not fit together."""
    data = as_data(declared[f"{name}_data"], declared["fp8_dtype"], f"{name}_data")
    scales = as_data(declared[f"{name}_scale_inv"], E8M0.torch_dtype, f"{name}_scale_inv")
    if (data is None) != (scales is None):
        missing = f"{name}_{'data' if data is None else 'scale_inv'}"
        raise UsageError(f"{missing} is missing", expected=f"{name} data with its scales")
    if data is not None and scales is not None:
        expected = mx_scale_shapes(data.shape)[int(name == "columnwise")]
        if tuple(scales.shape) != expected:
            raise ShapeError(
                f"{name}_scale_inv of data {tuple(data.shape)} has shape {tuple(scales.shape)}",
                expected=f"{expected}, unpadded",
            )
        if data.device != scales.device:
            raise DeviceError(f"{name}_data is on {data.device}, its scales on {scales.device}", expected="one device")
    return {f"{name}_data": data, f"{name}_scale_inv": scales}


class MXFP8TensorStorage(QuantizedTensorStorage):
    """MXFP8 data without the tensor interface.

    Args:
        rowwise_data: uint8 ``[*leading, K]`` (a float8 tensor is viewed as such), in blocks along the rows.
        rowwise_scale_inv: E8M0 as uint8, ``[M, ceil(K / 32)]``, M the product of the leading dimensions.
        columnwise_data: uint8 ``[*leading, K]``, not transposed, in blocks along the columns.
        columnwise_scale_inv: ``[ceil(M / 32), K]``.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        dtype: nominal dtype.
        with_2d_quantization: one scale for 32 rows and columns: both directions hold the same values.
        values_from_columns: where both directions are held, dequantize columnwise data: so does a transposed view.
        quantizer: used by in-place updates.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError, UsageError: the arguments do not fit together.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_rowwise_data", "rowwise_data", usage="rowwise", gather=True, native="_fp8_dtype"),
        InnerTensor(
            "_rowwise_scale_inv",
            "rowwise_scale_inv",
            usage="rowwise",
            gather=True,
            block_rows=1,
            native=E8M0.torch_dtype,
        ),
        InnerTensor("_columnwise_data", "columnwise_data", usage="columnwise", gather=True, native="_fp8_dtype"),
        InnerTensor(
            "_columnwise_scale_inv",
            "columnwise_scale_inv",
            usage="columnwise",
            gather=True,
            block_rows=MX_BLOCK,
            native=E8M0.torch_dtype,
        ),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype", default=torch.float32),
        StaticField("_fp8_dtype", "fp8_dtype"),
        StaticField("_with_2d_quantization", "with_2d_quantization", default=False),
        StaticField("_values_from_columns", "values_from_columns", default=False),
    )
    counts_writes = True

    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _fp8_dtype: torch.dtype
    _with_2d_quantization: bool
    _values_from_columns: bool

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        fp8_format(declared.get("fp8_dtype"))  # type: ignore[arg-type]
        check_dtype(declared["dtype"])
        for name in ("with_2d_quantization", "values_from_columns"):
            if not isinstance(declared[name], bool):
                raise OptionError(f"{name} is {declared[name]!r}", expected="True or False")
        both = _checked_direction("rowwise", declared) | _checked_direction("columnwise", declared)
        rows, columns = both["rowwise_data"], both["columnwise_data"]
        if rows is not None and columns is not None:
            if rows.shape != columns.shape:
                raise ShapeError(f"columnwise_data has shape {tuple(columns.shape)}", expected=f"{tuple(rows.shape)}")
            if rows.device != columns.device:
                raise DeviceError(f"data is on {rows.device} and {columns.device}", expected="one device")
        return declared | both

    # -- directions --

    def direction(self, *, columnwise: bool) -> Direction | None:
        """Data and scales of one direction, if they are held."""
        data = self._columnwise_data if columnwise else self._rowwise_data
        scales = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        return None if data is None or scales is None else (data, scales)

    def _held(self) -> tuple[Direction, bool]:
        """The direction that the values are taken from, and whether it is that of the columns."""
        for columnwise in (self._values_from_columns, not self._values_from_columns):
            held = self.direction(columnwise=columnwise)
            if held is not None:
                return held, columnwise
        raise self._empty()

    @property
    def rowwise_serves_columnwise(self) -> bool:  # type: ignore[override]
        """Whether both directions hold the same values."""
        return self._with_2d_quantization

    def _for_usage(self, columnwise: bool) -> Direction:
        """One direction; made of the other one where both hold the same values."""
        held = self.direction(columnwise=columnwise)
        if held is not None:
            return held
        other = self.direction(columnwise=not columnwise) if self._with_2d_quantization else None
        if other is None:
            self._held()
            name = "columnwise" if columnwise else "rowwise"
            raise UsageError(
                f"{type(self).__name__} has no {name} data",
                expected=f"a tensor quantized with {name}=True",
                remedy=f"call quantizer.set_usage({name}=True) before quantizing; {_WITHOUT[name]}",
            )
        data, scales = other
        # One scale of each square, spread over the other of its sides.
        squares = scales[::MX_BLOCK] if columnwise else scales[:, ::MX_BLOCK]
        shape = mx_scale_shapes(data.shape)[int(columnwise)]
        side = 1 if columnwise else 0
        return data, squares.repeat_interleave(MX_BLOCK, side).narrow(side, 0, shape[side])

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        rowwise, columnwise = self._requested_usages(rowwise_usage, columnwise_usage)
        # Before anything is dropped: either may be made of the other.
        rows = self._for_usage(False) if rowwise else (None, None)
        columns = self._for_usage(True) if columnwise else (None, None)
        self._rowwise_data, self._rowwise_scale_inv = rows
        self._columnwise_data, self._columnwise_scale_inv = columns
        self.mark_written()

    # -- values --

    def size(self, dim: int | None = None) -> Any:
        shape = self._held()[0][0].shape
        return shape if dim is None else shape[dim]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        check_values_dtype(dtype)
        (data, scales), columnwise = self._held()
        wanted = dtype or self._dtype
        exact = wanted in (*kernels.HIGH_PRECISION, torch.float64)
        values = kernels.mx_decode(
            data, scales, self._fp8_dtype, wanted if exact else torch.float32, columnwise=columnwise
        )
        return values.to(wanted)

    def block_operand(self, *, columnwise: bool) -> Direction:
        data, scales = self._for_usage(columnwise)
        columns = data.shape[-1] if data.dim() else 1
        matrix = data if data.dim() == 2 else data.reshape(math.prod(data.shape[:-1]), columns)
        return matrix.view(self._fp8_dtype), scales

    def copy_from_storage(self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None) -> None:
        if isinstance(src, MXFP8TensorStorage) and self._with_2d_quantization and not src._with_2d_quantization:
            raise UsageError(
                "the source has scales for rows and for columns, the destination one for both",
                expected="a source quantized with with_2d_quantization=True",
                remedy="quantize it with the quantizer of the destination",
            )
        super().copy_from_storage(src, noop_flag=noop_flag)
