"""The aten table of quantized tensors of any class, and what tensors on grids add to it.

Views share inner tensors where :meth:`QuantizedTensor.narrowed` and :meth:`QuantizedTensor.reshaped` of the class know
how; everything else is derived from the storage declaration. What blocks do not allow falls back to the values.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from ottava.errors import DeviceError, ShapeError
from ottava.kernels import HIGH_PRECISION
from ottava.kernels.checks import check_dense
from ottava.tensors.aten import implements
from ottava.tensors.grid import Direction
from ottava.tensors.grid_tensor import GridTensor
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import aten_overloads, to_copy

_aten, _of_all = torch.ops.aten, partial(implements, QuantizedTensor)
_VIEWS = (_aten.view.default, *aten_overloads("_unsafe_view"))
# Those that leave the elements in their order, unless they repeat some.
_SHAPES = (
    *_VIEWS,
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
    *(_aten.unsqueeze.default, _aten.expand.default),
)


def _new_dtype(tensor: QuantizedTensor, options: dict[str, Any]) -> torch.dtype | None:
    """Nominal dtype of a new tensor; None when the options ask for something that is not quantized."""
    dtype: torch.dtype = options.get("dtype") or tensor.dtype
    plain = dtype not in HIGH_PRECISION or options.get("layout") not in (None, torch.strided)
    return None if plain else dtype


_of_all(_aten.detach.default, _aten.alias.default)(lambda op, tensor: tensor.make_like(tensor))
_of_all(_aten.clone.default)(lambda op, tensor, *, memory_format=None: tensor.clone_storage())
_of_all(*aten_overloads("_pin_memory"))(
    lambda op, tensor, device=None: tensor.apply_to_inner(lambda inner: inner.pin_memory())
)
_of_all(_aten.is_pinned.default)(
    lambda op, tensor, device=None: all(inner.is_pinned() for inner in tensor.inner_list() if inner is not None)
)


@_of_all(*aten_overloads("_to_copy"))
def _to_copy(op: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    dtype = _new_dtype(tensor, kwargs)
    if dtype is None:
        return NotImplemented
    given = {name: value for name, value in kwargs.items() if name not in ("dtype", "memory_format")}
    moved: Any = tensor.apply_to_inner(lambda t: to_copy(t, **given))
    return moved if dtype == tensor.dtype else moved.make_like(moved, dtype=dtype)


@_of_all(_aten.copy_.default)
def _copy_(op: Any, dst: Any, src: Any, non_blocking: bool = False) -> Any:
    if not isinstance(dst, QuantizedTensor):
        return dst.copy_(src.dequantize(), non_blocking)
    if isinstance(src, QuantizedTensor) and dst.adopts_bytes_of(src):
        dst.copy_from_storage(src)
    else:
        values = src.dequantize() if isinstance(src, QuantizedTensor) else src
        check_dense(values, "source")
        if values.is_meta and not dst.is_meta:
            raise DeviceError("the source is on meta and has no values", expected="a tensor with values")
        try:
            values = values.expand(dst.shape)
        except RuntimeError as error:
            raise ShapeError(f"source has shape {tuple(values.shape)}", expected=str(tuple(dst.shape))) from error
        dst.quantize_(values.to(dst.device))
    return dst


@_of_all(_aten.new_zeros.default, _aten.new_empty.default)
def _new_rows(op: Any, tensor: QuantizedTensor, size: Any, **kwargs: Any) -> Any:
    """Zeros with another number of rows: what pads an uneven shard. What all rows share is that of ``tensor``."""
    quantizer, device = tensor._quantizer, torch.device(kwargs.get("device") or tensor.device)
    plain = _new_dtype(tensor, kwargs) != tensor.dtype or device != tensor.device or not tensor.dim() or not size
    if plain or tuple(size[1:]) != tuple(tensor.shape[1:]) or not isinstance(quantizer, Quantizer):
        return NotImplemented
    made = quantizer.with_usage(**tensor.get_usages()).make_empty(size, dtype=tensor.dtype, device=device)
    if type(made) is not type(tensor):
        return NotImplemented
    for inner in tensor.shared_inner():
        getattr(made, inner.attribute).copy_(getattr(tensor, inner.attribute))
    return made


# -- views --


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape without memory, by which torch says what an op gives, and refuses what it refuses."""
    return torch.empty(tensor.shape, device="meta")


def _laid_out(tensor: QuantizedTensor) -> torch.Tensor:
    """The values where the strides of the tensor say that they lie."""
    values = tensor.dequantize()
    if (values.stride(), values.storage_offset()) == (tensor.stride(), 0):
        return values
    placed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return placed.copy_(values)


def _all_or_none(views: list[Any]) -> Any:
    """The views, if the class allows all of them."""
    return NotImplemented if any(view is NotImplemented for view in views) else views


@_of_all(*_SHAPES)
def _same_elements(op: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    made = NotImplemented
    if op(_on_meta(tensor), *args, **kwargs).numel() == tensor.numel():
        made = tensor.reshaped(lambda data: op(data, *args, **kwargs))
    return op(_laid_out(tensor), *args, **kwargs) if made is NotImplemented and op in _VIEWS else made


@_of_all(_aten.slice.Tensor)
def _slice(op: Any, tensor: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    op(_on_meta(tensor), dim, start, end, step)
    dim %= tensor.dim()
    first, stop, _ = slice(start, end).indices(tensor.shape[dim])
    return tensor.narrowed(dim, first, max(first, stop)) if step == 1 else NotImplemented


@_of_all(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
def _split(op: Any, tensor: QuantizedTensor, sizes: Any, dim: int = 0) -> Any:
    parts = [part.shape[dim] for part in op(_on_meta(tensor), sizes, dim)]
    places = zip(accumulate(parts), parts, strict=True)
    return _all_or_none([tensor.narrowed(dim % tensor.dim(), stop - size, stop) for stop, size in places])


@_of_all(_aten.select.int)
def _select(op: Any, tensor: QuantizedTensor, dim: int, index: int) -> Any:
    op(_on_meta(tensor), dim, index)
    dim %= tensor.dim()
    if dim == tensor.dim() - 1 and isinstance(tensor, GridTensor) and tensor.grid_layout.block != (None, None):
        return NotImplemented
    index %= tensor.shape[dim]
    entry = tensor.narrowed(dim, index, index + 1)
    return entry if entry is NotImplemented else entry.reshaped(lambda data: data.squeeze(dim))


@_of_all(_aten.unbind.int)
def _unbind(op: Any, tensor: QuantizedTensor, dim: int = 0) -> Any:
    op(_on_meta(tensor), dim)
    return _all_or_none([_select(_aten.select.int, tensor, dim, index) for index in range(tensor.shape[dim])])


@_of_all(_aten.as_strided.default)
def _as_strided(op: Any, tensor: QuantizedTensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """The tensor itself, as FSDP asks for it, or rows of the tensor that it is a view of, or values."""
    offset: Any = tensor.storage_offset() if storage_offset is None else storage_offset
    if (tuple(size), tuple(stride), offset) == (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()):
        return tensor.make_like(tensor)
    base = tensor if tensor._view_of is None else tensor._view_of
    offset -= base.storage_offset()
    rows = _strided_rows(base, tuple(size), tuple(stride), offset)
    return op(_laid_out(base), size, stride, offset) if rows is NotImplemented else rows


def _strided_rows(tensor: QuantizedTensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
    """Rows of a contiguous tensor, in another shape."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    wanted = torch.empty(size, device="meta")
    if not tensor.is_contiguous() or wanted.stride() != stride or not columns or offset % columns:
        return NotImplemented
    stop = offset + wanted.numel()
    if stop % columns or stop > tensor.numel():
        return NotImplemented
    rows: Any = tensor
    if tensor.dim() == 2:
        rows = tensor.narrowed(0, offset // columns, stop // columns)
    elif wanted.numel() != tensor.numel():
        return NotImplemented
    return rows if rows is NotImplemented else rows.reshaped(lambda data: data.view(size))


# -- tensors on grids: carried out here when the result is made of whole blocks in every direction held --


@implements(GridTensor, _aten.slice.Tensor, _aten.expand.default, _aten.diagonal.default, _aten.as_strided.default)
def _moved(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
    """Where one scale serves all, any view is one of the data."""
    if tensor.grid_layout.block != (None, None):
        return NotImplemented
    strided = op is _aten.as_strided.default
    if strided:
        data, (size, stride, offset, *_) = tensor._in_order(), (*args, None)
        if data.stride() != tensor.stride():
            # Its rowwise data was dropped since.
            return NotImplemented
        args = size, stride, data.storage_offset() + (0 if offset is None else offset - tensor.storage_offset())
    return tensor.changed(lambda held, _: (op(held[0], *args, **kwargs), held[1]), part=strided)


@implements(GridTensor, _aten.t.default, _aten.transpose.int, _aten.permute.default)
def _transpose(op: Any, tensor: GridTensor, *args: Any) -> Any:
    # Which dimension comes where, told by strides.
    numbered = torch.empty_strided((2,) * tensor.dim(), tuple(range(tensor.dim())), device="meta")
    order = op(numbered, *args).stride()
    if tensor.grid_layout.block == (None, None) or order == tuple(range(tensor.dim())):
        return tensor.changed(lambda held, _: (op(held[0], *args), held[1]))
    # Blocks along the rows of a matrix lie along the columns of its transpose.
    swap = order == (1, 0)
    return tensor.changed(lambda held, _: (held[0].t(), held[1].t()), swap=True) if swap else NotImplemented


@implements(GridTensor, _aten.clone.default)
def _clone_on_grid(op: Any, tensor: GridTensor, *, memory_format: Any = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return NotImplemented
    copied = tensor.changed(lambda held, _: (held[0].clone(memory_format=memory_format), held[1].clone()), alias=False)
    copied.update_quantizer(tensor._copied_quantizer())
    return copied


@implements(GridTensor, _aten.new_zeros.default, _aten.new_empty.default, _aten.new_empty_strided.default)
def _new(op: Any, tensor: GridTensor, shape: Sequence[int], *strides: Any, **kwargs: Any) -> Any:
    """A tensor of another shape with the directions of this one."""
    dtype, layout = _new_dtype(tensor, kwargs), tensor.grid_layout
    device = torch.device(kwargs.get("device") or tensor.device)
    whole = layout.block == (None, None)
    contiguous = not strides or torch.empty(tuple(shape), device="meta").stride() == tuple(strides[0])
    if dtype is None or not (whole or contiguous):
        return NotImplemented

    def made(shape: Sequence[int], dtype: torch.dtype, *strides: Any) -> torch.Tensor:
        # A byte of 0 is the value 0 with any scale, so that new_zeros may do with data as it does with values.
        empty = op if strides or op is _aten.new_zeros.default else _aten.new_empty.default
        return empty(torch.empty(0, dtype=dtype, device=device), shape, *strides)  # type: ignore[no-any-return]

    sides: list[Direction | None] = []
    for columnwise in (False, True):
        held = tensor.direction(columnwise=columnwise)
        if layout.one_buffer or (layout.square and layout.transposed):
            # Columns are rows, or are made of them.
            held = None if columnwise else tensor._held()[0]
        if held is None:
            sides.append(None)
            continue
        data = made(layout.data_shape(shape, columnwise), torch.uint8, *(strides if whole else ()))
        old, size = held[1], tuple(held[1].shape) if whole else layout.scale_shape(shape, columnwise)
        # What all rows have in common stays: rows of this tensor can be copied into rows of the new one.
        spans = layout.block_of(columnwise)[0] is None and tuple(old.shape) == size
        kept = spans and (device.type == "meta" or not old.is_meta)
        sides.append((data, old.to(device, copy=True) if kept else made(size, layout.stored_scale).fill_(1)))
    return tensor.around(*sides, dtype=dtype, quantizer=tensor._copied_quantizer())


# zeros_like is not here: optimizers make their moments with it, and moments in FP8 are wrong.
implements(GridTensor, _aten.empty_like.default)(
    lambda op, tensor, **kwargs: _new(_aten.new_empty.default, tensor, tensor.shape, **kwargs)
)
