"""``MXFP8TensorStorage``: element codes and the scales of their blocks, along rows, columns or both.

Invariant: ``original ≈ element * 2^(scale - 127)``, in each direction for itself.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError, UsageError
from ottava.formats import E8M0, MX_BLOCK, fp8_format, mx_scale_shapes
from ottava.tensors import (
    GemmCache,
    InnerTensor,
    QuantizedTensorStorage,
    Quantizer,
    StaticField,
    as_codes,
    check_values_dtype,
)

# Codes and scales of one direction.
Direction = tuple[torch.Tensor, torch.Tensor]
_Parts = tuple[torch.Tensor | None, torch.Tensor | None]


def _checked_direction(name: str, codes: Any, scales: Any, fp8_dtype: torch.dtype) -> _Parts:
    codes = as_codes(codes, fp8_dtype, f"{name}_data")
    scales = as_codes(scales, E8M0.torch_dtype, f"{name}_scale_inv")
    if (codes is None) != (scales is None):
        raise UsageError(
            f"{name}_{'data' if codes is None else 'scale_inv'} is missing", expected=f"{name} data with its scales"
        )
    if codes is None or scales is None:
        return None, None
    expected = mx_scale_shapes(codes.shape)[int(name == "columnwise")]
    if tuple(scales.shape) != expected:
        raise ShapeError(
            f"{name}_scale_inv of data {tuple(codes.shape)} has shape {tuple(scales.shape)}",
            expected=f"{expected}, unpadded",
        )
    if codes.device != scales.device:
        raise DeviceError(f"{name}_data is on {codes.device}, its scales on {scales.device}", expected="one device")
    return codes, scales


def checked_parts(
    rowwise: tuple[Any, Any],
    columnwise: tuple[Any, Any],
    fp8_dtype: torch.dtype,
    dtype: torch.dtype,
    with_2d_quantization: bool,
    values_from_columns: bool,
) -> tuple[_Parts, _Parts]:
    """Codes and scales of both directions, or a typed error for what does not fit together."""
    fp8_format(fp8_dtype)
    if dtype not in kernels.HIGH_PRECISION:
        raise DTypeError(f"nominal dtype {dtype}", expected="torch.float32, torch.bfloat16 or torch.float16")
    for name, flag in (
        ("with_2d_quantization", with_2d_quantization),
        ("values_from_columns", values_from_columns),
    ):
        if not isinstance(flag, bool):
            raise OptionError(f"{name} is {flag!r}", expected="True or False")
    rows = _checked_direction("rowwise", *rowwise, fp8_dtype)
    columns = _checked_direction("columnwise", *columnwise, fp8_dtype)
    if rows[0] is not None and columns[0] is not None:
        if rows[0].shape != columns[0].shape:
            raise ShapeError(f"columnwise_data has shape {tuple(columns[0].shape)}", expected=f"{tuple(rows[0].shape)}")
        if rows[0].device != columns[0].device:
            raise DeviceError(f"data is on {rows[0].device} and {columns[0].device}", expected="one device")
    return rows, columns


class MXFP8TensorStorage(QuantizedTensorStorage):
    """MXFP8 data without the tensor interface.

    Args:
        rowwise_data: uint8 codes ``[*leading, K]`` (a float8 tensor is viewed as such), in blocks along the rows.
        rowwise_scale_inv: uint8 codes of E8M0 ``[M, ceil(K / 32)]``, M the product of the leading dimensions.
        columnwise_data: codes ``[*leading, K]``, not transposed, in blocks along the columns.
        columnwise_scale_inv: ``[ceil(M / 32), K]``.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        dtype: nominal dtype.
        with_2d_quantization: one scale for 32 rows and columns: both directions hold the same values.
        values_from_columns: where both directions are held, dequantize columnwise data: so does a transposed view.
        quantizer: used by in-place updates.

    Raises:
        DTypeError, ShapeError, DeviceError, UsageError: the parts do not fit together.
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
        StaticField("_dtype", "dtype"),
        StaticField("_fp8_dtype", "fp8_dtype"),
        StaticField("_with_2d_quantization", "with_2d_quantization"),
        StaticField("_values_from_columns", "values_from_columns"),
    )

    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _fp8_dtype: torch.dtype

    def __init__(
        self,
        *,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        dtype: torch.dtype = torch.float32,
        with_2d_quantization: bool = False,
        values_from_columns: bool = False,
        quantizer: Quantizer | None = None,
    ) -> None:
        rows, columns = checked_parts(
            (rowwise_data, rowwise_scale_inv),
            (columnwise_data, columnwise_scale_inv),
            fp8_dtype,
            dtype,
            with_2d_quantization,
            values_from_columns,
        )
        self._dtype = dtype
        self._values_from_columns = values_from_columns
        self._set_data(rows, columns, fp8_dtype, with_2d_quantization, quantizer)

    @classmethod
    def around(
        cls,
        rows: Direction | None,
        columns: Direction | None,
        fp8_dtype: torch.dtype,
        dtype: torch.dtype,
        with_2d_quantization: bool,
        quantizer: Quantizer | None,
    ) -> MXFP8TensorStorage:
        """A bare storage of parts that fit together because a kernel made them: nothing is checked."""
        made = object.__new__(MXFP8TensorStorage)
        made._dtype, made._values_from_columns = dtype, False
        made._set_data(rows or (None, None), columns or (None, None), fp8_dtype, with_2d_quantization, quantizer)
        return made

    def _set_data(
        self,
        rows: _Parts,
        columns: _Parts,
        fp8_dtype: torch.dtype,
        with_2d_quantization: bool,
        quantizer: Quantizer | None,
    ) -> None:
        self._rowwise_data, self._rowwise_scale_inv = rows
        self._columnwise_data, self._columnwise_scale_inv = columns
        self._fp8_dtype = fp8_dtype
        self._with_2d_quantization = with_2d_quantization
        self._quantizer = quantizer
        # A graph has no place for it.
        self._gemm_cache = None if torch.compiler.is_compiling() else GemmCache()

    def mark_written(self) -> None:
        if self._gemm_cache is not None:
            self._gemm_cache.writes.value += 1

    def share_writes(self, other: MXFP8TensorStorage) -> None:
        """Count writes together with ``other``, an alias."""
        if self._gemm_cache is not None and other._gemm_cache is not None:
            self._gemm_cache.writes = other._gemm_cache.writes

    # -- directions --

    def direction(self, *, columnwise: bool) -> Direction | None:
        """Codes and scales of one direction, if they are held."""
        codes = self._columnwise_data if columnwise else self._rowwise_data
        scales = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        return None if codes is None or scales is None else (codes, scales)

    def _held(self) -> tuple[Direction, bool]:
        """The direction that the values are taken from, and whether it is that of the columns."""
        for columnwise in (self._values_from_columns, not self._values_from_columns):
            held = self.direction(columnwise=columnwise)
            if held is not None:
                return held, columnwise
        raise UsageError(f"{type(self).__name__} holds no data", remedy="it was cleared or saved")

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
                remedy=f"call quantizer.set_usage({name}=True) before quantizing; a weight that FSDP2 gathers for the "
                "backward pass alone has columnwise data only, and recomputing the forward pass from it takes "
                "reshard_after_forward=False or with_2d_quantization=True, or gather_quantized(model, recomputes=True)",
            )
        codes, scales = other
        # One scale of each square, spread over the other of its sides.
        squares = scales[::MX_BLOCK] if columnwise else scales[:, ::MX_BLOCK]
        shape = mx_scale_shapes(codes.shape)[int(columnwise)]
        side = 1 if columnwise else 0
        return codes, squares.repeat_interleave(MX_BLOCK, side).narrow(side, 0, shape[side])

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

    @property
    def dtype(self) -> torch.dtype:
        """Nominal dtype."""
        return self._dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        check_values_dtype(dtype)
        (codes, scales), columnwise = self._held()
        wanted = dtype or self._dtype
        exact = wanted in (*kernels.HIGH_PRECISION, torch.float64)
        values = kernels.mx_decode(
            codes, scales, self._fp8_dtype, wanted if exact else torch.float32, columnwise=columnwise
        )
        return values.to(wanted)

    def block_operand(self, *, columnwise: bool) -> Direction:
        codes, scales = self._for_usage(columnwise)
        columns = codes.shape[-1] if codes.dim() else 1
        matrix = codes if codes.dim() == 2 else codes.reshape(math.prod(codes.shape[:-1]), columns)
        return matrix.view(self._fp8_dtype), scales

    def gemm_cache(self) -> GemmCache | None:
        return self._gemm_cache

    def copy_from_storage(self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None) -> None:
        if isinstance(src, MXFP8TensorStorage) and src._fp8_dtype != self._fp8_dtype:
            raise DTypeError(f"source holds {src._fp8_dtype}", expected=str(self._fp8_dtype))
        if isinstance(src, MXFP8TensorStorage) and self._with_2d_quantization and not src._with_2d_quantization:
            raise UsageError(
                "the source has scales for rows and for columns, the destination one for both",
                expected="a source quantized with with_2d_quantization=True",
                remedy="quantize it with the quantizer of the destination",
            )
        super().copy_from_storage(src, noop_flag=noop_flag)
