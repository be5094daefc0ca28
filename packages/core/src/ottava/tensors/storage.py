"""``QuantizedTensorStorage``: inner tensors declared once, everything else derived from the
declaration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, SupportsIndex, overload

import torch

from ottava.contract import Contract
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.kernels.checks import check_scalar
from ottava.tensors import declaration
from ottava.tensors.declaration import (
    Declared,
    GemmCache,
    InnerTensor,
    StaticField,
    Usage,
    check_flag,
    check_keywords,
    native_dtype,
)
from ottava.tensors.saving import StorageSpec

_CHANGED = (
    "where options of the quantizer changed after it made the tensor, set them on "
    "quantizer.copy() instead, or give the tensor another quantizer with update_quantizer()"
)
# Every storage class that was imported, by its name.
_CLASSES: dict[str, type[QuantizedTensorStorage]] = {}
USAGES: tuple[Usage, Usage] = ("rowwise", "columnwise")


class StorageQuantizer(Protocol):
    """What a storage asks of its quantizer, an :class:`ottava.Quantizer`."""

    def copy(self) -> Self: ...

    def with_usage(self, rowwise: bool, columnwise: bool) -> Self: ...

    def quantize(self, tensor: torch.Tensor) -> QuantizedTensorStorage: ...

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensorStorage: ...


class QuantizedTensorStorage:
    """Quantized data without the tensor interface.

    A subclass sets :attr:`inner_tensors` and :attr:`static_fields`, and defines :meth:`dequantize`.
    Its constructor takes the declared keywords and ``quantizer``; this one does, a subclass may
    define its own. Saving for backward, moving, cloning, pinning, pickling under
    ``weights_only=True``, ``nbytes`` and metadata are derived from that. Invariant of every
    subclass: ``original ≈ dequantize()``.

    Raises:
        OptionError: the constructor was given a keyword that is not declared, or no value for a
            static field.
        UsageError: it was given no inner tensor at all.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = ()
    # Their attributes, by themselves for the compiler of torch 2.11.
    _inner_names: ClassVar[tuple[str, ...]] = ()
    static_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: Static fields whose values instances know by other means: quantized tensors know their shape
    #: and dtype.
    common_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: The declared static fields without :attr:`common_fields`; set when the class is defined.
    own_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: Whether the constructor is the one that follows from the declaration; set when the class is
    #: defined.
    declares_all: ClassVar[bool] = False
    #: True for a user-defined storage whose GEMM is its quantizer's ``qgemm``.
    custom: bool = False
    #: Whether rowwise data alone can serve the columnwise usage.
    rowwise_serves_columnwise: bool = False
    #: Whether the next forward pass calls :meth:`rebuild_derived`.
    rebuilds_derived: bool = True
    #: The text of the layout of :meth:`grid_operand`, and the same for columns, where it is another
    #: one.
    layout_text: str = ""
    column_layout_text: str = ""
    #: The contract that a file states for the bytes, where there is no quantizer.
    saved_contract: Contract | None = None
    # An ottava.Quantizer or None. Any, because its module imports this one.
    _quantizer: Any
    _dtype: torch.dtype
    # The storage of which this one is a view (rows, say), where a write to the view may change what
    # both share, such as a scale.
    _whole: QuantizedTensorStorage | None = None

    @cached_property
    def _writes(self) -> GemmCache:
        # Shared by all aliases.
        return GemmCache()

    def __init__(self, *, quantizer: StorageQuantizer | None = None, **declared: object) -> None:
        self._hold(check_keywords(type(self), declared), quantizer)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])
        _CLASSES[f"{cls.__module__}:{cls.__qualname__}"] = cls
        cls._inner_names = tuple(inner.attribute for inner in cls.inner_tensors)
        cls.declares_all = cls.__init__ is QuantizedTensorStorage.__init__
        common = {field.attribute for field in cls.common_fields}
        cls.own_fields = tuple(
            field for field in cls.static_fields if field.attribute not in common
        )

    # -- construction --

    @classmethod
    def check_declared(cls, declared: Declared) -> Declared:
        """Inner tensors, static fields and ``dtype``, by their arguments, in the form in which the
        storage holds them. A subclass raises an error where they do not fit together."""
        return declared

    def _hold(self, declared: Declared, quantizer: StorageQuantizer | None) -> None:
        self._writes = GemmCache()
        self._quantizer = quantizer
        for field in self.own_fields:
            setattr(self, field.attribute, declared[field.argument])
        self._put_inner([declared[inner.argument] for inner in self.inner_tensors])

    def _put_inner(self, tensors: Sequence[torch.Tensor | None]) -> None:
        for inner, tensor in zip(self.inner_tensors, tensors, strict=True):
            setattr(self, inner.attribute, tensor)

    @classmethod
    def _arguments(
        cls, tensors: Sequence[torch.Tensor | None], static: Sequence[object]
    ) -> Declared:
        """Inner tensors and static values, in the order of the declaration, by their arguments."""
        names = [inner.argument for inner in cls.inner_tensors]
        names += [field.argument for field in cls.all_static_fields()]
        return dict(zip(names, (*tensors, *static), strict=True))

    @classmethod
    def all_static_fields(cls) -> tuple[StaticField, ...]:
        """The declared static fields; quantized tensors add those that every tensor has."""
        return cls.common_fields + cls.own_fields

    # -- inner tensors and metadata --

    def inner_list(self) -> list[torch.Tensor | None]:
        """The inner tensors in the order of the declaration; None for those not held."""
        return [getattr(self, name) for name in self._inner_names]

    def get_metadata(self) -> Declared:
        """Constructor keywords that build this storage again (tensors are shared, not copied)."""
        tensors, spec = self.flatten_storage()
        return self._arguments(tensors, spec.static) | {"quantizer": self._quantizer}

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Self]:
        """Give up the inner tensors: ``(tensors, self)``; :meth:`restore_from_saved` takes them
        back."""
        tensors = self.inner_list()
        self.clear()
        return tensors, self

    def restore_from_saved(
        self, tensors: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Take this storage's share from the front of ``tensors`` and return the rest, or raise
        ShapeError."""
        count = len(self.inner_tensors)
        if not isinstance(tensors, Sequence) or not all(
            isinstance(t, torch.Tensor | None) for t in tensors[:count]
        ):
            raise DTypeError(
                "the saved tensors are not a list of tensors",
                expected="what prepare_for_saving returned",
            )
        if len(tensors) < count:
            raise ShapeError(
                f"{len(tensors)} saved tensors for {type(self).__name__}",
                expected=f"at least {count}",
            )
        self._put_inner(tensors[:count])
        return list(tensors[count:])

    def clear(self) -> None:
        """Drop all data; the object can be filled again by :meth:`restore_from_saved`."""
        self._put_inner([None] * len(self.inner_tensors))

    def _empty(self, purpose: str = "") -> UsageError:
        """The error for a storage without data; ``purpose`` goes on from "holds no data"."""
        return UsageError(
            f"{type(self).__name__} holds no data{purpose}", remedy="it was cleared or saved"
        )

    def _nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inner_list() if tensor is not None)

    #: Bytes that the inner tensors hold. Annotated as an attribute, as that of torch's tensors is.
    nbytes: int = property(_nbytes)  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        """The device of the inner tensors."""
        for inner in self.inner_tensors:
            tensor: torch.Tensor | None = getattr(self, inner.attribute)
            if tensor is not None:
                return tensor.device
        raise self._empty()

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that was quantized."""
        return torch.Size(self.size())

    @overload
    def size(self, dim: None = None) -> torch.Size: ...

    @overload
    def size(self, dim: int) -> int: ...

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Shape of the tensor that was quantized, or one of its dimensions."""
        size = self._size()
        return size if dim is None else size[dim]

    def _size(self) -> torch.Size:
        """Shape of the tensor that was quantized: by default the first inner tensor's."""
        tensor: torch.Tensor | None = None
        if self.inner_tensors:
            tensor = getattr(self, self.inner_tensors[0].attribute)
        if tensor is None:
            raise self._empty()
        return tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Nominal dtype."""
        return self._dtype

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size())

    # -- saving by value, copies and pickles --

    def flatten_storage(self) -> tuple[list[torch.Tensor | None], StorageSpec]:
        """The inner tensors, and a spec that builds a storage around them. Nothing is changed."""
        static = tuple([getattr(self, field.attribute) for field in self.all_static_fields()])
        return self.inner_list(), StorageSpec(type(self), static, self._quantizer, self._whole)

    def apply_to_inner(self, function: Callable[..., torch.Tensor]) -> Self:
        """A new storage with ``function`` applied to each inner tensor held; the quantizer is
        copied."""
        tensors, spec = self.flatten_storage()
        with torch.no_grad():
            results = [None if tensor is None else function(tensor) for tensor in tensors]
            storage: Self
            storage = StorageSpec(spec.cls, spec.static, self._copied_quantizer()).build(results)
            return storage

    def _copied_quantizer(self) -> StorageQuantizer | None:
        quantizer: StorageQuantizer | None = self._quantizer
        return None if quantizer is None else quantizer.copy()

    def clone_storage(self) -> Self:
        """A copy that shares nothing."""
        return self.apply_to_inner(torch.clone)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        if all(tensor is None for tensor in self.inner_list()):
            raise self._empty(" to pickle")
        storage = self
        if self._whole is not None:
            # A view is copied, because unpickled it would not know of its whole.
            storage = self.clone_storage()
        tensors, spec = storage.flatten_storage()
        return rebuild_storage, (spec.cls, tensors, spec.static, spec.quantizer, self._extra())

    def _extra(self) -> dict[str, object]:
        """Attributes that copies and pickles carry along."""
        return {}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        duplicate = memo[id(self)] = self.clone_storage()
        return duplicate

    def flatten_columnwise(self) -> tuple[Sequence[torch.Tensor | None], StorageSpec]:
        """:meth:`flatten_storage` of the columnwise usage alone, which a backward pass reads. The
        storage may give up its rowwise usage."""
        self.update_usage(rowwise_usage=False, columnwise_usage=True)
        return self.flatten_storage()

    # -- usages --

    def get_usages(self) -> dict[str, bool]:
        """Which usages the data held can serve, ``{"rowwise": …, "columnwise": …}``."""
        pairs = zip(self.inner_tensors, self.inner_list(), strict=True)
        usages = {inner.usage for inner, tensor in pairs if tensor is not None}
        if all(inner.usage == "both" for inner in self.inner_tensors):
            return dict.fromkeys(USAGES, bool(usages))
        return {usage: usage in usages for usage in USAGES}

    def _requested_usages(
        self, rowwise_usage: bool | None, columnwise_usage: bool | None
    ) -> tuple[bool, bool]:
        """The usages that :meth:`update_usage` is to leave."""
        usages = self.get_usages()
        if rowwise_usage is None:
            rowwise_usage = usages["rowwise"]
        if columnwise_usage is None:
            columnwise_usage = usages["columnwise"]
        check_flag("rowwise_usage", rowwise_usage)
        check_flag("columnwise_usage", columnwise_usage)
        if not (rowwise_usage or columnwise_usage):
            raise OptionError(
                "update_usage would leave neither usage",
                expected="rowwise_usage or columnwise_usage to stay",
                remedy="call clear() to drop all data",
            )
        return rowwise_usage, columnwise_usage

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop the data of a usage (False), ask for one (True), or leave it (None).

        Raises:
            UsageError: a usage is asked for that the data held cannot give.
            OptionError: neither usage would be left.
        """
        rowwise, columnwise = self._requested_usages(rowwise_usage, columnwise_usage)
        usages = self.get_usages()
        requested = {"rowwise": rowwise, "columnwise": columnwise}
        for usage in USAGES:
            if requested[usage] and not usages[usage]:
                raise self._without(usage)
        for inner in self.inner_tensors:
            if inner.usage != "both" and not requested[inner.usage]:
                setattr(self, inner.attribute, None)

    def _without(self, usage: str, more: str = "") -> UsageError:
        """The error for a usage without data; ``more`` goes on from its remedy."""
        return UsageError(
            f"{type(self).__name__} has no {usage} data",
            expected=f"a tensor quantized with {usage}=True",
            remedy=f"call quantizer.set_usage({usage}=True) before quantizing{more}",
        )

    # -- values, and writes of other values --

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """High-precision values, in ``dtype`` or the nominal dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define dequantize()")

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Self:
        """Overwrite the values with ``tensor``, quantized by this object's quantizer.

        Raises:
            UsageError, ShapeError: there is no quantizer, or ``tensor`` has another shape.
        """
        self._required_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def _required_quantizer(self) -> StorageQuantizer:
        quantizer: StorageQuantizer | None = self._quantizer
        if quantizer is None:
            raise UsageError(
                f"{type(self).__name__} has no quantizer", remedy="set one with update_quantizer()"
            )
        return quantizer

    def copy_from_storage(
        self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> None:
        """Copy the inner tensors of ``src`` into this object's, in place.

        Raises:
            DTypeError, ShapeError: ``src`` is of another kind, or has another shape.
            UsageError: ``src`` lacks an inner tensor that this object holds, or this object holds
                none; or it is a view, and ``src`` has another scale than the rest of its tensor.
        """
        self._check_source(src)
        pairs = self._pairs_with(src)
        if not pairs:
            raise self._empty(" to write to")
        if noop_flag is not None:
            check_scalar(noop_flag, pairs[0][0], "noop_flag")
        for target, source in pairs:
            if noop_flag is not None:
                source = torch.where(noop_flag.reshape(()) == 1, target, source)
            target.copy_(source)
        targets = [target for target, _ in pairs]
        if isinstance(self, torch.Tensor):
            targets.append(self)
        declaration.bump_versions(targets)
        self.mark_written()
        if self._whole is not None:
            self._whole.mark_written()

    def _check_source(self, src: QuantizedTensorStorage) -> None:
        """Refuse a source of :meth:`copy_from_storage` of another kind, shape or shared scale."""
        if not isinstance(src, QuantizedTensorStorage) or not self._has_parts_of(src):
            raise DTypeError(
                f"cannot copy a {type(src).__name__} into a {type(self).__name__}",
                expected="one kind",
                remedy=_CHANGED,
            )
        if tuple(src.size()) != tuple(self.size()):
            raise ShapeError(
                f"source has shape {tuple(src.size())}", expected=str(tuple(self.size()))
            )
        if self._whole is None or self.shares_scales(src) or self._rest_is_zero():
            return
        raise UsageError(
            f"a write to a view of a {type(self).__name__} would change the scale of the rest of "
            f"the tensor",
            expected="values that are quantized with the scale that it has",
            remedy="assign with tensor[index] = values, or write to the whole: all of it is "
            "quantized again",
        )

    def _has_parts_of(self, other: QuantizedTensorStorage) -> bool:
        """Whether the inner tensors of both are the same parts of a tensor; shards need not gather
        the same ones."""
        if self.inner_tensors == other.inner_tensors:
            return True
        return len(self.inner_tensors) == len(other.inner_tensors) and all(
            mine == replace(theirs, gather=mine.gather)
            for mine, theirs in zip(self.inner_tensors, other.inner_tensors, strict=True)
        )

    def _pairs_with(self, src: QuantizedTensorStorage) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each inner tensor that this object holds, with that of ``src``, which has to fit."""
        pairs = []
        tensors, sources = self.inner_list(), src.inner_list()
        for inner, target, source in zip(self.inner_tensors, tensors, sources, strict=True):
            if target is None:
                continue
            if source is None:
                raise UsageError(
                    f"the source holds no {inner.argument!r}",
                    expected="the same usages",
                    remedy="quantize it with the usages of the destination",
                )
            native, source_native = native_dtype(self, inner), native_dtype(src, inner)
            if native != source_native:
                raise DTypeError(
                    f"source holds {source_native}", expected=str(native), remedy=_CHANGED
                )
            if source.shape != target.shape:
                raise ShapeError(
                    f"{inner.argument!r} of the source has shape {tuple(source.shape)}",
                    expected=str(tuple(target.shape)),
                )
            pairs.append((target, source))
        return pairs

    def shared_inner(self) -> list[InnerTensor]:
        """The inner tensors held that belong to all rows alike, such as one scale for the
        tensor."""
        return [
            inner
            for inner in self.inner_tensors
            if inner.shared and getattr(self, inner.attribute) is not None
        ]

    def shared_with_whole(self) -> list[str]:
        """Attributes of a view whose values serve other elements of its tensor, too; by default
        those of :meth:`shared_inner`."""
        return [inner.attribute for inner in self.shared_inner()]

    def shares_scales(self, other: QuantizedTensorStorage) -> bool:
        """Whether ``other`` has equal values of what a view shares with its tensor, so that its
        elements mean the same here."""
        return all(
            declaration.equal_scales(getattr(self, name), getattr(other, name))
            for name in self.shared_with_whole()
        )

    def _rest_is_zero(self) -> bool:
        """Whether the rest of the tensor holds zeros alone, which suit any scale, as the padding
        of a shard does."""
        if torch.compiler.is_compiling() or self._whole is None:
            return False
        part = self._elements()
        # empty_like keeps the strides of a tensor without gaps and overlaps. Only there does a
        # count of the part count each element once.
        if torch.empty_like(part, device="meta").stride() != part.stride():
            return False
        whole = self._whole._elements()
        return bool(torch.count_nonzero(part) == torch.count_nonzero(whole))

    def _elements(self) -> torch.Tensor:
        """The first inner tensor of :meth:`raw_inner`."""
        elements: torch.Tensor = getattr(self, self.raw_inner()[0].attribute)
        return elements

    def mark_written(self) -> None:
        """Called after the values changed in place: tensors that are cached of them are outdated
        then."""
        self._writes.writes += 1

    def share_writes(self, other: QuantizedTensorStorage) -> None:
        """Count writes together with ``other``, an alias."""
        self._writes = other._writes

    # -- operands of products --

    def gemm_operand(
        self, *, columnwise: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This tensor as a GEMM operand ``[rows, columns]`` in ``dtype``, and a float32 scalar
        still to multiply.

        By default the values, and no factor. A storage of elements that ``dtype`` has returns these
        and its scale.
        """
        values: torch.Tensor = self.dequantize(dtype)
        return values.reshape(-1, values.shape[-1]), None

    def grid_operand(self, *, columnwise: bool) -> tuple[torch.Tensor | None, ...] | None:
        """The bytes of the elements as a matrix, and scales, as they are stored for the usage. The
        amaxes of a second level of scales may follow.

        By default None: products call :meth:`gemm_operand`.

        Raises:
            UsageError: the storage has no data for the usage.
        """
        return None

    def gemm_cache(self) -> GemmCache | None:
        """The cache of products of this operand; None in code that is being compiled, because a
        graph keeps no Python objects."""
        return None if torch.compiler.is_compiling() else self._writes

    # -- elements, and inner tensors that derive from them --

    def raw_inner(self) -> tuple[InnerTensor, ...]:
        """The inner tensors held that are the elements in their order: for each usage the first
        that is gathered."""
        by_usage: dict[str, InnerTensor] = {}
        for inner in self.inner_tensors:
            if inner.gather and not inner.transposed and getattr(self, inner.attribute) is not None:
                by_usage.setdefault(inner.usage, inner)
        if not by_usage:
            raise UsageError(
                f"{type(self).__name__} holds no elements",
                expected="an inner tensor declared with gather=True",
                remedy="keep the rowwise usage of moved weights",
            )
        return tuple(by_usage.values())

    def element_range(self, inner: InnerTensor, start: int, count: int) -> range | None:
        """The part of the flat ``inner`` that has ``count`` elements of the flattened tensor, from
        ``start`` on.

        None where an inner tensor does not have the elements in this order. Elements outside of the
        range may share its first and its last byte.
        """
        if inner.transposed or self.is_derived(inner):
            return None
        data: torch.Tensor = getattr(self, inner.attribute)
        if not data.is_contiguous() or data.shape != self.size():
            return None
        return range(start, start + count)

    def is_derived(self, inner: InnerTensor) -> bool:
        """Whether an inner tensor is made of the others, as a transpose is, and not written by
        itself."""
        return not (inner.gather or inner.shared)

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        """Put ``tensor``, which holds the same values, in the place of an inner tensor."""
        setattr(self, inner.attribute, tensor)

    def rebuild_derived(self, *, force: bool = False) -> None:
        """Compute outdated inner tensors that derive from the elements. By default there are none.

        With ``force`` also those that look up to date are computed again, because a collective may
        write bytes without counting it as a write.
        """

    def update_quantizer(self, quantizer: StorageQuantizer | None) -> None:
        """Replace the quantizer used by in-place updates.

        Raises:
            DTypeError: it has no ``update_quantized``.
        """
        if quantizer is not None and not callable(getattr(quantizer, "update_quantized", None)):
            raise DTypeError(
                f"the quantizer is a {type(quantizer).__name__}",
                expected="an ottava.Quantizer or None",
            )
        self._quantizer = quantizer

    def __repr__(self, *, tensor_contents: object = None) -> str:
        try:
            with torch.no_grad():
                body = self._shown()
        except Exception as error:
            body = f"no readable data: {type(error).__name__}"
        return f"{type(self).__name__}({body})"

    def _shown(self) -> str:
        return f"shape={tuple(self.size())}, data={self.dequantize()}"


def storage_classes() -> dict[str, type[QuantizedTensorStorage]]:
    """Every storage class that was imported, by ``"module:Class"``."""
    return dict(_CLASSES)


def rebuild_storage(
    cls: type[QuantizedTensorStorage],
    tensors: Sequence[torch.Tensor | None],
    static: Sequence[object],
    quantizer: StorageQuantizer | None,
    extra: Mapping[str, object] | None = None,
) -> QuantizedTensorStorage:
    """The function that a pickle calls. The only code that it runs is the constructor of a
    registered storage class."""
    storage: QuantizedTensorStorage = StorageSpec(cls, tuple(static), quantizer).build(tensors)
    for name, value in (extra or {}).items():
        setattr(storage, name, value)
    return storage


torch.serialization.add_safe_globals([rebuild_storage])
