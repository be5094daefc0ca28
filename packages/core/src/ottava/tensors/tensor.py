"""``QuantizedTensor``: a storage that is also a ``torch.Tensor`` of its nominal dtype."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar

import torch

from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.kernels import check_high_precision
from ottava.kernels.checks import check_dtype
from ottava.tensors.aten import AtenOp, dispatch
from ottava.tensors.declaration import (
    Declared,
    InnerTensor,
    StaticField,
    check_keywords,
    check_values_dtype,
    same_kind,
)
from ottava.tensors.dequantized_view import as_dequantized_views
from ottava.tensors.memory import holder_of, storage_of
from ottava.tensors.saved_by_others import CAN_SHOW_MEMORY, teach_ends
from ottava.tensors.slots import above
from ottava.tensors.storage import QuantizedTensorStorage, StorageQuantizer
from ottava.torch_private import disabled_torch_function, make_wrapper_subclass

TensorT = TypeVar("TensorT", bound="QuantizedTensor")
OperandT = TypeVar("OperandT", bound=torch.Tensor)
ResultT = TypeVar("ResultT")
# What torch keeps of a flattened tensor besides its inner tensors: class, static values, nominal
# dtype, quantizer.
_Context = tuple[type["QuantizedTensor"], tuple[object, ...], torch.dtype, Any]
# Python attributes of a parameter that copying and pickling carry along.
_EXTRA_ATTRIBUTES = ("_is_param", "_high_precision_init_val")


def _dequantizing(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def dequantize(self: QuantizedTensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Dequantize to the dtype of that name."""
        return self.dequantize(dtype)

    return dequantize


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor):
    """Base class of quantized tensors.

    A subclass declares its storage as any :class:`~ottava.QuantizedTensorStorage` does, and defines
    :meth:`dequantize_impl`; ``class RowTensor(QuantizedTensor, RowStorage)`` takes both from a
    storage class. Ops that are not in the aten table see the dequantized values.

    Args:
        shape: shape of the tensor; that of the first inner tensor by default. It is contiguous.
        dtype: nominal dtype.
        quantizer: used by in-place updates.
        requires_grad: as of any tensor.
        declared: the inner tensors and static fields by their arguments.

    Raises:
        OptionError: the constructor was given a keyword that is not declared, or no value for a
            static field.
        DTypeError: ``dtype`` is not a high-precision one, or an inner tensor no tensor.
        UsageError: it was given no inner tensor, or no ``shape`` and not the first one.
    """

    common_fields = (StaticField("_shape", "shape"), StaticField("_dtype", "dtype"))
    # The name of the group on which this tensor's shards agreed on their scales.
    _shard_group: str | None = None
    #: The row of the whole tensor that is the first one of this shard.
    _first_row: int = 0

    def __new__(
        cls,
        *by_position: object,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        quantizer: StorageQuantizer | None = None,
        requires_grad: bool = False,
        **declared: object,
    ) -> Self:
        if by_position:
            cls._refuse_values(by_position[0])
        check_dtype(dtype)
        arguments = check_keywords(cls, declared, dtype=dtype)
        tensors: list[torch.Tensor | None] = [arguments[i.argument] for i in cls.inner_tensors]
        tensors_held = [tensor for tensor in tensors if tensor is not None]
        if not tensors_held:
            raise cls._no_data()
        size, strides, offset = cls._placement(arguments, shape, tensors_held)
        # It owns no memory: data_ptr() and untyped_storage() answer with that of an inner tensor.
        tensor: Self = make_wrapper_subclass(
            cls,
            size,
            strides=strides,
            storage_offset=offset,
            dtype=dtype,
            device=tensors_held[0].device,
            requires_grad=requires_grad,
            storage_size=0,
        )
        tensor._hold(arguments, quantizer)
        return tensor

    def __init__(self, *by_position: object, **by_name: object) -> None:
        pass  # __new__ did everything, and declares the arguments.

    @classmethod
    def _refuse_values(cls, values: object) -> NoReturn:
        """Refuse an argument by position: code that replaces parameters calls
        ``type(parameter)(values)``."""
        raise DTypeError(
            f"{cls.__name__} was called with {type(values).__name__} as its values",
            expected=f"{', '.join(inner.argument for inner in cls.inner_tensors)} by name",
            remedy="make it by a quantizer: quantizer(values)",
        )

    @classmethod
    def _no_data(cls) -> UsageError:
        elements = [
            inner.argument
            for inner in cls.inner_tensors
            if inner.usage != "both" and inner.block_rows is None
        ]
        return UsageError(
            f"a {cls.__name__} needs data", expected=" or ".join(elements) or "an inner tensor"
        )

    @classmethod
    def _placement(
        cls, arguments: Declared, shape: Sequence[int] | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[int], Sequence[int] | None, int | torch.SymInt | None]:
        """Size, strides and storage offset; strides and offset of a contiguous tensor are None."""
        like = cls.laid_out_like(arguments)
        if like is None:
            if shape is None:
                first: torch.Tensor | None = arguments[cls.inner_tensors[0].argument]
                if first is None:
                    raise cls._no_data()
                shape = first.shape
            like = _data_of_view(tuple(shape), tensors)
            if like is None:
                return tuple(shape), None, None
        elif shape is not None and tuple(shape) != tuple(like.shape):
            raise ShapeError(f"the data has shape {tuple(like.shape)}", expected=str(tuple(shape)))
        return like.shape, like.stride(), like.storage_offset()

    @classmethod
    def laid_out_like(cls, declared: Declared) -> torch.Tensor | None:
        """The inner tensor whose shape, strides and offset are those of the tensor.

        None stands for a contiguous tensor of the first inner tensor's shape.
        """
        return None

    # torch.Tensor answers these; the storage's answers are for bare storages.
    shape, device, numel = torch.Tensor.shape, torch.Tensor.device, torch.Tensor.numel
    dtype = torch.Tensor.dtype
    _dtype: torch.dtype = torch.Tensor.dtype
    size = torch.Tensor.size
    _shape: tuple[int, ...] = property(lambda self: tuple(self.shape))  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: AtenOp,
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        owner = next((kind for kind in types if issubclass(kind, QuantizedTensor)), cls)
        result = dispatch(owner, func, args, kwargs or {})
        return as_dequantized_views(func, result, owner.__name__)

    __torch_function__ = disabled_torch_function

    def __tensor_flatten__(self) -> tuple[list[str], _Context]:
        attributes = [inner.attribute for inner in self.inner_tensors]
        names = [name for name in attributes if getattr(self, name) is not None]
        static = tuple(getattr(self, field.attribute) for field in self.own_fields)
        return names, (type(self), static, self.dtype, self._quantizer)

    @classmethod
    def __metadata_guard__(cls, original: _Context, other: _Context) -> bool:
        """Whether code that was compiled for a tensor serves another one: state of a quantizer is
        no part of it."""
        quantizer, other_quantizer = original[3], other[3]
        if quantizer is None or other_quantizer is None:
            is_alike = quantizer is other_quantizer
        else:
            is_alike = quantizer.is_alike(other_quantizer)
        return is_alike and original[:3] == other[:3]

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor],
        context: _Context,
        size: Sequence[int],
        stride: Sequence[int],
    ) -> QuantizedTensor:
        cls, static, dtype, quantizer = context
        tensors = [inner.get(declared.attribute) for declared in cls.inner_tensors]
        return cls(**cls._arguments(tensors, (size, dtype, *static)), quantizer=quantizer)

    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        """High-precision values. A subclass defines it, or takes it from the storage class that it
        is combined with."""
        with torch.no_grad():
            return super().dequantize(dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Values in ``dtype`` (DTypeError if not of floats) or the nominal one; differentiable,
        straight-through."""
        check_values_dtype(dtype)
        if torch.is_grad_enabled() and self.requires_grad:
            return straight_through(self, type(self).dequantize_impl, dtype or self.dtype)
        return self.dequantize_impl(dtype or self.dtype)

    float = _dequantizing(torch.float32)
    half = _dequantizing(torch.float16)
    bfloat16 = _dequantizing(torch.bfloat16)

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """The same quantized values (shared) presented as another nominal dtype; differentiable."""
        return straight_through(
            self, lambda tensor, _: tensor.make_like(tensor, dtype=dtype), dtype
        )

    @classmethod
    def make_like(
        cls,
        tensor: TensorT,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **replaced: object,
    ) -> TensorT:
        """A tensor around the inner tensors of ``tensor`` (shared), with some of its arguments
        replaced."""
        if not isinstance(tensor, QuantizedTensor):
            raise DTypeError(
                f"make_like of a {type(tensor).__name__}", expected="a quantized tensor"
            )
        arguments = tensor.get_metadata() | replaced
        arguments["shape"] = tuple(tensor.shape if shape is None else shape)
        arguments["dtype"] = dtype or tensor.dtype
        result = type(tensor)(**arguments, requires_grad=requires_grad)
        result._share_freshness(tensor)
        return result

    def mark_view(self, of: QuantizedTensor, *, part: bool = False) -> None:
        """Note that this tensor is a view of another one, with which it shares memory.

        Args:
            of: the other tensor, or a view of that.
            part: whether a scale of the view, which a write to the view may change, belongs to
                other elements of ``of``, too.
        """
        self.share_writes(of)
        self._whole = of._whole
        if part and self._whole is None:
            self._whole = of

    def reshaped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A view in another shape, that ``function`` gives data; NotImplemented where the class has
        none."""
        return NotImplemented  # type: ignore[no-any-return]

    def narrowed(self, dim: int, start: int, stop: int) -> Self:
        """A view of entries [start, stop) of a dimension; NotImplemented where the declaration
        forbids it."""
        if dim:
            return NotImplemented  # type: ignore[no-any-return]
        if (start, stop) == (0, self.shape[0]):
            return self.make_like(self)
        tensors: Declared = {}
        for inner in self.inner_tensors:
            tensor: torch.Tensor | None = getattr(self, inner.attribute)
            if tensor is not None and not inner.shared:
                if self.is_derived(inner):
                    tensor = None
                else:
                    tensor = self._rows_of(inner, tensor, start, stop)
                    if tensor is None:
                        return NotImplemented  # type: ignore[no-any-return]
            tensors[inner.argument] = tensor
        rows = self.make_like(self, shape=(stop - start, *self.shape[1:]), **tensors)
        rows.mark_view(self, part=True)
        return rows

    def _rows_of(
        self, inner: InnerTensor, tensor: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor | None:
        """The share of rows [start, stop) in an inner tensor; None where the declaration does not
        tell it."""
        by_rows = inner.by_rows(tensor)
        has_rows_of_tensor = inner.block_rows is None and by_rows.shape[:1] == self.shape[:1]
        has_rows_of_blocks = inner.block_rows is not None and self.dim() == 2
        span = blocks(inner.block_rows or 1, start, stop, self.shape[0])
        if span is None or not (has_rows_of_tensor or has_rows_of_blocks):
            return None
        return inner.as_held(by_rows[span])

    def adopts_bytes_of(self, other: QuantizedTensor) -> bool:
        """Whether copying from ``other`` can copy inner tensors instead of quantizing again: both
        mean the same."""
        if other.shape != self.shape or not self._means_the_same(other):
            return False
        for tensor, source in zip(self.inner_list(), other.inner_list(), strict=True):
            if tensor is not None and (source is None or source.shape != tensor.shape):
                return False
        return self._whole is None or self.shares_scales(other)

    def _means_the_same(self, other: QuantizedTensor) -> bool:
        """Whether the inner tensors of ``other`` would stand for the same values in this tensor."""
        return same_kind(self, other, nominal=False)

    def _share_freshness(self, other: QuantizedTensor) -> None:
        """Share whatever tracks staleness with ``other``, an alias of the same data."""
        pairs = zip(self.inner_list(), other.inner_list(), strict=True)
        if all(tensor is other_tensor for tensor, other_tensor in pairs):
            self._whole = other._whole
            self.share_writes(other)

    @property
    def data(self) -> Self:
        """An alias without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise DTypeError(f"new data is a {type(value).__name__}", expected="a tensor")
        if isinstance(value, QuantizedTensor) and value.inner_tensors == self.inner_tensors:
            self._adopt(value)
            return
        check_high_precision(value, "new data")
        quantizer = self._required_quantizer()
        with torch.no_grad():
            values = value.detach().to(self.device)
            quantized = quantizer.with_usage(**self.get_usages()).quantize(values)
        quantized._quantizer = quantizer
        self._adopt(quantized)

    def _adopt(self, value: Any) -> None:
        """Take over everything of ``value``, a quantized tensor of this kind."""
        if _frame(self) != _frame(value):
            # Only this assignment changes the attributes that torch itself keeps.
            torch.Tensor.data.__set__(self, value.detach())  # type: ignore[attr-defined]
        quantizer = self._quantizer if value._quantizer is None else value._quantizer
        self._hold(value.get_metadata(), quantizer)
        self._share_freshness(value)

    def detach(self) -> Self:
        """An alias of the same data outside the autograd graph."""
        return self.make_like(self)

    def fsdp_pre_all_gather(
        self,
        mesh: object,
        orig_size: torch.Size,
        stride: Sequence[int],
        module: torch.nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[torch.Tensor, ...], object]:
        """The bytes that ``fully_shard`` gathers of this shard, and the metadata of
        :meth:`fsdp_post_all_gather`.

        Raises:
            UsageError: the shards of the weight have different scales.
            ShapeError: they are uneven, or cut blocks in two, and an inner tensor cannot be padded.
        """
        buffers_and_metadata: tuple[tuple[torch.Tensor, ...], object]
        buffers_and_metadata = above("hooks").pre_all_gather(self, mesh, orig_size, module)
        return buffers_and_metadata

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: object,
        param_dtype: torch.dtype,
        *,
        out: QuantizedTensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:
        """The whole tensor of dtype ``param_dtype`` around the gathered bytes, or ``out`` brought
        up to date."""
        whole: tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None
        whole = above("hooks").post_all_gather(metadata, outputs, param_dtype, out)
        return whole

    def _holder(self) -> torch.Tensor | None:
        """The inner tensor whose memory this tensor shows."""
        if not CAN_SHOW_MEMORY:
            return None
        teach_ends()
        return holder_of(self.inner_list())

    def data_ptr(self) -> int:
        """The address of the first inner tensor, where bytes of elements lie; 0 where nothing has
        memory.

        Different weights have different addresses. Aliases of one weight, such as tied weights,
        have the same.
        """
        holder = self._holder()
        return 0 if holder is None else holder.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory at which :meth:`data_ptr` points, which cannot be resized.

        It is empty where nothing has memory, and inside of dispatch modes.
        """
        holder, memory = self._holder(), None
        if holder is not None:
            memory = storage_of(holder)
        if memory is None:
            return super().untyped_storage()
        return memory

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises UsageError: the values lie in no memory that another library could read."""
        raise UsageError(
            f"a {type(self).__name__} cannot be exported by DLPack",
            expected="a tensor in high precision",
            remedy="export its .dequantize()",
        )

    # Any, because torch's type of an index is private.
    def __setitem__(self, index: Any, value: torch.Tensor | builtins.float) -> None:
        """``tensor[index] = value``: all of the tensor is quantized again, unless the entries have
        scales of their own."""
        view = self.detach()[index]
        if isinstance(view, QuantizedTensor):
            adopts = isinstance(value, QuantizedTensor) and view.adopts_bytes_of(value)
            if adopts or view._whole is None or not view.shared_with_whole():
                super().__setitem__(index, value)
                return
        if isinstance(value, QuantizedTensor):
            value = value.dequantize()
        values = self.detach().dequantize()
        values[index] = value
        self.copy_(values)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The values before quantization, on the CPU, when ``quantized_model_init`` made this
        weight."""
        return getattr(self, "_high_precision_init_val", None)

    def clear_high_precision_init_val(self) -> None:
        """Release the initial values, for example once an optimizer has its master weights."""
        self.__dict__.pop("_high_precision_init_val", None)

    def share_memory_(self) -> Self:
        """Move the inner tensors to shared memory."""
        for tensor in self.inner_list():
            if tensor is not None:
                tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the inner tensors are in shared memory."""
        return all(tensor.is_shared() for tensor in self.inner_list() if tensor is not None)

    def __copy__(self) -> Self:
        duplicate = self.make_like(self)
        for name, value in self._extra().items():
            setattr(duplicate, name, value)
        return duplicate

    def _extra(self) -> dict[str, object]:
        extra = {name: self.__dict__[name] for name in _EXTRA_ATTRIBUTES if name in self.__dict__}
        return extra | {"requires_grad": self.requires_grad}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        if not self.is_leaf:
            raise UsageError("only leaf tensors can be deep-copied", remedy="call .detach() first")
        duplicate = super().__deepcopy__(memo)
        for name, value in self._extra().items():
            if isinstance(value, torch.Tensor):
                value = value.clone()
            setattr(duplicate, name, value)
        if self.grad is not None:
            duplicate.grad = self.grad.clone()
        return duplicate

    __repr__ = QuantizedTensorStorage.__repr__  # type: ignore[assignment]

    def _shown(self) -> str:
        usages = [usage for usage, is_served in self.get_usages().items() if is_served]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{self.detach().dequantize_impl(self.dtype)!r}, usages={usages}{grad}"


def _data_of_view(size: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first of the inner tensors that are elements of a view: they have the size of the tensor,
    and begin later than their memory does."""
    for tensor in tensors:
        if tensor.storage_offset() and tuple(tensor.shape) == size and tensor.is_contiguous():
            return tensor
    return None


def _frame(tensor: torch.Tensor) -> tuple[object, ...]:
    """The attributes that torch itself keeps of a tensor."""
    strides, offset = tensor.stride(), tensor.storage_offset()
    return tensor.dtype, tensor.device, tensor.shape, strides, offset


def blocks(side: int | None, start: int, stop: int, size: int) -> slice | None:
    """The blocks of entries [start, stop) of a side of a matrix; None where they cut one in two."""
    if side is None:
        return slice(None)
    if start % side or (stop % side and stop != size):
        return None
    return slice(start // side, -(-stop // side))


class StraightThrough(torch.autograd.Function):
    """``function(tensor, dtype)``, whose gradient is taken for the gradient of ``tensor``."""

    # The context is Any, because attributes of any name are set on it.
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        function: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return function(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grads[0]
        if isinstance(grad, QuantizedTensorStorage):
            grad = grad.dequantize()
        return grad.to(ctx.dtype), None, None


def straight_through(
    tensor: OperandT, function: Callable[[OperandT, torch.dtype], ResultT], dtype: torch.dtype
) -> ResultT:
    """``function(tensor, dtype)`` by :class:`StraightThrough`."""
    result: ResultT
    result = StraightThrough.apply(tensor, function, dtype)  # type: ignore[no-untyped-call]
    return result
