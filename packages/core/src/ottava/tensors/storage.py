"""``QuantizedTensorStorage``: inner tensors declared once, everything else derived from the
declaration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.kernels.checks import check_scalar
from ottava.tensors import declaration
from ottava.tensors.declaration import (
    GemmCache,
    InnerTensor,
    StaticField,
    check_flag,
    checked,
    native_dtype,
)
from ottava.tensors.saving import StorageSpec

_CHANGED = (
    "where options of the quantizer changed after it made the tensor, set them on "
    "quantizer.copy() instead, or give the"
    " tensor another quantizer with update_quantizer()"
)
# Every storage class that was imported, by its name.
_CLASSES: dict[str, type[QuantizedTensorStorage]] = {}
USAGES = ("rowwise", "columnwise")


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
    _inner_names: ClassVar[tuple[str, ...]] = ()  # their attributes, for the compiler of torch 2.11
    static_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: What every instance knows by other means: quantized tensors their shape and dtype.
    common_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: The declared static fields without :attr:`common_fields`; found when the class is.
    own_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: Whether nothing but the declaration says how a bare storage is made; found when the class is.
    declares_all: ClassVar[bool] = False
    #: True for a user-defined storage whose GEMM is its quantizer's ``qgemm``.
    custom: bool = False
    #: Whether rowwise data alone can serve the columnwise usage.
    rowwise_serves_columnwise: bool = False
    #: Whether the next forward pass makes what derives from the elements and is outdated.
    rebuilds_derived: bool = True
    #: The text of the layout of :meth:`grid_operand`, and the same for columns, where it is another
    #: one.
    layout_text: str = ""
    column_layout_text: str = ""
    _quantizer: Any
    _dtype: torch.dtype
    # The storage of which this one is a view (rows, say), when they share what a write to the view
    # would change.
    _whole: Any = None

    @cached_property
    def _writes(self) -> GemmCache:
        # Shared by all aliases.
        return GemmCache()

    def __init__(self, *, quantizer: Any = None, **declared: Any) -> None:
        self._hold(checked(type(self), declared), quantizer)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])
        _CLASSES[f"{cls.__module__}:{cls.__qualname__}"] = cls
        cls._inner_names = tuple(inner.attribute for inner in cls.inner_tensors)
        cls.declares_all = cls.__init__ is QuantizedTensorStorage.__init__
        common = {field.attribute for field in cls.common_fields}
        cls.own_fields = tuple(
            field for field in cls.static_fields if field.attribute not in common
        )

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        """Inner tensors, static fields and ``dtype``, by their arguments, as they are held, if they
        fit together."""
        return declared

    def _hold(self, declared: dict[str, Any], quantizer: Any) -> None:
        self._writes = GemmCache()
        self._quantizer = quantizer
        for own in self.own_fields:
            setattr(self, own.attribute, declared[own.argument])
        self._put_inner([declared[inner.argument] for inner in self.inner_tensors])

    def _put_inner(self, tensors: Sequence[Any]) -> None:
        for inner, tensor in zip(self.inner_tensors, tensors, strict=True):
            setattr(self, inner.attribute, tensor)

    @classmethod
    def _arguments(cls, tensors: Sequence[Any], static: Sequence[Any]) -> dict[str, Any]:
        """Inner tensors and static values, in the order of the declaration, by their arguments."""
        declared: tuple[Any, ...] = (*cls.inner_tensors, *cls.all_static_fields())
        return {
            each.argument: value for each, value in zip(declared, (*tensors, *static), strict=True)
        }

    @classmethod
    def all_static_fields(cls) -> tuple[StaticField, ...]:
        """The declared static fields; quantized tensors add those that every tensor has."""
        return cls.common_fields + cls.own_fields

    def inner_list(self) -> list[torch.Tensor | None]:
        """The inner tensors in the order of the declaration; None for those not held."""
        return [getattr(self, name) for name in self._inner_names]

    def get_metadata(self) -> dict[str, Any]:
        """Constructor keywords that build this storage again (tensors are shared, not copied)."""
        tensors, spec = self.flatten_storage()
        return self._arguments(tensors, spec.static) | {"quantizer": self._quantizer}

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Any]:
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

    def _empty(self, what: str = "") -> UsageError:
        return UsageError(
            f"{type(self).__name__} holds no data{what}", remedy="it was cleared or saved"
        )

    #: Bytes that the inner tensors hold.
    nbytes: int = property(lambda self: sum(t.nbytes for t in self.inner_list() if t is not None))  # type: ignore[assignment]

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

    def size(self, dim: int | None = None) -> Any:
        """Shape of the tensor that was quantized, or one of its dimensions; by default the first
        inner tensor's."""
        tensor = getattr(self, self.inner_tensors[0].attribute) if self.inner_tensors else None
        if tensor is None:
            raise self._empty()
        return tensor.size() if dim is None else tensor.size(dim)

    @property
    def dtype(self) -> torch.dtype:
        """Nominal dtype."""
        return self._dtype

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size())

    def flatten_storage(self) -> tuple[list[torch.Tensor | None], StorageSpec]:
        """The inner tensors and what builds a storage around them again. Nothing is changed."""
        static = tuple([getattr(self, field.attribute) for field in self.all_static_fields()])
        return self.inner_list(), StorageSpec(type(self), static, self._quantizer, self._whole)

    def apply_to_inner(self, function: Any) -> QuantizedTensorStorage:
        """A new storage with ``function`` applied to each inner tensor held; the quantizer is
        copied."""
        tensors, spec = self.flatten_storage()
        with torch.no_grad():
            changed = [None if t is None else function(t) for t in tensors]
            return StorageSpec(spec.cls, spec.static, self._copied_quantizer()).build(changed)  # type: ignore[no-any-return]

    def _copied_quantizer(self) -> Any:
        return None if self._quantizer is None else self._quantizer.copy()

    def clone_storage(self) -> QuantizedTensorStorage:
        """A copy that shares nothing."""
        return self.apply_to_inner(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if all(tensor is None for tensor in self.inner_list()):
            raise self._empty(" to pickle")
        # A view is copied, because unpickled it would not know of its whole.
        tensors, spec = (self if self._whole is None else self.clone_storage()).flatten_storage()
        return rebuild_storage, (spec.cls, tensors, spec.static, spec.quantizer, self._extra())

    def _extra(self) -> dict[str, Any]:
        """Attributes that copies and pickles carry along."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = self.clone_storage()
        return copied

    def flatten_columnwise(self) -> tuple[Sequence[torch.Tensor | None], StorageSpec]:
        """:meth:`flatten_storage` for ``rebuild_saved``, without the rowwise usage, which may be
        given up: what a backward pass reads."""
        self.update_usage(rowwise_usage=False, columnwise_usage=True)
        return self.flatten_storage()

    def get_usages(self) -> dict[str, bool]:
        """Which usages the data held can serve, ``{"rowwise": …, "columnwise": …}``."""
        held = {
            i.usage
            for i, t in zip(self.inner_tensors, self.inner_list(), strict=True)
            if t is not None
        }
        both = {i.usage for i in self.inner_tensors} == held == {"both"}
        return {usage: both or usage in held for usage in USAGES}

    def _requested_usages(
        self, rowwise_usage: bool | None, columnwise_usage: bool | None
    ) -> tuple[bool, bool]:
        had = self.get_usages()
        rowwise_usage = had["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise_usage = had["columnwise"] if columnwise_usage is None else columnwise_usage
        check_flag("rowwise_usage", rowwise_usage)
        check_flag("columnwise_usage", columnwise_usage)
        if not (rowwise_usage or columnwise_usage):
            what, expected = (
                "update_usage would leave neither usage",
                "rowwise_usage or columnwise_usage to stay",
            )
            raise OptionError(what, expected=expected, remedy="call clear() to drop all data")
        return rowwise_usage, columnwise_usage

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop the data of a usage (False), ask for one (True), or leave it (None).

        Raises:
            UsageError: a usage is asked for that the data held cannot give.
            OptionError: neither usage would be left.
        """
        have, asked = self.get_usages(), self._requested_usages(rowwise_usage, columnwise_usage)
        for usage, want in zip(USAGES, asked, strict=True):
            if want and not have[usage]:
                raise self._without(usage)
        for inner in self.inner_tensors:
            if inner.usage != "both" and not asked[USAGES.index(inner.usage)]:
                setattr(self, inner.attribute, None)

    def _without(self, usage: str, also: str = "") -> UsageError:
        remedy = f"call quantizer.set_usage({usage}=True) before quantizing{also}"
        what, expected = (
            f"{type(self).__name__} has no {usage} data",
            f"a tensor quantized with {usage}=True",
        )
        return UsageError(what, expected=expected, remedy=remedy)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """High-precision values, in ``dtype`` or the nominal dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define dequantize()")

    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensorStorage:
        """Overwrite the values with ``tensor``, quantized by this object's quantizer.

        Raises:
            UsageError, ShapeError: there is no quantizer, or ``tensor`` has another shape.
        """
        self._required_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def _required_quantizer(self) -> Any:
        if self._quantizer is None:
            raise UsageError(
                f"{type(self).__name__} has no quantizer", remedy="set one with update_quantizer()"
            )
        return self._quantizer

    def copy_from_storage(
        self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> None:
        """Copy the inner tensors of ``src`` into this object's, in place.

        Raises:
            DTypeError, ShapeError: ``src`` is of another kind, or has another shape.
            UsageError: ``src`` lacks an inner tensor that this object holds, or this object holds
                none; or it is a view, and ``src`` has another scale than the rest of its tensor.
        """
        if not isinstance(src, QuantizedTensorStorage) or src.inner_tensors != self.inner_tensors:
            what = f"cannot copy a {type(src).__name__} into a {type(self).__name__}"
            raise DTypeError(what, expected="one kind", remedy=_CHANGED)
        if tuple(src.size()) != tuple(self.size()):
            raise ShapeError(
                f"source has shape {tuple(src.size())}", expected=str(tuple(self.size()))
            )
        if self._whole is not None and not (self.shares_scales(src) or self._rest_is_zero()):
            what = (
                f"a write to a view of a {type(self).__name__} would change the scale of the "
                f"rest of the tensor"
            )
            remedy = (
                "assign with tensor[index] = values, or write to the whole: all of it is "
                "quantized again"
            )
            raise UsageError(
                what, expected="values that are quantized with the scale that it has", remedy=remedy
            )
        pairs = []
        for inner, mine, theirs in zip(
            self.inner_tensors, self.inner_list(), src.inner_list(), strict=True
        ):
            if mine is None:
                continue
            if theirs is None:
                remedy = "quantize it with the usages of the destination"
                raise UsageError(
                    f"the source holds no {inner.argument!r}",
                    expected="the same usages",
                    remedy=remedy,
                )
            if native_dtype(src, inner) != native_dtype(self, inner):
                what, expected = (
                    f"source holds {native_dtype(src, inner)}",
                    str(native_dtype(self, inner)),
                )
                raise DTypeError(what, expected=expected, remedy=_CHANGED)
            if theirs.shape != mine.shape:
                what = f"{inner.argument!r} of the source has shape {tuple(theirs.shape)}"
                raise ShapeError(what, expected=str(tuple(mine.shape)))
            pairs.append((mine, theirs))
        if not pairs:
            raise self._empty(" to write to")
        if noop_flag is not None:
            check_scalar(noop_flag, pairs[0][0], "noop_flag")
        for mine, theirs in pairs:
            mine.copy_(
                theirs
                if noop_flag is None
                else torch.where(noop_flag.reshape(()) == 1, mine, theirs)
            )
        declaration.bump_versions(
            [mine for mine, _ in pairs] + ([self] if isinstance(self, torch.Tensor) else [])
        )
        self.mark_written()
        if self._whole is not None:
            self._whole.mark_written()

    def shared_inner(self) -> list[InnerTensor]:
        """The inner tensors held that belong to all rows alike: one scale for the tensor, say."""
        return [
            inner
            for inner in self.inner_tensors
            if inner.shared and getattr(self, inner.attribute) is not None
        ]

    def shared_with_whole(self) -> list[str]:
        """Attributes of a view with what belongs to more of its tensor than the view has; by
        default to all rows."""
        return [inner.attribute for inner in self.shared_inner()]

    def shares_scales(self, other: QuantizedTensorStorage) -> bool:
        """Whether what a view shares with its tensor is equal in ``other``, so that its elements
        mean the same here."""
        return all(
            declaration.equal_scales(getattr(self, n), getattr(other, n))
            for n in self.shared_with_whole()
        )

    def _rest_is_zero(self) -> bool:
        """Whether the rest of the tensor holds zeros alone, as the padding of a shard does: they
        suit any scale."""
        mine, whole = (
            getattr(s, s.raw_inner()[0].attribute) for s in (self, self._whole) if s is not None
        )
        # What is made like a tensor without gaps and overlaps has its strides.
        if (
            torch.compiler.is_compiling()
            or torch.empty_like(mine, device="meta").stride() != mine.stride()
        ):
            return False
        return bool(torch.count_nonzero(mine) == torch.count_nonzero(whole))

    def mark_written(self) -> None:
        """Called after the values changed in place: what is kept of them is outdated."""
        self._writes.writes += 1

    def share_writes(self, other: QuantizedTensorStorage) -> None:
        """Count writes together with ``other``, an alias."""
        self._writes = other._writes

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

    def grid_operand(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The bytes of the elements as a matrix, and scales, as they are stored for the usage (or
        UsageError). None, the default, stands for :meth:`gemm_operand`."""
        return None

    def gemm_cache(self) -> GemmCache | None:
        """Where products keep what they make of this operand; None in a graph, which has no place
        for it."""
        return None if torch.compiler.is_compiling() else self._writes

    def raw_inner(self) -> tuple[InnerTensor, ...]:
        """The inner tensors held that are the elements in their order: for each usage the first
        that is gathered."""
        found: dict[str, InnerTensor] = {}
        for inner in self.inner_tensors:
            if inner.gather and not inner.transposed and getattr(self, inner.attribute) is not None:
                found.setdefault(inner.usage, inner)
        if not found:
            expected, remedy = (
                "an inner tensor declared with gather=True",
                "keep the rowwise usage of moved weights",
            )
            raise UsageError(
                f"{type(self).__name__} holds no elements", expected=expected, remedy=remedy
            )
        return tuple(found.values())

    def is_derived(self, inner: InnerTensor) -> bool:
        """Whether an inner tensor is made of the others, as a transpose is, and not written by
        itself."""
        return not (inner.gather or inner.shared)

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        """Put ``tensor``, which holds the same values, in the place of an inner tensor."""
        setattr(self, inner.attribute, tensor)

    def rebuild_derived(self, *, force: bool = False) -> None:
        """Make what derives from the elements and is outdated: nothing, unless a subclass keeps
        such a tensor.

        With ``force`` also what looks up to date: a collective may write bytes without counting it
        as a write.
        """

    def update_quantizer(self, quantizer: Any) -> None:
        """Replace the quantizer used by in-place updates; DTypeError if it has no
        ``update_quantized``."""
        if quantizer is not None and not callable(getattr(quantizer, "update_quantized", None)):
            raise DTypeError(
                f"the quantizer is a {type(quantizer).__name__}",
                expected="an ottava.Quantizer or None",
            )
        self._quantizer = quantizer

    def __repr__(self, *, tensor_contents: Any = None) -> str:
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
    static: Sequence[Any],
    quantizer: Any,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """What a pickle calls: it runs no code but the constructor of a registered storage class."""
    built = StorageSpec(cls, tuple(static), quantizer).build(tensors)
    for name, value in (extra or {}).items():
        setattr(built, name, value)
    return built


torch.serialization.add_safe_globals([rebuild_storage])
