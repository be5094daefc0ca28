"""``Float8TensorStorage`` and ``Float8Tensor``: FP8 codes with one scale, shared by every per-tensor recipe.

Invariant: ``original ≈ float32(codes) * scale_inv``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.errors import DeviceError, DTypeError, ShapeError, UsageError
from ottava.formats import fp8_format
from ottava.tensors.codes import as_codes
from ottava.tensors.declaration import InnerTensor, StaticField, StorageQuantizer, check_values_dtype
from ottava.tensors.freshness import DerivedTensor, GemmCache, WriteCount
from ottava.tensors.layout import columnwise_is_transpose
from ottava.tensors.storage import QuantizedTensorStorage, StorageSpec
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import make_wrapper_subclass


def _checked_parts(
    data: Any, data_transpose: Any, fp8_scale_inv: Any, fp8_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Codes, transposed codes and a scale without dimensions, or a typed error for what does not fit together."""
    fp8_format(fp8_dtype)
    if dtype not in kernels.HIGH_PRECISION:
        raise DTypeError(f"nominal dtype {dtype}", expected="torch.float32, torch.bfloat16 or torch.float16")
    codes, transposed = as_codes(data, fp8_dtype, "data"), as_codes(data_transpose, fp8_dtype, "data_transpose")
    if codes is not None and transposed is not None:
        expected = (codes.shape[-1], *codes.shape[:-1]) if codes.dim() else ()
        if tuple(transposed.shape) != expected:
            raise ShapeError(f"data_transpose has shape {tuple(transposed.shape)}", expected=str(expected))
    held = codes if codes is not None else transposed
    if held is None and fp8_scale_inv is None:
        return None, None, None
    if not isinstance(fp8_scale_inv, torch.Tensor) or fp8_scale_inv.dtype != torch.float32:
        raise DTypeError("fp8_scale_inv is not a float32 tensor", expected="a float32 tensor with one element")
    if fp8_scale_inv.numel() != 1:
        raise ShapeError(f"fp8_scale_inv has shape {tuple(fp8_scale_inv.shape)}", expected="one element")
    if held is not None and held.device != fp8_scale_inv.device:
        raise DeviceError(f"data is on {held.device}, fp8_scale_inv on {fp8_scale_inv.device}", expected="one device")
    return codes, transposed, fp8_scale_inv if fp8_scale_inv.dim() == 0 else fp8_scale_inv.reshape(())


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
        InnerTensor("_data", "data", usage="rowwise", gather=True, native="_fp8_dtype"),
        InnerTensor("_transpose", "data_transpose", usage="columnwise", native="_fp8_dtype"),
        InnerTensor("_scale_inv", "fp8_scale_inv"),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype"),
        StaticField("_fp8_dtype", "fp8_dtype"),
    )

    _data: torch.Tensor | None
    _scale_inv: torch.Tensor
    _fp8_dtype: torch.dtype
    _gemm_cache: GemmCache | None = None

    def __init__(
        self,
        *,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        dtype: torch.dtype = torch.float32,
        data_transpose: torch.Tensor | None = None,
        quantizer: StorageQuantizer | None = None,
    ) -> None:
        self._dtype = dtype
        codes, transposed, scale_inv = _checked_parts(data, data_transpose, fp8_scale_inv, fp8_dtype, dtype)
        self._set_data(codes, scale_inv, fp8_dtype, transposed, quantizer)

    @classmethod
    def around(
        cls,
        data: torch.Tensor | None,
        data_transpose: torch.Tensor | None,
        scale_inv: torch.Tensor,
        fp8_dtype: torch.dtype,
        dtype: torch.dtype,
        quantizer: StorageQuantizer | None,
    ) -> Float8TensorStorage:
        """A bare storage of parts that fit together because a kernel made them: nothing is checked."""
        made = object.__new__(Float8TensorStorage)
        made._dtype = dtype
        made._set_data(data, scale_inv, fp8_dtype, data_transpose, quantizer)
        return made

    def flatten_storage(self) -> tuple[list[torch.Tensor | None], StorageSpec]:
        if type(self) is not Float8TensorStorage:
            return super().flatten_storage()
        static = (self._dtype, self._fp8_dtype)
        spec = StorageSpec(Float8TensorStorage, static, self._quantizer, self._whole)
        return [self._data, self._transpose, self._scale_inv], spec

    def flatten_columnwise(self) -> tuple[list[torch.Tensor | None], StorageSpec]:
        transposed = self._transpose if type(self) is Float8TensorStorage and self._data is not None else None
        if transposed is None or not columnwise_is_transpose(transposed.device):
            return super().flatten_columnwise()
        # The same without the steps in between.
        static = (self._dtype, self._fp8_dtype)
        return [None, transposed, self._scale_inv], StorageSpec(
            Float8TensorStorage, static, self._quantizer, self._whole
        )

    @classmethod
    def rebuilt(cls, spec: StorageSpec, tensors: Sequence[torch.Tensor | None]) -> QuantizedTensorStorage:
        if cls is not Float8TensorStorage:
            return super().rebuilt(spec, tensors)
        (data, transposed, scale_inv), (dtype, fp8_dtype) = tensors, spec.static
        return cls.around(data, transposed, scale_inv, fp8_dtype, dtype, spec.quantizer)  # type: ignore[arg-type]

    def _set_data(
        self,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        data_transpose: torch.Tensor | None,
        quantizer: StorageQuantizer | None,
    ) -> None:
        self._writes = WriteCount()
        self._derived: DerivedTensor | None = None
        self._data = data
        self._scale_inv = fp8_scale_inv  # type: ignore[assignment]
        self._fp8_dtype = fp8_dtype
        self._quantizer = quantizer
        self._transpose = data_transpose

    # -- the transpose and its validity --

    @property
    def _transpose(self) -> torch.Tensor | None:
        """The transposed codes if they are held and still those of ``_data``, else None."""
        derived = self._derived
        if derived is None or not derived.fresh(self._data, self._writes):
            return None
        return derived.tensor

    @_transpose.setter
    def _transpose(self, value: torch.Tensor | None) -> None:
        self._derived = None if value is None else DerivedTensor(value, self._data, self._writes)

    def mark_written(self) -> None:
        self._writes.value += 1

    def _codes(self) -> torch.Tensor:
        """The codes in the order of the values: what rowwise data holds, or a view of the transposed ones."""
        if self._data is not None:
            return self._data
        transposed = self._transpose
        if transposed is None:
            raise UsageError(f"{type(self).__name__} holds no data", remedy="it was cleared or saved")
        return transposed.movedim(0, -1)

    def copy_from_storage(self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None) -> None:
        if isinstance(src, Float8TensorStorage) and src._fp8_dtype != self._fp8_dtype:
            raise DTypeError(f"source holds {src._fp8_dtype}", expected=str(self._fp8_dtype))
        whole = self._whole if isinstance(self._whole, Float8TensorStorage) else None
        # The write reaches the transposed codes where ``src`` has them too, or where a view is one of them.
        holder = self if whole is None else whole
        reached = whole is None or whole._data is None
        derived = holder._derived if reached and holder._transpose is not None else None
        super().copy_from_storage(src, noop_flag=noop_flag)
        if derived is not None:
            # They are fresh again, for every alias.
            derived.refresh(holder._data, holder._writes)

    # -- the elements as bytes --

    def raw_inner(self) -> tuple[InnerTensor, ...]:
        held = self._data is None and self._transpose is not None
        return (self.inner_tensors[1],) if held else super().raw_inner()

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        transposed = self._transpose
        super().replace_inner(inner, tensor)
        if inner.usage == "rowwise" and transposed is not None:
            # Computed from the same values.
            self._transpose = transposed

    def rebuild_derived(self, *, force: bool = False) -> None:
        data, quantizer = self._data, self._quantizer
        if data is None or not data.dim() or not columnwise_is_transpose(data.device):
            return
        if force:
            self.mark_written()
        if self._transpose is None and (quantizer is None or quantizer.columnwise_usage):
            self._transpose = kernels.transpose(data)

    # -- usages --

    def get_usages(self) -> dict[str, bool]:
        transposed = self._transpose is not None
        if self._data is None:
            return {"rowwise": False, "columnwise": transposed}
        shared = not columnwise_is_transpose(self._data.device)
        return {"rowwise": True, "columnwise": shared or transposed}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        data, transposed = self._data, self._transpose
        shared = data is not None and not columnwise_is_transpose(data.device)
        have = data is not None, shared or transposed is not None
        rowwise, columnwise = self._requested_usages(rowwise_usage, columnwise_usage, have)
        if data is None:
            if transposed is None:
                raise UsageError(f"{type(self).__name__} holds no data", remedy="it was cleared or saved")
            if not rowwise:
                return
            data = self._data = self._codes().contiguous()
            transposed = self._transpose = kernels.transpose(data)
            shared = not columnwise_is_transpose(data.device)
        if not columnwise:
            self._derived = None
        # One buffer may serve both usages; what can go then is a transpose that is not needed.
        if shared or not columnwise:
            return
        if transposed is None:
            transposed = self._transpose = kernels.transpose(data)
        if not rowwise:
            self._data = None
            self._transpose = transposed

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
        # In the memory order of the transposed codes; a view puts it right.
        return kernels.decode(self._codes().movedim(-1, 0), scale_inv, self._fp8_dtype, dtype).movedim(0, -1)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        check_values_dtype(dtype)
        wanted = dtype or self._dtype
        if wanted not in kernels.HIGH_PRECISION:
            return self._decode(self._scale_inv, torch.float32).to(wanted)
        return self._decode(self._scale_inv, wanted)

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The bare elements (exact in bfloat16 and float32) and ``scale_inv``."""
        values = self._decode(None, dtype)
        rows = math.prod(values.shape[:-1])
        return values if values.dim() == 2 else values.reshape(rows, values.shape[-1]), self._scale_inv

    def scaled_operand(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        if type(self).gemm_operand is not Float8TensorStorage.gemm_operand:
            # A subclass whose operands are something else.
            return None
        codes = self._data
        if not columnwise and codes is not None and codes.dim() == 2:
            return codes.view(self._fp8_dtype), self._scale_inv
        transposed = self._transpose if columnwise or codes is None else None
        if transposed is not None:
            shape = transposed.shape
            lines = transposed if len(shape) == 2 else transposed.reshape(shape[0], math.prod(shape[1:]))
            return (lines if columnwise else lines.t()).view(self._fp8_dtype), self._scale_inv
        if codes is None or not codes.dim():
            return None
        if codes.dim() != 2:
            codes = codes.reshape(math.prod(codes.shape[:-1]), codes.shape[-1])
        return (codes.t() if columnwise else codes).view(self._fp8_dtype), self._scale_inv

    def gemm_cache(self) -> GemmCache | None:
        if torch.compiler.is_compiling():
            return None
        # It counts the writes with the aliases of today.
        if self._gemm_cache is None or self._gemm_cache.writes is not self._writes:
            self._gemm_cache = GemmCache(writes=self._writes)
        return self._gemm_cache


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """FP8 codes with one scale as a ``torch.Tensor``.

    Args:
        shape: shape of the tensor; from the data by default.
        dtype: nominal dtype.
        data, fp8_dtype, fp8_scale_inv, data_transpose, quantizer: see :class:`Float8TensorStorage`.

    Raises:
        DTypeError: the data is neither uint8 nor of ``fp8_dtype``, that is no FP8 format, the scale is not float32, or
            ``dtype`` is not a high-precision one.
        ShapeError: the data, its transpose or the scale has another shape.
        DeviceError: data and scale are on different devices.
        UsageError: there is neither ``data`` nor ``data_transpose``.
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
        quantizer: StorageQuantizer | None = None,
        requires_grad: bool = False,
    ) -> Float8Tensor:
        codes, transposed, _ = _checked_parts(data, data_transpose, fp8_scale_inv, fp8_dtype, dtype)
        held = codes if codes is not None else transposed
        if held is None:
            raise UsageError("a Float8Tensor needs data", expected="data or data_transpose")
        # Transposed codes alone lie in memory as a transposed tensor does.
        held = codes if codes is not None else held.movedim(0, -1)
        own = held.shape
        if shape is not None and tuple(shape) != tuple(own):
            raise ShapeError(f"the data has shape {tuple(own)}", expected=str(tuple(shape)))
        made: Float8Tensor = make_wrapper_subclass(
            cls,
            own,
            strides=held.stride(),
            dtype=dtype,
            device=held.device,
            requires_grad=requires_grad,
            storage_size=0,
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
        quantizer: StorageQuantizer | None = None,
        requires_grad: bool = False,
    ) -> None:
        codes, transposed, scale_inv = _checked_parts(data, data_transpose, fp8_scale_inv, fp8_dtype, dtype)
        self._set_data(codes, scale_inv, fp8_dtype, transposed, quantizer)

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
            and (self._whole is None or self.shares_scales(other))
            and self._data is not None
            and other._data is not None
            and (self._transpose is None or other._transpose is not None)
        )
