"""The functions in the aten table: for quantized tensors of any class, and for tensors on grids.

Views share inner tensors where :meth:`QuantizedTensor.narrowed` and
:meth:`QuantizedTensor.reshaped` of the class know how; everything else is derived from the storage
declaration. Where blocks do not allow a view, the result is made of the dequantized values.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypedDict, Unpack

import torch

from ottava.errors import DeviceError, ShapeError, UsageError
from ottava.kernels import HIGH_PRECISION
from ottava.kernels.checks import check_dense
from ottava.tensors.aten import AtenOp, implements
from ottava.tensors.direction import Direction, as_stored, in_order
from ottava.tensors.grid_tensor import GridTensor
from ottava.tensors.packed import PackedTensor
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage, StorageQuantizer
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import aten_overloads

_aten = torch.ops.aten
_of_all = partial(implements, QuantizedTensor)
_VIEWS: Sequence[AtenOp] = (_aten.view.default, *aten_overloads("_unsafe_view"))


class _Options(TypedDict, total=False):
    """Options of an operator that makes a tensor like another one."""

    dtype: torch.dtype | None
    layout: torch.layout | None
    device: torch.device | None
    pin_memory: bool | None
    non_blocking: bool
    memory_format: torch.memory_format | None


def _new_dtype(tensor: QuantizedTensor, options: _Options) -> torch.dtype | None:
    """Nominal dtype of a new tensor; None when the options ask for something that is not
    quantized."""
    dtype = options.get("dtype") or tensor.dtype
    if dtype not in HIGH_PRECISION or options.get("layout") not in (None, torch.strided):
        return None
    return dtype


@_of_all(_aten.clone.default)
def _clone(
    op: AtenOp, tensor: QuantizedTensor, *, memory_format: torch.memory_format | None = None
) -> QuantizedTensor:
    return tensor.clone_storage()


@_of_all(_aten.detach.default, _aten.alias.default)
def _alias(op: AtenOp, tensor: QuantizedTensor) -> QuantizedTensor:
    return tensor.make_like(tensor)


@_of_all(*aten_overloads("_pin_memory"))
def _pin_memory(
    op: AtenOp, tensor: QuantizedTensor, device: torch.device | None = None
) -> QuantizedTensor:
    return tensor.apply_to_inner(torch.Tensor.pin_memory)


@_of_all(_aten.is_pinned.default)
def _is_pinned(op: AtenOp, tensor: QuantizedTensor, device: torch.device | None = None) -> bool:
    return all(inner.is_pinned() for inner in tensor.inner_list() if inner is not None)


@_of_all(*aten_overloads("_to_copy"))
def _to_copy(op: AtenOp, tensor: QuantizedTensor, **options: Unpack[_Options]) -> object:
    dtype = _new_dtype(tensor, options)
    if dtype is None:
        return NotImplemented
    device = options.get("device")
    non_blocking = options.get("non_blocking") or False
    result = tensor.apply_to_inner(
        lambda inner: inner.to(device=device, non_blocking=non_blocking, copy=True)
    )
    if dtype == tensor.dtype:
        return result
    return result.make_like(result, dtype=dtype)


@_of_all(_aten.copy_.default)
def _copy_(
    op: AtenOp, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if not isinstance(dst, QuantizedTensor):
        return dst.copy_(src.dequantize(), non_blocking)
    if isinstance(src, QuantizedTensor):
        if dst.adopts_bytes_of(src):
            dst.copy_from_storage(src)
            return dst
        src = src.dequantize()
    check_dense(src, "source")
    if src.is_meta and not dst.is_meta:
        raise DeviceError(
            "the source is on meta and has no values", expected="a tensor with values"
        )
    try:
        values = src.expand(dst.shape)
    except RuntimeError as error:
        raise ShapeError(
            f"source has shape {tuple(src.shape)}", expected=str(tuple(dst.shape))
        ) from error
    return dst.quantize_(values.to(dst.device))


@_of_all(_aten.new_zeros.default, _aten.new_empty.default, _aten.new_empty_strided.default)
def _new(
    op: AtenOp,
    tensor: QuantizedTensor,
    size: Sequence[int],
    *strides: Sequence[int],
    **options: Unpack[_Options],
) -> object:
    """Zeros of another shape, by the quantizer.

    Scales that all rows of this tensor share are copied, so that rows of it fit into the zeros.
    """
    dtype, shape = _new_dtype(tensor, options), tuple(size)
    is_strided = strides and torch.empty(shape, device="meta").stride() != tuple(strides[0])
    if dtype is None or is_strided:
        return NotImplemented
    quantizer = tensor._copied_quantizer()
    device = torch.device(options.get("device") or tensor.device)
    new = _zeros_by(quantizer, tensor, shape, dtype, device)
    if type(new) is not type(tensor) or not tensor._means_the_same(new):
        return NotImplemented
    for inner in tensor.shared_inner():
        target: torch.Tensor | None = getattr(new, inner.attribute)
        source: torch.Tensor = getattr(tensor, inner.attribute)
        if target is not None and target.shape == source.shape and not source.is_meta:
            target.copy_(source)
    # Columns that are made of rows are made of those that are written here.
    new.mark_written()
    arguments = tensor.get_metadata()
    for inner, value in zip(new.inner_tensors, new.inner_list(), strict=True):
        arguments[inner.argument] = value
    return type(new)(**(arguments | {"shape": shape, "dtype": dtype, "quantizer": quantizer}))


def _zeros_by(
    quantizer: StorageQuantizer | None,
    tensor: QuantizedTensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> QuantizedTensorStorage | None:
    """Zeros for the usages of ``tensor``; None where neither a quantizer nor a grid makes them."""
    if isinstance(quantizer, Quantizer):
        quantizer.internal = False
        for_usages = quantizer.with_usage(**tensor.get_usages())
        return for_usages.make_empty(shape, dtype=dtype, device=device)
    if quantizer is None and isinstance(tensor, GridTensor):
        return tensor.of_zeros(shape, dtype, device)
    return None


# zeros_like is not here: optimizers make their moments with it, and moments in FP8 are wrong.
@_of_all(_aten.empty_like.default)
def _empty_like(op: AtenOp, tensor: QuantizedTensor, **options: Unpack[_Options]) -> object:
    return _new(_aten.new_empty.default, tensor, tensor.shape, **options)


def _strided_values(tensor: QuantizedTensor) -> torch.Tensor:
    """The values where the strides of the tensor say that they lie."""
    values = tensor.dequantize()
    if (values.stride(), values.storage_offset()) == (tensor.stride(), 0):
        return values
    result = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return result.copy_(values)


@_of_all(*_VIEWS, _aten.unsqueeze.default, _aten.expand.default)
@_of_all(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
def _same_elements(op: AtenOp, tensor: QuantizedTensor, *args: object, **kwargs: object) -> object:
    """The elements in their order, unless some are repeated."""
    # An example shows the size of the result, and raises torch's errors for wrong arguments.
    example: torch.Tensor = op(torch.empty(tensor.shape, device="meta"), *args, **kwargs)
    if example.numel() == tensor.numel():
        view = tensor.reshaped(lambda data: op(data, *args, **kwargs))
        if view is not NotImplemented:
            return view
    if op in _VIEWS:
        return op(_strided_values(tensor), *args, **kwargs)
    return NotImplemented


@_of_all(_aten.slice.Tensor, _aten.select.int, _aten.unbind.int)
@_of_all(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
def _entries(op: AtenOp, tensor: QuantizedTensor, *args: object, **kwargs: object) -> object:
    """Entries of one dimension, or a list of such."""
    # Torch tells on an example which entries: each dimension has its own number as its stride.
    numbers = tuple(range(1, tensor.dim() + 1))
    example = torch.empty_strided(tensor.shape, numbers, device="meta")
    result: torch.Tensor | Sequence[torch.Tensor] = op(example, *args, **kwargs)
    if isinstance(result, torch.Tensor):
        return _entries_like(tensor, result)
    views = [_entries_like(tensor, part) for part in result]
    if any(view is NotImplemented for view in views):
        return NotImplemented
    return views


def _entries_like(tensor: QuantizedTensor, example: torch.Tensor) -> QuantizedTensor:
    """The entries of a dimension that an example of :func:`_entries` shows."""
    numbers = tuple(range(1, tensor.dim() + 1))
    sizes = dict(zip(example.stride(), example.shape, strict=True))
    has_other_strides = example.dim() == tensor.dim() and example.stride() != numbers
    if has_other_strides or not sizes.keys() <= set(numbers):
        # The step of a slice is not 1.
        return NotImplemented  # type: ignore[no-any-return]
    changed = [number for number in numbers if sizes.get(number) != tensor.shape[number - 1]]
    number = changed[0] if changed else 1
    dim, start = number - 1, example.storage_offset() // number
    view = tensor.narrowed(dim, start, start + sizes.get(number, 1))
    if number in sizes or view is NotImplemented:
        return view
    # The dimension of a select is gone.
    return view.reshaped(partial(torch.squeeze, dim=dim))


@_of_all(_aten.as_strided.default)
def _as_strided(
    op: AtenOp,
    tensor: QuantizedTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """The tensor itself, as FSDP asks for it, or values."""
    own_offset = tensor.storage_offset()
    offset = own_offset if storage_offset is None else storage_offset
    own_frame = tuple(tensor.shape), tensor.stride(), own_offset
    if (tuple(size), tuple(stride), offset) == own_frame:
        return tensor.make_like(tensor)
    remedy = "call it on the whole tensor, or on view.dequantize()"
    if _elements_spanned(tensor.shape, tensor.stride()) > tensor.numel():
        raise UsageError(
            "as_strided of a view with elements of its tensor in between",
            expected="a tensor without gaps",
            remedy=remedy,
        )
    count = _elements_spanned(size, stride)
    first, last = offset - own_offset, offset - own_offset + count
    if first < 0 or (count and last > tensor.numel()):
        raise UsageError(
            f"as_strided asks for elements {offset} to {offset + count} of memory",
            expected=f"some of those that the tensor has, {own_offset} to "
            f"{own_offset + tensor.numel()}",
            remedy=remedy,
        )
    values: torch.Tensor = op(_strided_values(tensor), size, stride, first)
    return values


def _elements_spanned(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory lie from the first to the last of a tensor."""
    example = torch.empty_strided(tuple(size), tuple(stride), dtype=torch.uint8, device="meta")
    return example.untyped_storage().nbytes()


# -- tensors on grids: views of whole blocks, in every direction that the tensor has --


@implements(GridTensor, _aten.slice.Tensor, _aten.expand.default, _aten.diagonal.default)
def _view_with_one_scale(op: AtenOp, tensor: GridTensor, *args: object, **kwargs: object) -> object:
    """Where one scale serves all, any view is one of the data."""
    if tensor.grid_layout.block != (None, None):
        return NotImplemented
    return tensor.view_by(
        lambda direction, _: Direction(op(direction.data, *args, **kwargs), direction.scales)
    )


@implements(GridTensor, _aten.as_strided.default)
def _as_strided_with_one_scale(
    op: AtenOp,
    tensor: GridTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> object:
    if tensor.grid_layout.block != (None, None):
        return NotImplemented
    start = 0 if storage_offset is None else storage_offset - tensor.storage_offset()

    def change(direction: Direction, _: bool) -> Direction | None:
        data = direction.data
        if data.stride() != tensor.stride():
            # Data that was made of the other direction lies in another order.
            return None
        strided = op(data, size, stride, data.storage_offset() + start)
        return Direction(strided, direction.scales)

    return tensor.view_by(change, part=True)


def _order(op: AtenOp, tensor: GridTensor, args: Sequence[object]) -> tuple[int, ...]:
    """The numbers of the dimensions of ``tensor`` in their new order."""
    # Torch tells the order on an example, whose strides are the numbers of the dimensions.
    numbers = tuple(range(tensor.dim()))
    example = torch.empty_strided((2,) * tensor.dim(), numbers, device="meta")
    order: tuple[int, ...] = op(example, *args).stride()
    return order


@implements(GridTensor, _aten.t.default, _aten.transpose.int, _aten.permute.default)
def _transpose(op: AtenOp, tensor: GridTensor, *args: object) -> object:
    order = _order(op, tensor, args)
    if tensor.grid_layout.block == (None, None) or order == tuple(range(tensor.dim())):
        return tensor.view_by(
            lambda direction, _: Direction(op(direction.data, *args), direction.scales)
        )
    if order != (1, 0):
        return NotImplemented
    # Blocks along the rows of a matrix lie along the columns of its transpose.
    return tensor.view_by(
        lambda direction, _: Direction(direction.data.t(), direction.scales.t()), swap=True
    )


@implements(GridTensor, _aten.clone.default)
def _clone_on_grid(
    op: AtenOp, tensor: GridTensor, *, memory_format: torch.memory_format | None = None
) -> object:
    if memory_format in (None, torch.preserve_format):
        return NotImplemented
    # A view counts writes together with the tensor, and a copy of it by itself.
    view = tensor.view_by(
        lambda direction, _: Direction(
            direction.data.clone(memory_format=memory_format), direction.scales.clone()
        )
    )
    return view.clone_storage()


# -- packed tensors --


@implements(PackedTensor, _aten.t.default, _aten.transpose.int, _aten.permute.default)
def _transpose_packed(op: AtenOp, tensor: PackedTensor, *args: object) -> object:
    order = _order(op, tensor, args)
    if order == tuple(range(tensor.dim())):
        return tensor.make_like(tensor)
    return tensor.turned() if order == (1, 0) else NotImplemented


@implements(PackedTensor, _aten.clone.default)
def _clone_packed(
    op: AtenOp, tensor: PackedTensor, *, memory_format: torch.memory_format | None = None
) -> object:
    if tensor.is_contiguous() or memory_format in (None, torch.preserve_format):
        return tensor.clone_storage()
    layout = tensor.grid_layout

    def change(direction: Direction, columnwise: bool) -> Direction:
        ordered = in_order(direction, layout, columnwise)
        data = ordered.data.clone(memory_format=memory_format)
        return as_stored(ordered._replace(data=data), layout, columnwise)

    # A view counts writes together with the tensor, and a copy of it by itself.
    return tensor.changed(change, tuple(tensor.shape)).clone_storage()
