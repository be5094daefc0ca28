"""FP8 data with one scale, shared by every per-tensor recipe: a storage, a tensor, what their quantizers share.

Invariant: ``original ≈ float32(data) * scale_inv``.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.errors import DeviceError, DTypeError, ShapeError
from ottava.formats import fp8_format
from ottava.kernels.checks import check_dtype
from ottava.tensors.declaration import InnerTensor, StaticField, as_data, check_values_dtype
from ottava.tensors.freshness import DerivedTensor
from ottava.tensors.layout import columnwise_is_transpose
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 data with one scale, without the tensor interface.

    Args:
        data: uint8 ``[*leading, K]`` (a float8 tensor is viewed as such), or None with only a transpose held.
        fp8_scale_inv: float32 scalar that multiplies when dequantizing.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        dtype: nominal dtype, float32 by default.
        data_transpose: data ``[K, *leading]``, on devices whose columnwise usage is a transpose.
        quantizer: used by in-place updates.

    Raises:
        DTypeError: the data is neither uint8 nor of ``fp8_dtype``, that is no FP8 format, the scale is not float32, or
            ``dtype`` is not a high-precision one.
        ShapeError: the data, its transpose or the scale has another shape.
        DeviceError: data and scale are on different devices.
        OptionError: ``fp8_dtype`` is not given, or a keyword that is none of these.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", usage="rowwise", gather=True, native="_fp8_dtype"),
        InnerTensor("_transpose", "data_transpose", usage="columnwise", native="_fp8_dtype"),
        InnerTensor("_scale_inv", "fp8_scale_inv"),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype", default=torch.float32),
        StaticField("_fp8_dtype", "fp8_dtype"),
    )
    counts_writes = True

    _data: torch.Tensor | None
    _scale_inv: torch.Tensor
    _fp8_dtype: torch.dtype
    _derived: DerivedTensor | None

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        fp8_dtype, scale_inv = declared.get("fp8_dtype"), declared["fp8_scale_inv"]
        fp8_format(fp8_dtype)  # type: ignore[arg-type]
        check_dtype(declared["dtype"])
        data, transposed = (as_data(declared[name], fp8_dtype, name) for name in ("data", "data_transpose"))  # type: ignore[arg-type]
        if data is not None and transposed is not None:
            expected = (data.shape[-1], *data.shape[:-1]) if data.dim() else ()
            if tuple(transposed.shape) != expected:
                raise ShapeError(f"data_transpose has shape {tuple(transposed.shape)}", expected=str(expected))
        held = data if data is not None else transposed
        if held is not None or scale_inv is not None:
            if not isinstance(scale_inv, torch.Tensor) or scale_inv.dtype != torch.float32:
                raise DTypeError("fp8_scale_inv is not a float32 tensor", expected="a float32 tensor with one element")
            if scale_inv.numel() != 1:
                raise ShapeError(f"fp8_scale_inv has shape {tuple(scale_inv.shape)}", expected="one element")
            if held is not None and held.device != scale_inv.device:
                raise DeviceError(
                    f"data is on {held.device}, fp8_scale_inv on {scale_inv.device}", expected="one device"
                )
            scale_inv = scale_inv if scale_inv.dim() == 0 else scale_inv.reshape(())
        return declared | {"data": data, "data_transpose": transposed, "fp8_scale_inv": scale_inv}

    # -- the transpose and its validity --

    @property
    def _transpose(self) -> torch.Tensor | None:
        """The transposed data if it is held and still that of ``_data``, else None."""
        derived = self._derived
        if derived is None or not derived.fresh(self._data, self._writes):
            return None
        return derived.tensor

    @_transpose.setter
    def _transpose(self, value: torch.Tensor | None) -> None:
        self._derived = None if value is None else DerivedTensor(value, self._data, self._writes)

    def _in_order(self) -> torch.Tensor:
        """The data in the order of the values: what rowwise data holds, or a view of the transposed one."""
        if self._data is not None:
            return self._data
        transposed = self._transpose
        if transposed is None:
            raise self._empty()
        return transposed.movedim(0, -1)

    def copy_from_storage(self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None) -> None:
        whole = self._whole if isinstance(self._whole, Float8TensorStorage) else None
        # The write reaches the transposed data where ``src`` has it too, or where a view is one of it.
        holder = self if whole is None else whole
        reached = whole is None or whole._data is None
        derived = holder._derived if reached and holder._transpose is not None else None
        super().copy_from_storage(src, noop_flag=noop_flag)
        if derived is not None:
            # It is fresh again, for every alias.
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
                raise self._empty()
            if not rowwise:
                return
            data = self._data = self._in_order().contiguous()
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
        shape = (self._in_order() if self._data is None else self._data).shape
        return shape if dim is None else shape[dim]

    def _decode(self, scale_inv: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if self._data is not None:
            return kernels.decode(self._data, scale_inv, self._fp8_dtype, dtype)
        # In the memory order of the transposed data; a view puts it right.
        return kernels.decode(self._in_order().movedim(-1, 0), scale_inv, self._fp8_dtype, dtype).movedim(0, -1)

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
        transposed = self._transpose if columnwise or self._data is None else None
        held = self._data if transposed is None else transposed
        if held is None or not held.dim():
            return None
        if held.dim() != 2:
            leading = 1 if transposed is not None else held.dim() - 1
            held = held.reshape(math.prod(held.shape[:leading]), math.prod(held.shape[leading:]))
        elements = held.view(self._fp8_dtype)
        return (elements.t() if columnwise == (transposed is None) else elements), self._scale_inv


class Float8Tensor(QuantizedTensor, Float8TensorStorage):
    """FP8 data with one scale as a ``torch.Tensor``.

    Args:
        shape: shape of the tensor; from the data by default.
        dtype: nominal dtype.
        data, fp8_dtype, fp8_scale_inv, data_transpose, quantizer: see :class:`Float8TensorStorage`.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError: see :class:`Float8TensorStorage`.
        UsageError: there is neither ``data`` nor ``data_transpose``.
    """

    @classmethod
    def laid_out_like(cls, declared: dict[str, Any]) -> torch.Tensor | None:
        data, transposed = declared["data"], declared["data_transpose"]
        # A transpose alone lies in memory as a transposed tensor does.
        return data if data is not None or transposed is None else transposed.movedim(0, -1)  # type: ignore[no-any-return]

    def _share_freshness(self, other: QuantizedTensor) -> None:
        if isinstance(other, Float8Tensor) and other._data is self._data:
            self._writes, self._derived = other._writes, other._derived
            self._whole = other._whole


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
        """Data as a storage when ``internal``, else as a :class:`Float8Tensor`."""
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
            return Float8TensorStorage.unchecked((data, transpose, scale_inv), (dtype, self.fp8_dtype), self)
        return self.wrap(data, transpose, scale_inv, dtype)

    def empty_impl(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> QuantizedTensorStorage:
        with_data, with_transpose = self.needs(device)
        if with_transpose and len(shape) == 0:
            with_data, with_transpose = True, False
        data = torch.empty(shape, dtype=torch.uint8, device=device) if with_data else None
        turned = (*shape[-1:], *shape[:-1])
        transpose = torch.empty(turned, dtype=torch.uint8, device=device) if with_transpose else None
        return self.wrap(data, transpose, torch.ones((), dtype=torch.float32, device=device), dtype)
