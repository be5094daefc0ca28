"""FP8 data with one scale, for every per-tensor recipe: a storage, a tensor, and the base class of
their quantizers.

Invariant: ``original ≈ float32(data) * scale_inv``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch

from ottava.errors import OptionError, ShapeError
from ottava.formats import FP8, fp8_format
from ottava.kernels.backends import changed
from ottava.kernels.checks import check_dtype, check_scalar
from ottava.kernels.products import capability_of_index
from ottava.layout import Layout
from ottava.tensors.declaration import Declared, InnerTensor, StaticField, as_data
from ottava.tensors.direction import zeros
from ottava.tensors.grid import GridTensorStorage
from ottava.tensors.grid_quantizer import GridQuantizer, InnerTensors, data_and_scales
from ottava.tensors.grid_tensor import GridTensor
from ottava.tensors.operand import Operand
from ottava.tensors.quantizer import Quantizer, fp8_option
from ottava.tensors.storage import QuantizedTensorStorage

# By the format, and whether columnwise data are transposed: a plain dict, which compiled code can
# look into.
_LAYOUTS = {
    (dtype, transposed): Layout(
        dtype, (None, None), columnwise="transposed" if transposed else "same"
    )
    for dtype in FP8
    for transposed in (False, True)
}
#: What :func:`columnwise_layout` asks for.
forced: str | None = None
# GPUs whose FP8 GEMM takes only the TN layout (Ada, Hopper, and Blackwell of compute capability 12)
# need a transposed copy for the columnwise usage; everywhere else one buffer serves both usages.
_TN_ONLY_CAPABILITIES = (89, 90, 120, 121)


def columnwise_is_transpose(device: torch.device) -> bool:
    """Whether tensors on ``device`` keep a transposed copy for their columnwise usage."""
    if forced is not None:
        return forced == "transpose"
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return capability_of_index(index) in _TN_ONLY_CAPABILITIES


@contextmanager
def columnwise_layout(layout: Literal["transpose", "shared"]) -> Iterator[None]:
    """Force a layout inside a ``with`` block, or raise OptionError: Hopper's can be tested on a CPU
    with it."""
    global forced
    if layout not in ("transpose", "shared"):
        raise OptionError(f"columnwise layout {layout!r}", expected="transpose or shared")
    previous, forced = forced, layout
    changed()
    try:
        yield
    finally:
        forced = previous
        changed()


class Float8TensorStorage(GridTensorStorage):
    """FP8 data with one scale, without the tensor interface.

    Args:
        data: uint8 ``[*leading, K]`` (a float8 tensor is viewed as such), or None with only a
            transpose held.
        fp8_scale_inv: float32 scalar that multiplies when dequantizing.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        dtype: nominal dtype, float32 by default.
        data_transpose: data ``[K, *leading]``, on devices whose columnwise usage is a transpose.
        quantizer: used by in-place updates.

    Raises:
        DTypeError, ShapeError, DeviceError: the arguments do not fit together.
        OptionError: ``fp8_dtype`` is not given, or a keyword that is none of these.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", usage="rowwise", gather=True, native="_fp8_dtype"),
        InnerTensor("_transpose", "data_transpose", usage="columnwise", native="_fp8_dtype"),
        InnerTensor("_scalar", "fp8_scale_inv"),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype", default=torch.float32),
        StaticField("_fp8_dtype", "fp8_dtype"),
    )
    data_names, scale_names = ("_data", "_transpose"), ("_scalar", "_scalar")

    _data: torch.Tensor | None
    #: What multiplies when dequantizing, of shape ``()``.
    _scalar: torch.Tensor
    _fp8_dtype: torch.dtype

    @property
    def _transpose(self) -> torch.Tensor | None:
        """The transposed data if it is held and still that of ``_data``, else None."""
        return self._current(self._dated_column_data)

    @_transpose.setter
    def _transpose(self, transpose: torch.Tensor | None) -> None:
        self._dated_column_data = self._dated(transpose)

    @property
    def _scale_inv(self) -> torch.Tensor | None:
        """The factor of dequantization, of shape ``(1,)``: a view, so that writes to it count."""
        return None if self._scalar is None else self._scalar.view(1)

    @_scale_inv.setter
    def _scale_inv(self, scale_inv: torch.Tensor) -> None:
        self._scalar = scale_inv.reshape(())

    @classmethod
    def layout_of(cls, declared: Declared) -> Layout:
        data = declared["data"]
        # Data without a transpose may be met on a device that wants one: columns are made of it
        # there.
        transposed = (
            data is None
            or declared["data_transpose"] is not None
            or columnwise_is_transpose(data.device)
        )
        return _LAYOUTS[declared["fp8_dtype"], transposed]

    @classmethod
    def check_declared(cls, declared: Declared) -> Declared:
        fp8_dtype, scale_inv = declared.get("fp8_dtype"), declared["fp8_scale_inv"]
        fp8_format(fp8_dtype)  # type: ignore[arg-type]
        check_dtype(declared["dtype"])
        data, transposed = (
            as_data(declared[name], fp8_dtype, name) for name in ("data", "data_transpose")
        )
        if data is not None and transposed is not None:
            expected = (*data.shape[-1:], *data.shape[:-1])
            if tuple(transposed.shape) != expected:
                raise ShapeError(
                    f"data_transpose has shape {tuple(transposed.shape)}", expected=str(expected)
                )
        present = [tensor for tensor in (data, transposed, scale_inv) if tensor is not None]
        if present:
            check_scalar(scale_inv, present[0], "fp8_scale_inv")
            if scale_inv.dim():
                # A scalar stays the object that it is, by which aliases know each other.
                scale_inv = scale_inv.reshape(())
        return declared | {"data": data, "data_transpose": transposed, "fp8_scale_inv": scale_inv}


class Float8Tensor(GridTensor, Float8TensorStorage):
    """FP8 data with one scale as a ``torch.Tensor``.

    Arguments and errors: :class:`Float8TensorStorage`'s, and those of every
    :class:`~ottava.QuantizedTensor`.
    """


class Float8QuantizerBase(GridQuantizer):
    """Base class of quantizers with one scale for the tensor: the format, empty results, and
    storages around the results of kernels."""

    shards: ClassVar[Any] = None
    process_attributes: ClassVar[tuple[str, ...]] = ()
    columns_when_asked = False
    storage_class, tensor_class = Float8TensorStorage, Float8Tensor
    for_shards = Quantizer.for_shards  # type: ignore[assignment]
    # The layout is a property, which reads the options each time.
    option_changed = Quantizer.option_changed
    fp8_dtype: torch.dtype = fp8_option()

    def __init__(
        self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        Quantizer.__init__(self, rowwise=rowwise, columnwise=columnwise)
        self.fp8_dtype, self.amax_reduction_group = fp8_dtype, None

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """One scale for all elements; transposes are made of the data."""
        return _LAYOUTS[self.fp8_dtype, False]

    def static_fields(self) -> Declared:
        return {"fp8_dtype": self.fp8_dtype}

    def layout_on(self, device: torch.device, dims: int) -> Layout:
        transposed = dims > 0 and columnwise_is_transpose(device)
        return _LAYOUTS[self.fp8_dtype, transposed]

    def tensors_of(self, operand: Operand) -> InnerTensors:
        data, scale_inv = data_and_scales(operand.rows)
        columns = operand.columns
        if columns is None:
            return data, None, scale_inv
        if Layout.of(columns.layout).one_buffer:
            return columns.values, None, columns.scales
        return data, columns.values, columns.scales

    def needs(self, device: torch.device, dims: int = 1) -> tuple[bool, bool]:
        """``(data, transpose)``: which buffers the usages set need on ``device``; without ``dims``
        data alone."""
        return self._directions(self.layout_on(device, dims))

    def wrap(
        self,
        data: torch.Tensor | None,
        transpose: torch.Tensor | None,
        scale_inv: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedTensorStorage:
        """Checked data as a storage when ``internal``, else as a :class:`Float8Tensor`."""
        cls: type[Float8TensorStorage] = Float8Tensor
        if self.internal:
            cls = Float8TensorStorage
        return cls(
            data=data,
            data_transpose=transpose,
            fp8_scale_inv=scale_inv,
            fp8_dtype=self.fp8_dtype,
            dtype=dtype,
            quantizer=self,
        )

    def empty_impl(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> QuantizedTensorStorage:
        layout = _LAYOUTS[self.fp8_dtype, True]
        needs_data, needs_transpose = self.needs(device, len(shape))
        data = transpose = None
        if needs_data:
            data = zeros(layout, shape, False, device).data
        if needs_transpose:
            transpose = zeros(layout, shape, True, device).data
        scale_inv = torch.ones((), dtype=torch.float32, device=device)
        return self._wrap((data, transpose, scale_inv), dtype)
