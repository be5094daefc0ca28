"""``QuantizedTensor``: a storage that is also a ``torch.Tensor`` of its nominal dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.kernels import check_high_precision
from ottava.kernels.checks import check_dtype
from ottava.tensors.declaration import StaticField, check_values_dtype, checked, same_kind
from ottava.tensors.dequantized_view import as_dequantized_views
from ottava.tensors.memory import holder_of, storage_of
from ottava.tensors.saved_by_others import CAN_SHOW_MEMORY, teach_ends
from ottava.tensors.slots import above
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import disabled_torch_function, make_wrapper_subclass, tree_map, writes_of

# The aten table: of each class its ops.
_TABLES: dict[type, dict[Any, Callable[..., Any]]] = {}
# Python attributes of a parameter that copying and pickling carry along.
_EXTRA_ATTRIBUTES = ("_is_param", "_high_precision_init_val")


def _dequantizing(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def dequantize(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Dequantize to the dtype of that name."""
        return self.dequantize(dtype)  # type: ignore[no-any-return]

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
    # The group on which this tensor's shards agreed on their scales.
    _shard_group: Any = None

    @staticmethod
    def __new__(
        cls,
        *by_position: Any,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        quantizer: Any = None,
        requires_grad: bool = False,
        **declared: Any,
    ) -> Any:
        if by_position:
            # Code that replaces parameters calls type(parameter)(values).
            what = f"{cls.__name__} was called with {type(by_position[0]).__name__} as its values"
            expected = f"{', '.join(i.argument for i in cls.inner_tensors)} by name"
            raise DTypeError(what, expected, "make it by a quantizer: quantizer(values)")
        check_dtype(dtype)
        declared = checked(cls, declared, dtype=dtype)
        held: list[Any] = [declared[inner.argument] for inner in cls.inner_tensors]
        given, like = [tensor for tensor in held if tensor is not None], cls.laid_out_like(declared)
        if not given or (shape is None and like is None and held[0] is None):
            elements = [
                i.argument for i in cls.inner_tensors if i.usage != "both" and i.block_rows is None
            ]
            raise UsageError(
                f"a {cls.__name__} needs data", expected=" or ".join(elements) or "an inner tensor"
            )
        if like is not None and shape is not None and tuple(shape) != tuple(like.shape):
            raise ShapeError(f"the data has shape {tuple(like.shape)}", expected=str(tuple(shape)))
        if like is None:
            shape = tuple(held[0].shape if shape is None else shape)
            # Elements that begin later than their storage does are those of a view.
            views = (
                t
                for t in given
                if t.storage_offset() and tuple(t.shape) == shape and t.is_contiguous()
            )
            like = next(views, None)
        size, *place = (
            (shape, None, None)
            if like is None
            else (like.shape, like.stride(), like.storage_offset())
        )
        # It owns no memory: data_ptr() and untyped_storage() answer with that of what it holds.
        about = {
            "dtype": dtype,
            "device": given[0].device,
            "requires_grad": requires_grad,
            "storage_size": 0,
        }
        made: Any = make_wrapper_subclass(
            cls, size, strides=place[0], storage_offset=place[1], **about
        )
        made._hold(declared, quantizer)
        return made

    def __init__(self, *by_position: Any, **given: Any) -> None:
        pass  # __new__ did everything, and says what the arguments are.

    @classmethod
    def laid_out_like(cls, declared: dict[str, Any]) -> torch.Tensor | None:
        """What lies as the tensor that ``declared`` gives; None for a contiguous one of the first
        inner's shape."""
        return None

    # torch.Tensor answers these; the storage's answers are for bare storages.
    shape, device, numel = torch.Tensor.shape, torch.Tensor.device, torch.Tensor.numel
    dtype = torch.Tensor.dtype
    _dtype: torch.dtype = torch.Tensor.dtype
    size: Any = torch.Tensor.size
    _shape: tuple[int, ...] = property(lambda self: tuple(self.shape))  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        owner = next((t for t in types if issubclass(t, QuantizedTensor)), cls)
        result = NotImplemented
        for ancestor in owner.__mro__:
            function = _TABLES.get(ancestor, {}).get(func)
            result = NotImplemented if function is None else function(func, *args, **(kwargs or {}))
            if result is not NotImplemented:
                break
        if result is NotImplemented:
            result = _dequantize_and_run(func, args, kwargs or {})
        return as_dequantized_views(func, result, owner.__name__)

    __torch_function__ = disabled_torch_function

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [i.attribute for i in self.inner_tensors if getattr(self, i.attribute) is not None]
        static = tuple(getattr(self, field.attribute) for field in self.own_fields)
        return names, (type(self), static, self.dtype, self._quantizer)

    @classmethod
    def __metadata_guard__(cls, original: Any, other: Any) -> bool:
        """Whether code that was compiled for a tensor serves another one: state of a quantizer is
        no part of it."""
        mine, theirs = original[3], other[3]
        alike = mine is theirs if mine is None or theirs is None else mine.is_alike(theirs)
        return bool(original[:3] == other[:3] and alike)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], context: Any, size: Any, stride: Any
    ) -> QuantizedTensor:
        cls, static, dtype, quantizer = context
        arguments = cls._arguments(
            [inner.get(i.attribute) for i in cls.inner_tensors], (size, dtype, *static)
        )
        return cls(**arguments, quantizer=quantizer)  # type: ignore[no-any-return]

    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        """High-precision values: what a subclass defines, or takes from the storage class that it
        is combined with."""
        with torch.no_grad():
            return super().dequantize(dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Values in ``dtype`` (DTypeError if not of floats) or the nominal one; differentiable,
        straight-through."""
        check_values_dtype(dtype)
        if torch.is_grad_enabled() and self.requires_grad:
            return StraightThrough.apply(self, type(self).dequantize_impl, dtype or self.dtype)  # type: ignore[no-any-return,no-untyped-call]
        return self.dequantize_impl(dtype or self.dtype)

    float, half, bfloat16 = map(_dequantizing, (torch.float32, torch.float16, torch.bfloat16))

    def to_dtype(self, dtype: torch.dtype) -> QuantizedTensor:
        """The same quantized values (shared) presented as another nominal dtype; differentiable."""
        return StraightThrough.apply(self, lambda t, d: t.make_like(t, dtype=d), dtype)  # type: ignore[no-any-return,no-untyped-call]

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensor,
        *,
        shape: Any = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **replaced: Any,
    ) -> Any:
        """A tensor around the inner tensors of ``tensor`` (shared), with some of its arguments
        replaced."""
        if not isinstance(tensor, QuantizedTensor):
            raise DTypeError(
                f"make_like of a {type(tensor).__name__}", expected="a quantized tensor"
            )
        given = {
            "shape": tuple(tensor.shape if shape is None else shape),
            "dtype": dtype or tensor.dtype,
        }
        build: Any = type(tensor)
        made = build(**(tensor.get_metadata() | replaced | given), requires_grad=requires_grad)
        made._share_freshness(tensor)
        return made

    def mark_view(self, of: QuantizedTensor, *, part: bool = False) -> None:
        """Note that this tensor is a view of another one, with which it shares memory.

        Of a ``part``, what a write to it would change, a scale, belongs to more of ``of`` than the
        view has.
        """
        self.share_writes(of)
        self._whole = of if part and of._whole is None else of._whole

    def reshaped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """A view in another shape, that ``function`` gives data; NotImplemented where the class has
        none."""
        return NotImplemented

    def narrowed(self, dim: int, start: int, stop: int) -> Any:
        """A view of entries [start, stop) of a dimension; NotImplemented where the declaration
        forbids it."""
        if dim:
            return NotImplemented
        if (start, stop) == (0, self.shape[0]):
            return self.make_like(self)
        taken: dict[str, Any] = {}
        for inner in self.inner_tensors:
            value: torch.Tensor | None = getattr(self, inner.attribute)
            if value is None or inner.shared:
                taken[inner.argument] = value
            elif self.is_derived(inner):
                taken[inner.argument] = None
            else:
                of_blocks, value = inner.block_rows is not None, inner.by_rows(value)
                span = blocks(inner.block_rows or 1, start, stop, self.shape[0])
                if span is None or (
                    self.dim() != 2 if of_blocks else value.shape[:1] != self.shape[:1]
                ):
                    return NotImplemented
                taken[inner.argument] = inner.as_held(value[span])
        rows = self.make_like(self, shape=(stop - start, *self.shape[1:]), **taken)
        rows.mark_view(self, part=True)
        return rows

    def adopts_bytes_of(self, other: QuantizedTensor) -> bool:
        """Whether copying from ``other`` can copy inner tensors instead of quantizing again: both
        mean the same."""
        if other.shape != self.shape or not self._means_the_same(other):
            return False
        pairs = [
            (a, b)
            for a, b in zip(self.inner_list(), other.inner_list(), strict=True)
            if a is not None
        ]
        alike = all(b is not None and b.shape == a.shape for a, b in pairs)
        return alike and (self._whole is None or self.shares_scales(other))

    def _means_the_same(self, other: QuantizedTensor) -> bool:
        """Whether inner tensors of ``other`` mean here what they mean there."""
        return same_kind(self, other, nominal=False)

    def _share_freshness(self, other: QuantizedTensor) -> None:
        """Share whatever tracks staleness with ``other``, an alias of the same data."""
        if all(
            mine is theirs
            for mine, theirs in zip(self.inner_list(), other.inner_list(), strict=True)
        ):
            self._whole = other._whole
            self.share_writes(other)

    @property
    def data(self) -> Any:
        """An alias without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise DTypeError(f"new data is a {type(value).__name__}", expected="a tensor")
        adopted: Any = value
        if not isinstance(value, QuantizedTensor) or value.inner_tensors != self.inner_tensors:
            check_high_precision(value, "new data")
            quantizer = self._required_quantizer()
            with torch.no_grad():
                adopted = quantizer.with_usage(**self.get_usages()).quantize(
                    value.detach().to(self.device)
                )
            adopted._quantizer = quantizer
        self._adopt(adopted)

    def _adopt(self, value: Any) -> None:
        """Take over what ``value`` is, a quantized tensor of this kind."""
        mine, its = (
            (t.dtype, t.device, t.shape, t.stride(), t.storage_offset()) for t in (self, value)
        )
        if mine != its:
            # What torch itself keeps of this tensor follows only this way.
            torch.Tensor.data.__set__(self, value.detach())  # type: ignore[attr-defined]
        self._hold(
            value.get_metadata(), self._quantizer if value._quantizer is None else value._quantizer
        )
        self._whole = value._whole
        self._share_freshness(value)

    def detach(self) -> Any:
        """An alias of the same data outside the autograd graph."""
        return self.make_like(self)

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: torch.Size, stride: Sequence[int], module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What ``fully_shard`` gathers of this shard, as bytes, and what
        :meth:`fsdp_post_all_gather` needs.

        Raises:
            UsageError: the shards of the weight have different scales.
            ShapeError: they are uneven, or cut blocks in two, and an inner tensor cannot be padded.
        """
        return above("hooks").pre_all_gather(self, mesh, orig_size, module)  # type: ignore[no-any-return]

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: QuantizedTensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:
        """The whole tensor of dtype ``param_dtype`` around the gathered bytes, or ``out`` brought
        up to date."""
        return above("hooks").post_all_gather(metadata, outputs, param_dtype, out)  # type: ignore[no-any-return]

    def _holder(self) -> torch.Tensor | None:
        """The inner tensor whose memory this tensor shows."""
        if not CAN_SHOW_MEMORY:
            return None
        teach_ends()
        return holder_of(self.inner_list())

    def data_ptr(self) -> int:
        """The address of the first inner tensor that is held: codes lie there. 0 where nothing has
        memory.

        Weights have different addresses, and aliases of one weight, tied ones for example, the
        same.
        """
        holder = self._holder()
        return 0 if holder is None else holder.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory at which :meth:`data_ptr` points, which cannot be resized.

        It is empty where nothing has memory, and inside of dispatch modes.
        """
        holder = self._holder()
        memory = None if holder is None else storage_of(holder)
        return super().untyped_storage() if memory is None else memory

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UsageError: the values lie in no memory that another library could read."""
        what, remedy = (
            f"a {type(self).__name__} cannot be exported by DLPack",
            "export its .dequantize()",
        )
        raise UsageError(what, expected="a tensor in high precision", remedy=remedy)

    def __setitem__(self, index: Any, value: Any) -> None:
        """``tensor[index] = value``: all of it is quantized again, unless these have scales of
        their own."""
        view = self.detach()[index]
        if isinstance(view, QuantizedTensor):
            adopts = isinstance(value, QuantizedTensor) and view.adopts_bytes_of(value)
            if adopts or view._whole is None or not view.shared_with_whole():
                super().__setitem__(index, value)
                return
        values = self.detach().dequantize()
        values[index] = value.dequantize() if isinstance(value, QuantizedTensor) else value
        self.copy_(values)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The values before quantization, on the CPU, when ``quantized_model_init`` made this
        weight."""
        return getattr(self, "_high_precision_init_val", None)

    def clear_high_precision_init_val(self) -> None:
        """Release the initial values, for example once an optimizer has its master weights."""
        self.__dict__.pop("_high_precision_init_val", None)

    def share_memory_(self) -> Any:
        """Move the inner tensors to shared memory."""
        for tensor in self.inner_list():
            if tensor is not None:
                tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the inner tensors are in shared memory."""
        return all(tensor.is_shared() for tensor in self.inner_list() if tensor is not None)

    def __copy__(self) -> Any:
        copied = self.make_like(self)
        for name, value in self._extra().items():
            setattr(copied, name, value)
        return copied

    def _extra(self) -> dict[str, Any]:
        held = {name: self.__dict__[name] for name in _EXTRA_ATTRIBUTES if name in self.__dict__}
        return held | {"requires_grad": self.requires_grad}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise UsageError("only leaf tensors can be deep-copied", remedy="call .detach() first")
        copied: Any = super().__deepcopy__(memo)
        for name, value in self._extra().items():
            setattr(copied, name, value.clone() if isinstance(value, torch.Tensor) else value)
        if self.grad is not None:
            copied.grad = self.grad.clone()
        return copied

    __repr__ = QuantizedTensorStorage.__repr__  # type: ignore[assignment]

    def _shown(self) -> str:
        usages = [name for name, held in self.get_usages().items() if held]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{self.detach().dequantize_impl(self.dtype)!r}, usages={usages}{grad}"


def implements(cls: type, *ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``function(op, *args, **kwargs)`` for aten overloads on ``cls`` and its subclasses.

    Returning ``NotImplemented`` falls through to the next class of the hierarchy, then to the
    fallback.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _TABLES.setdefault(cls, {}).update(dict.fromkeys(ops, function))
        return function

    return register


def _dequantize_and_run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dequantize, compute, and quantize into whatever was written: the schema says what, but not
    that of a collective."""
    if op.name().startswith("c10d::"):
        what = f"the collective {op.name()} was called with a quantized tensor"
        load = "load whole state dicts into sharded models with broadcast_from_rank0=True, or with "
        expected = "plain tensors: its data and scales, or its values"
        remedy = (
            f"{load}ottava.checkpoint.load_sharded; shard weights by fully_shard, as no "
            f"tensor parallel plan can"
        )
        raise UsageError(what, expected=expected, remedy=remedy)
    plain: dict[int, torch.Tensor] = {}
    owners: dict[int, Any] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, QuantizedTensorStorage):
            return value
        # One dequantized copy per object, so that an op given the same tensor twice still sees one.
        if id(value) not in plain:
            plain[id(value)] = value.dequantize()
            owners[id(value)] = value
        return plain[id(value)]

    plain_args, plain_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    places = writes_of(op)
    before = {key: values.clone() for key, values in plain.items()} if places is None else {}
    result = op(*plain_args, **plain_kwargs)
    written: dict[int, Any] = {}
    for position, name in places or ():
        value = args[position] if position < len(args) else kwargs.get(name)
        entries = value if isinstance(value, (list, tuple)) else (value,)
        written |= {
            id(entry): entry for entry in entries if isinstance(entry, QuantizedTensorStorage)
        }
    for key, values in before.items():
        if not _same_bits(values, plain[key]):
            written[key] = owners[key]
    if len(written) > 1 and any(
        getattr(value, "_shard_group", None) is not None for value in written.values()
    ):
        # Shards: one collective serves all whose scales are shared.
        above("rules").requantize([(value, plain[key]) for key, value in written.items()])
    else:
        for key, value in written.items():
            value.quantize_(plain[key])
    # An in-place op returns its own argument: hand back the quantized one.
    returned = {
        id(plain[key]): value for key, value in (owners if places is None else written).items()
    }
    return tree_map(lambda r: returned.get(id(r), r), result) if returned else result


def _same_bits(values: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and bits, NaN included."""
    if values.shape != others.shape:
        return False
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (values, others)))


def blocks(side: int | None, start: int, stop: int, size: int) -> slice | None:
    """The blocks of entries [start, stop) of a side of a matrix; None where they cut one in two."""
    if side is None:
        return slice(None)
    if start % side or (stop % side and stop != size):
        return None
    return slice(start // side, -(-stop // side))


class StraightThrough(torch.autograd.Function):
    """``function(tensor, dtype)``, whose gradient is taken for the gradient of ``tensor``."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, function: Callable[..., Any], dtype: torch.dtype
    ) -> Any:
        ctx.dtype = tensor.dtype
        return function(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].dequantize() if isinstance(grads[0], QuantizedTensorStorage) else grads[0]
        return grad.to(ctx.dtype), None, None
