"""``Float8TensorStorage`` and ``Float8Tensor``: FP8 codes with one scale, shared by every per-tensor recipe.

Invariant: ``original ≈ float32(codes) * scale_inv``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.formats import fp8_format
from ottava.tensors.freshness import DerivedTensor, WriteCount
from ottava.tensors.layout import columnwise_is_transpose
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage, StaticField
from ottava.tensors.tensor import QuantizedTensor


def _as_codes(data: torch.Tensor | None, what: str) -> torch.Tensor | None:
    if data is None or data.dtype == torch.uint8:
        return data
    if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return data.view(torch.uint8)
    raise DTypeError(
        f"{what} has dtype {data.dtype}",
        expected="torch.uint8 codes or a float8 tensor",
        remedy="quantize high-precision values with a quantizer",
    )


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 codes with one scale, without the tensor interface.

    Args:
        data: uint8 codes ``[*leading, K]`` (a float8 tensor is viewed as such), or None with only a transpose held.
        fp8_scale_inv: float32 scalar that multiplies when dequantizing.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        dtype: nominal dtype.
        data_transpose: codes ``[K, *leading]``, on devices whose columnwise usage is a transpose.
        quantizer: used by in-place updates.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", usage="rowwise", gather=True),
        InnerTensor("_transpose", "data_transpose", usage="columnwise"),
        InnerTensor("_scale_inv", "fp8_scale_inv"),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype"),
        StaticField("_fp8_dtype", "fp8_dtype"),
    )

    _data: torch.Tensor | None
    _scale_inv: torch.Tensor
    _fp8_dtype: torch.dtype

    def __init__(
        self,
        *,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        dtype: torch.dtype = torch.float32,
        data_transpose: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
    ) -> None:
        self._dtype = dtype
        self._set_data(data, fp8_scale_inv, fp8_dtype, data_transpose, quantizer)

    def _set_data(
        self,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        data_transpose: torch.Tensor | None,
        quantizer: Quantizer | None,
    ) -> None:
        fp8_format(fp8_dtype)
        self._writes = WriteCount()
        self._derived: DerivedTensor | None = None
        # The whole tensor that this one is a part of (a slice, say): writing to a part rescales the whole.
        self._whole: Float8TensorStorage | None = None
        self._data = _as_codes(data, "data")
        self._scale_inv = fp8_scale_inv  # type: ignore[assignment]
        self._fp8_dtype = fp8_dtype
        self._quantizer = quantizer
        self._transpose = _as_codes(data_transpose, "data_transpose")

    # -- the transpose and its validity --

    @property
    def _transpose(self) -> torch.Tensor | None:
        """The transposed codes if they are held and still those of ``_data``, else None."""
        derived = self._derived
        if derived is None or not derived.fresh(self._writes):
            return None
        return derived.tensor

    @_transpose.setter
    def _transpose(self, value: torch.Tensor | None) -> None:
        self._derived = None if value is None else DerivedTensor(value, self._data, self._writes)

    def mark_written(self) -> None:
        self._writes.value += 1

    def copy_from_storage(self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None) -> None:
        if self._whole is not None:
            self._write_part(src.dequantize(), noop_flag)
            return
        if isinstance(src, Float8TensorStorage) and src._fp8_dtype != self._fp8_dtype:
            raise DTypeError(f"source holds {src._fp8_dtype}", expected=str(self._fp8_dtype))
        had_transpose = self._transpose is not None and noop_flag is None
        super().copy_from_storage(src, noop_flag=noop_flag)
        if had_transpose:
            # The write above reached the transposed codes too: they are fresh again.
            self._transpose = self._derived.tensor if self._derived is not None else None

    def _write_part(self, values: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
        """A part has no scale of its own: quantize the whole again with the part replaced."""
        whole, part = self._whole, self._data
        if whole is None or whole._data is None or part is None or not whole._data.is_contiguous():
            raise UsageError("this slice cannot be written in place", remedy="write to the whole tensor instead")
        replaced = whole.dequantize().detach().contiguous().clone()
        offset = part.storage_offset() - whole._data.storage_offset()
        replaced.as_strided(part.shape, part.stride(), offset).copy_(values)
        whole.quantize_(replaced, noop_flag=noop_flag)

    # -- usages --

    def get_usages(self) -> dict[str, bool]:
        transposed = self._transpose is not None
        if self._data is None:
            return {"rowwise": False, "columnwise": transposed}
        shared = not columnwise_is_transpose(self._data.device)
        return {"rowwise": True, "columnwise": shared or transposed}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        rowwise, columnwise = self._requested_usages(rowwise_usage, columnwise_usage)
        if self._data is None and self._transpose is None:
            raise UsageError(f"{type(self).__name__} holds no data", remedy="it was cleared or saved")
        if rowwise and self._data is None:
            self._data = self._transpose.movedim(0, -1).contiguous()  # type: ignore[union-attr]
            self._transpose = kernels.transpose(self._data)
        if self._data is None:
            return
        if not columnwise_is_transpose(self._data.device):
            # One buffer serves both usages; what can go is a transpose that is not needed.
            if not columnwise:
                self._derived = None
            return
        if columnwise and self._transpose is None:
            self._transpose = kernels.transpose(self._data)
        if not columnwise:
            self._derived = None
        if not rowwise:
            kept = self._transpose
            self._data = None
            self._transpose = kept

    # -- values --

    def size(self, dim: int | None = None) -> Any:
        if self._data is not None:
            shape = self._data.shape
        elif self._transpose is not None:
            transposed = self._transpose.shape
            shape = torch.Size((*transposed[1:], transposed[0]))
        else:
            raise UsageError(f"{type(self).__name__} holds no data", remedy="it was cleared or saved")
        return shape if dim is None else shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """Nominal dtype."""
        return self._dtype

    def _decode(self, scale_inv: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if self._data is not None:
            return kernels.decode(self._data, scale_inv, self._fp8_dtype, dtype)
        transposed = self._transpose
        if transposed is None:
            raise UsageError(f"{type(self).__name__} holds no data", remedy="it was cleared or saved")
        return kernels.decode(transposed, scale_inv, self._fp8_dtype, dtype).movedim(0, -1)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        wanted = dtype or self._dtype
        if wanted not in kernels.HIGH_PRECISION:
            return self._decode(self._scale_inv, torch.float32).to(wanted)
        return self._decode(self._scale_inv, wanted)

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The bare elements (exact in bfloat16 and float32) and ``scale_inv``."""
        values = self._decode(None, dtype)
        return values.reshape(-1, values.shape[-1]) if values.dim() != 2 else values, self._scale_inv


class Float8Tensor(Float8TensorStorage, QuantizedTensor):  # type: ignore[override]
    """FP8 codes with one scale as a ``torch.Tensor``.

    Args:
        shape: shape of the tensor; from the data by default.
        dtype: nominal dtype.
        data, fp8_dtype, fp8_scale_inv, data_transpose, quantizer: see :class:`Float8TensorStorage`.

    Raises:
        DTypeError: ``data`` is neither uint8 nor float8, or ``fp8_dtype`` is no FP8 format.
        ShapeError: the data does not have the shape.
    """

    static_fields: ClassVar[tuple[StaticField, ...]] = (StaticField("_fp8_dtype", "fp8_dtype"),)

    # As in QuantizedTensor: torch.Tensor answers these.
    shape = torch.Tensor.shape
    device = torch.Tensor.device
    dtype = torch.Tensor.dtype
    size = torch.Tensor.size  # type: ignore[assignment]
    dequantize = QuantizedTensor.dequantize

    @staticmethod
    def __new__(
        cls,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype,
        data: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        fp8_scale_inv: torch.Tensor,
        data_transpose: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
    ) -> Float8Tensor:
        held = data if data is not None else data_transpose
        if held is None:
            raise UsageError("a Float8Tensor needs data", expected="data or data_transpose")
        fp8_format(fp8_dtype)
        _as_codes(data, "data")
        _as_codes(data_transpose, "data_transpose")
        if dtype not in kernels.HIGH_PRECISION and dtype != torch.float64:
            raise DTypeError(f"nominal dtype {dtype}", expected="a high-precision floating-point dtype")
        own = held.shape if data is not None else torch.Size((*held.shape[1:], held.shape[0]))
        if shape is not None and tuple(shape) != tuple(own):
            raise ShapeError(f"the data has shape {tuple(own)}", expected=str(tuple(shape)))
        made: Float8Tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            own,
            strides=data.stride() if data is not None else None,
            dtype=dtype,
            device=held.device,
            requires_grad=requires_grad,
        )
        return made

    def __init__(
        self,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype,
        data: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        fp8_scale_inv: torch.Tensor,
        data_transpose: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
    ) -> None:
        self._set_data(data, fp8_scale_inv, fp8_dtype, data_transpose, quantizer)

    _dtype = QuantizedTensor._dtype

    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return Float8TensorStorage.dequantize(self, dtype)

    def _share_freshness(self, other: QuantizedTensor) -> None:
        if isinstance(other, Float8Tensor) and other._data is self._data:
            self._writes, self._derived = other._writes, other._derived
            self._whole = other._whole

    def adopts_bytes_of(self, other: QuantizedTensor) -> bool:
        """Whether copying from ``other`` can copy codes and scale instead of quantizing again."""
        return (
            isinstance(other, Float8Tensor)
            and other._fp8_dtype == self._fp8_dtype
            and other.shape == self.shape
            and self._whole is None
            and self._data is not None
            and other._data is not None
            and (self._transpose is None or other._transpose is not None)
        )


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

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensorStorage:
        place = torch.empty(0, device=device).device
        if not (self.rowwise_usage or self.columnwise_usage):
            raise OptionError("neither rowwise nor columnwise usage is set", remedy="call set_usage(rowwise=True)")
        with_data, with_transpose = self.needs(place)
        if with_transpose and len(shape) == 0:
            with_data, with_transpose = True, False
        codes = torch.empty(tuple(shape), dtype=torch.uint8, device=place) if with_data else None
        transposed = None
        if with_transpose:
            transposed = torch.empty((shape[-1], *shape[:-1]), dtype=torch.uint8, device=place)
        made = self.wrap(codes, transposed, torch.ones((), dtype=torch.float32, device=place), dtype)
        if requires_grad and isinstance(made, torch.Tensor):
            made.requires_grad_(True)
        return made
