"""The aten table of quantized tensors of any class, and what tensors on grids add to it.

Views share inner tensors where :meth:`QuantizedTensor.narrowed` and
:meth:`QuantizedTensor.reshaped` of the class know how; everything else is derived from the storage
declaration. What blocks do not allow falls back to the values.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ottava.errors import DeviceError, ShapeError, UsageError
from ottava.kernels import HIGH_PRECISION
from ottava.kernels.checks import check_dense
from ottava.tensors.direction import Direction
from ottava.tensors.grid_tensor import GridTensor
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.tensor import QuantizedTensor, implements
from ottava.torch_private import aten_overloads

_aten, _of_all = torch.ops.aten, partial(implements, QuantizedTensor)
_VIEWS = (_aten.view.default, *aten_overloads("_unsafe_view"))


def _new_dtype(tensor: QuantizedTensor, options: dict[str, Any]) -> torch.dtype | None:
    """Nominal dtype of a new tensor; None when the options ask for something that is not
    quantized."""
    dtype: torch.dtype = options.get("dtype") or tensor.dtype
    return (
        dtype
        if dtype in HIGH_PRECISION and options.get("layout") in (None, torch.strided)
        else None
    )


_of_all(_aten.clone.default)(lambda op, tensor, *, memory_format=None: tensor.clone_storage())
_of_all(_aten.detach.default, _aten.alias.default)(lambda op, tensor: tensor.make_like(tensor))
_of_all(*aten_overloads("_pin_memory"))(
    lambda op, tensor, device=None: tensor.apply_to_inner(torch.Tensor.pin_memory)
)
_of_all(_aten.is_pinned.default)(
    lambda op, tensor, device=None: all(
        inner.is_pinned() for inner in tensor.inner_list() if inner is not None
    )
)


@_of_all(*aten_overloads("_to_copy"))
def _to_copy(op: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    dtype = _new_dtype(tensor, kwargs)
    if dtype is None:
        return NotImplemented
    given = {
        name: value
        for name, value in kwargs.items()
        if name in ("device", "non_blocking") and value is not None
    }
    moved: Any = tensor.apply_to_inner(lambda t: t.to(**given, copy=True))
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
            raise DeviceError(
                "the source is on meta and has no values", expected="a tensor with values"
            )
        try:
            values = values.expand(dst.shape)
        except RuntimeError as error:
            raise ShapeError(
                f"source has shape {tuple(values.shape)}", expected=str(tuple(dst.shape))
            ) from error
        dst.quantize_(values.to(dst.device))
    return dst


@_of_all(_aten.new_zeros.default, _aten.new_empty.default, _aten.new_empty_strided.default)
def _new(
    op: Any, tensor: QuantizedTensor, size: Sequence[int], *strides: Any, **kwargs: Any
) -> Any:
    """Zeros of another shape, by the quantizer; with what all rows share, so that rows of this
    tensor fit into it."""
    dtype, quantizer = _new_dtype(tensor, kwargs), tensor._copied_quantizer()
    strided = strides and torch.empty(tuple(size), device="meta").stride() != tuple(strides[0])
    device, made = torch.device(kwargs.get("device") or tensor.device), None
    if dtype is not None and not strided and isinstance(quantizer, Quantizer):
        quantizer.internal = False
        made = quantizer.with_usage(**tensor.get_usages()).make_empty(
            tuple(size), dtype=dtype, device=device
        )
    elif dtype is not None and not strided and quantizer is None and isinstance(tensor, GridTensor):
        made = tensor.of_zeros(tuple(size), dtype, device)
    if type(made) is not type(tensor) or not tensor._means_the_same(made):
        return NotImplemented
    for inner in tensor.shared_inner():
        own, held = getattr(made, inner.attribute), getattr(tensor, inner.attribute)
        if own is not None and own.shape == held.shape and not held.is_meta:
            own.copy_(held)
    # Columns that are made of rows are made of those that are written here.
    made.mark_written()
    given = {
        inner.argument: held
        for inner, held in zip(made.inner_tensors, made.inner_list(), strict=True)
    }
    about = {"shape": tuple(size), "dtype": dtype, "quantizer": quantizer}
    return type(made)(**(tensor.get_metadata() | given | about))


# zeros_like is not here: optimizers make their moments with it, and moments in FP8 are wrong.
_of_all(_aten.empty_like.default)(
    lambda op, tensor, **kwargs: _new(_aten.new_empty.default, tensor, tensor.shape, **kwargs)
)


def _laid_out(tensor: QuantizedTensor) -> torch.Tensor:
    """The values where the strides of the tensor say that they lie."""
    values = tensor.dequantize()
    if (values.stride(), values.storage_offset()) == (tensor.stride(), 0):
        return values
    placed = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return placed.copy_(values)


@_of_all(*_VIEWS, _aten.unsqueeze.default, _aten.expand.default)
@_of_all(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
def _same_elements(op: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """The elements in their order, unless some are repeated."""
    made = NotImplemented
    # Torch says by it what the op gives, and refuses what it refuses.
    if op(torch.empty(tensor.shape, device="meta"), *args, **kwargs).numel() == tensor.numel():
        made = tensor.reshaped(lambda data: op(data, *args, **kwargs))
    return (
        op(_laid_out(tensor), *args, **kwargs) if made is NotImplemented and op in _VIEWS else made
    )


@_of_all(_aten.slice.Tensor, _aten.select.int, _aten.unbind.int)
@_of_all(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
def _entries(op: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """Entries of one dimension, or a list of such; offsets and strides say which, where each
    dimension has its own."""
    numbers = tuple(range(1, tensor.dim() + 1))
    found = op(torch.empty_strided(tensor.shape, numbers, device="meta"), *args, **kwargs)
    made: list[Any] = []
    for part in found if isinstance(found, (list, tuple)) else [found]:
        sizes = dict(zip(part.stride(), part.shape, strict=True))
        if not sizes.keys() <= set(numbers) or (
            part.dim() == tensor.dim() and part.stride() != numbers
        ):
            # Of a step that is not 1.
            return NotImplemented
        changed = [n for n in numbers if sizes.get(n) != tensor.shape[n - 1]]
        number = changed[0] if changed else 1
        start = part.storage_offset() // number
        entries = tensor.narrowed(number - 1, start, start + sizes.get(number, 1))
        if number not in sizes and entries is not NotImplemented:
            entries = entries.reshaped(partial(torch.squeeze, dim=number - 1))
        if entries is NotImplemented:
            return NotImplemented
        made.append(entries)
    return made if isinstance(found, (list, tuple)) else made[0]


@_of_all(_aten.as_strided.default)
def _as_strided(
    op: Any, tensor: QuantizedTensor, size: Any, stride: Any, storage_offset: Any = None
) -> Any:
    """The tensor itself, as FSDP asks for it, or values."""
    own = tensor.storage_offset()
    offset: Any = own if storage_offset is None else storage_offset
    if (tuple(size), tuple(stride), offset) == (tuple(tensor.shape), tensor.stride(), own):
        return tensor.make_like(tensor)
    memory = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=torch.uint8, device="meta"
    ).untyped_storage()
    asked = torch.empty_strided(
        tuple(size), tuple(stride), dtype=torch.uint8, device="meta"
    ).untyped_storage()
    remedy = "call it on the whole tensor, or on view.dequantize()"
    if memory.nbytes() > tensor.numel():
        what, expected = (
            "as_strided of a view with elements of its tensor in between",
            "a tensor without gaps",
        )
        raise UsageError(what, expected=expected, remedy=remedy)
    first, last = offset - own, offset - own + asked.nbytes()
    if first < 0 or (asked.nbytes() and last > tensor.numel()):
        what = f"as_strided asks for elements {offset} to {offset + asked.nbytes()} of memory"
        expected = f"some of those that the tensor has, {own} to {own + tensor.numel()}"
        raise UsageError(what, expected=expected, remedy=remedy)
    return op(_laid_out(tensor), size, stride, offset - own)


# -- tensors on grids: carried out here when the result is made of whole blocks in every direction
# held --


@implements(
    GridTensor,
    _aten.slice.Tensor,
    _aten.expand.default,
    _aten.diagonal.default,
    _aten.as_strided.default,
)
def _moved(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
    """Where one scale serves all, any view is one of the data."""
    if tensor.grid_layout.block != (None, None):
        return NotImplemented
    if op is not _aten.as_strided.default:
        return tensor.changed(
            lambda direction, _: Direction(op(direction.data, *args, **kwargs), direction.scales)
        )
    size, stride, offset, *_ = *args, None
    start = 0 if offset is None else offset - tensor.storage_offset()

    def change(direction: Direction, _: bool) -> Direction | None:
        data = direction.data
        if data.stride() != tensor.stride():
            # Data that was made of the other direction lies in another order.
            return None
        strided = op(data, size, stride, data.storage_offset() + start)
        return Direction(strided, direction.scales)

    return tensor.changed(change, part=True)


@implements(GridTensor, _aten.t.default, _aten.transpose.int, _aten.permute.default)
def _transpose(op: Any, tensor: GridTensor, *args: Any) -> Any:
    # Which dimension comes where, told by strides.
    numbered = torch.empty_strided((2,) * tensor.dim(), tuple(range(tensor.dim())), device="meta")
    order = op(numbered, *args).stride()
    if tensor.grid_layout.block == (None, None) or order == tuple(range(tensor.dim())):
        return tensor.changed(
            lambda direction, _: Direction(op(direction.data, *args), direction.scales)
        )
    if order != (1, 0):
        return NotImplemented
    # Blocks along the rows of a matrix lie along the columns of its transpose.
    return tensor.changed(
        lambda direction, _: Direction(direction.data.t(), direction.scales.t()), swap=True
    )


@implements(GridTensor, _aten.clone.default)
def _clone_on_grid(op: Any, tensor: GridTensor, *, memory_format: Any = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return NotImplemented
    # A view counts writes together with the tensor, and a copy of it by itself.
    view = tensor.changed(
        lambda direction, _: Direction(
            direction.data.clone(memory_format=memory_format), direction.scales.clone()
        )
    )
    return view.clone_storage()
