"""``QuantizedTensorStorage``: inner tensors declared once, everything else derived from the declaration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.tensors.blocks import Operand
from ottava.tensors.declaration import InnerTensor as InnerTensor
from ottava.tensors.declaration import StaticField, StorageQuantizer, Usage, check_noop_flag
from ottava.tensors.declaration import native_dtype as native_dtype
from ottava.tensors.freshness import bump_version


@dataclass(frozen=True)
class StorageSpec:
    """What is left of a storage when its tensors are taken out: immutable, so it can cross into the backward."""

    cls: type[QuantizedTensorStorage]
    static: tuple[Any, ...]
    quantizer: StorageQuantizer | None
    whole: QuantizedTensorStorage | None = field(default=None, compare=False, repr=False)

    def build(self, tensors: Sequence[torch.Tensor | None]) -> QuantizedTensorStorage:
        """A new storage (or quantized tensor) around ``tensors``, in the order of the declaration."""
        arguments: dict[str, Any] = {
            inner.argument: tensor for inner, tensor in zip(self.cls.inner_tensors, tensors, strict=True)
        }
        fields = self.cls.all_static_fields()
        arguments |= {field_.argument: value for field_, value in zip(fields, self.static, strict=True)}
        built = self.cls(**arguments, quantizer=self.quantizer)
        if self.whole is not None:
            built._whole = self.whole
        return built

    def rebuild(self, tensors: Sequence[torch.Tensor | None]) -> QuantizedTensorStorage:
        """:meth:`build` around the tensors that were taken out, which need no second look."""
        return self.build(tensors) if self.whole is not None else self.cls.rebuilt(self, tensors)


# What an inner tensor may be.
_HELD = (torch.Tensor, type(None))
# Every storage class that was imported, by its name.
_CLASSES: dict[str, type[QuantizedTensorStorage]] = {}


class QuantizedTensorStorage(Operand):
    """Quantized data without the tensor interface.

    A subclass sets :attr:`inner_tensors` and :attr:`static_fields`, and defines :meth:`dequantize`. Its constructor
    takes the declared keywords and ``quantizer``; this one does, a subclass may define its own. Saving for backward,
    moving, cloning, pinning, pickling under ``weights_only=True``, ``nbytes`` and metadata are derived from that.
    Invariant of every subclass: ``original ≈ dequantize()``.

    Raises:
        OptionError: the constructor was given a keyword that is not declared, or no value for a static field.
        UsageError: it was given no inner tensor at all.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = ()
    static_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: True for a user-defined storage whose GEMM is its quantizer's ``qgemm``.
    custom: bool = False
    #: Whether rowwise data alone can serve the columnwise usage.
    rowwise_serves_columnwise: bool = False
    #: Whether the next forward pass makes what derives from the elements and is outdated.
    rebuilds_derived: bool = True

    _quantizer: Any
    _dtype: torch.dtype
    # The storage of which this one is a view (rows, say), when they share what a write to the view would change.
    _whole: QuantizedTensorStorage | None = None

    def __init__(self, *, quantizer: StorageQuantizer | None = None, **declared: Any) -> None:
        self._take_declared(declared, type(self).static_fields)
        self._quantizer = quantizer

    def _take_declared(self, declared: dict[str, Any], fields: Sequence[StaticField]) -> None:
        """Set the attributes that the declaration names."""
        known = {inner.argument for inner in self.inner_tensors} | {field.argument for field in fields}
        missing = [field.argument for field in fields if field.argument not in declared]
        unknown = sorted(set(declared) - known)
        if unknown or missing:
            what = f"no {missing[0]!r}" if missing else f"an unknown keyword {unknown[0]!r}"
            raise OptionError(f"{type(self).__name__} was given {what}", expected=", ".join(sorted(known)))
        for inner in self.inner_tensors:
            tensor = declared.get(inner.argument)
            if not isinstance(tensor, _HELD):
                raise DTypeError(f"{inner.argument!r} is a {type(tensor).__name__}", expected="a tensor or None")
            setattr(self, inner.attribute, tensor)
        for field_ in fields:
            setattr(self, field_.attribute, declared[field_.argument])

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])
        _CLASSES[f"{cls.__module__}:{cls.__qualname__}"] = cls

    # -- derived from the declaration --

    @classmethod
    def own_static_fields(cls) -> tuple[StaticField, ...]:
        """The declared static fields, without those that every tensor has."""
        return cls.static_fields

    @classmethod
    def all_static_fields(cls) -> tuple[StaticField, ...]:
        """The declared static fields; quantized tensors add those that every tensor has."""
        return cls.static_fields

    def inner_list(self) -> list[torch.Tensor | None]:
        """The inner tensors in the order of the declaration; None for those not held."""
        return [getattr(self, inner.attribute) for inner in self.inner_tensors]

    def flatten_storage(self) -> tuple[list[torch.Tensor | None], StorageSpec]:
        """The inner tensors and what builds a storage around them again. Nothing is changed."""
        static = tuple(getattr(self, field.attribute) for field in type(self).all_static_fields())
        return self.inner_list(), StorageSpec(type(self), static, self._quantizer, self._whole)

    def flatten_columnwise(self) -> tuple[list[torch.Tensor | None], StorageSpec]:
        """:meth:`flatten_storage` after the rowwise usage was dropped: what a backward pass reads of an operand."""
        self.update_usage(rowwise_usage=False)
        return self.flatten_storage()

    @classmethod
    def rebuilt(cls, spec: StorageSpec, tensors: Sequence[torch.Tensor | None]) -> QuantizedTensorStorage:
        """What ``spec.build(tensors)`` makes; a subclass may leave out the checks, since it gave both itself."""
        return spec.build(tensors)

    def get_metadata(self) -> dict[str, Any]:
        """Constructor keywords that build this storage again (tensors are shared, not copied)."""
        declared: list[InnerTensor | StaticField] = [*self.inner_tensors, *type(self).all_static_fields()]
        return {each.argument: getattr(self, each.attribute) for each in declared} | {"quantizer": self._quantizer}

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], QuantizedTensorStorage]:
        """Give up the inner tensors: ``(tensors, self)``; :meth:`restore_from_saved` takes them back."""
        tensors = self.inner_list()
        self.clear()
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take this storage's share from the front of ``tensors`` and return the rest.

        Raises:
            ShapeError: fewer tensors than this storage declares.
        """
        count = len(self.inner_tensors)
        if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, _HELD) for t in tensors[:count]):
            raise DTypeError("the saved tensors are not a list of tensors", expected="what prepare_for_saving returned")
        if len(tensors) < count:
            raise ShapeError(f"{len(tensors)} saved tensors for {type(self).__name__}", expected=f"at least {count}")
        for inner, tensor in zip(self.inner_tensors, tensors[:count], strict=True):
            setattr(self, inner.attribute, tensor)
        return list(tensors[count:])

    if TYPE_CHECKING:
        # torch.Tensor says that it can be set; a class that derives from both would have to say so too.
        nbytes: int
    else:

        @property
        def nbytes(self) -> int:
            """Bytes that the inner tensors hold."""
            return sum(t.numel() * t.element_size() for t in self.inner_list() if t is not None)

    @property
    def device(self) -> torch.device:
        """The device of the inner tensors."""
        for tensor in self.inner_list():
            if tensor is not None:
                return tensor.device
        raise UsageError(f"{type(self).__name__} holds no data", expected="data", remedy="it was cleared or saved")

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that was quantized."""
        return torch.Size(self.size())

    def size(self, dim: int | None = None) -> Any:
        """Shape of the tensor that was quantized, or one of its dimensions; by default the first inner tensor's."""
        tensor = getattr(self, self.inner_tensors[0].attribute) if self.inner_tensors else None
        if tensor is None:
            raise UsageError(
                f"{type(self).__name__} holds no data", remedy="it was cleared or saved, or defines no size()"
            )
        return tensor.size() if dim is None else tensor.size(dim)

    @property
    def dtype(self) -> torch.dtype:
        """Nominal dtype."""
        return self._dtype

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size())

    def apply_to_inner(self, function: Any) -> QuantizedTensorStorage:
        """A new storage with ``function`` applied to each inner tensor held; the quantizer is copied."""
        tensors, spec = self.flatten_storage()
        quantizer = None if spec.quantizer is None else spec.quantizer.copy()
        return StorageSpec(spec.cls, spec.static, quantizer).build(
            [None if t is None else function(t) for t in tensors]
        )

    def clone_storage(self) -> QuantizedTensorStorage:
        """A copy that shares nothing."""
        return self.apply_to_inner(lambda t: t.clone())

    def clear(self) -> None:
        """Drop all data; the object can be filled again by :meth:`restore_from_saved`."""
        for inner in self.inner_tensors:
            setattr(self, inner.attribute, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        tensors, spec = self._for_pickling().flatten_storage()
        return rebuild_storage, (spec.cls, tensors, spec.static, spec.quantizer)

    def _for_pickling(self) -> QuantizedTensorStorage:
        """This storage, or a copy of a view: unpickled, it would not know of its whole."""
        if all(tensor is None for tensor in self.inner_list()):
            raise UsageError(f"{type(self).__name__} holds no data to pickle", remedy="it was cleared or saved")
        return self if self._whole is None else self.clone_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensorStorage:
        copied = self.clone_storage()
        memo[id(self)] = copied
        return copied

    # -- usages --

    def get_usages(self) -> dict[str, bool]:
        """Which usages the data held can serve, ``{"rowwise": …, "columnwise": …}``."""
        held = {i.usage for i, t in zip(self.inner_tensors, self.inner_list(), strict=True) if t is not None}
        both = not any(i.usage != "both" for i in self.inner_tensors) and "both" in held
        return {"rowwise": both or "rowwise" in held, "columnwise": both or "columnwise" in held}

    def _requested_usages(
        self, rowwise_usage: bool | None, columnwise_usage: bool | None, have: tuple[bool, bool] | None = None
    ) -> tuple[bool, bool]:
        """Rowwise and columnwise usage after an update, ``have`` those of before, if they are known already."""
        if have is None:
            usages = self.get_usages()
            have = usages["rowwise"], usages["columnwise"]
        rowwise = have[0] if rowwise_usage is None else rowwise_usage
        columnwise = have[1] if columnwise_usage is None else columnwise_usage
        if not (isinstance(rowwise, bool) and isinstance(columnwise, bool)):
            name, value = ("columnwise", columnwise) if isinstance(rowwise, bool) else ("rowwise", rowwise)
            raise OptionError(f"{name}_usage is {value!r}", expected="True, False or None")
        if not (rowwise or columnwise):
            raise OptionError(
                "update_usage would leave neither usage",
                expected="rowwise_usage or columnwise_usage to stay",
                remedy="call clear() to drop all data",
            )
        return rowwise, columnwise

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop the data of a usage (False), ask for one (True), or leave it (None).

        Raises:
            UsageError: a usage is asked for that the data held cannot give.
            OptionError: neither usage would be left.
        """
        have = self.get_usages()
        rowwise, columnwise = self._requested_usages(rowwise_usage, columnwise_usage)
        for name, wanted in (("rowwise", rowwise), ("columnwise", columnwise)):
            if wanted and not have[name]:
                raise UsageError(
                    f"{type(self).__name__} has no {name} data",
                    expected=f"a tensor quantized with {name}=True",
                    remedy=f"call quantizer.set_usage({name}=True) before quantizing",
                )
        for inner in self.inner_tensors:
            if (inner.usage == "rowwise" and not rowwise) or (inner.usage == "columnwise" and not columnwise):
                setattr(self, inner.attribute, None)

    # -- values --

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """High-precision values, in ``dtype`` or the nominal dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define dequantize()")

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> QuantizedTensorStorage:
        """Overwrite the values with ``tensor``, quantized by this object's quantizer.

        Raises:
            UsageError: there is no quantizer.
            ShapeError: ``tensor`` has another shape.
        """
        if self._quantizer is None:
            raise UsageError(
                f"{type(self).__name__} has no quantizer to quantize with",
                expected="a quantizer",
                remedy="set one with update_quantizer()",
            )
        self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def copy_from_storage(self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None) -> None:
        """Copy the inner tensors of ``src`` into this object's, in place.

        Raises:
            DTypeError: ``src`` is of another kind.
            ShapeError: ``src`` has another shape.
            UsageError: ``src`` lacks an inner tensor that this object holds, or this object holds none; or it is a
                view, and ``src`` has another scale than the rest of its tensor.
        """
        if not isinstance(src, QuantizedTensorStorage) or src.inner_tensors != self.inner_tensors:
            raise DTypeError(f"cannot copy a {type(src).__name__} into a {type(self).__name__}", expected="one kind")
        if tuple(src.size()) != tuple(self.size()):
            raise ShapeError(f"source has shape {tuple(src.size())}", expected=str(tuple(self.size())))
        if self._whole is not None and not self.shares_scales(src) and not self._rest_is_zero():
            raise UsageError(
                f"a write to a view of a {type(self).__name__} would change the scale of the rest of the tensor",
                expected="values that are quantized with the scale that it has",
                remedy="assign with tensor[index] = values, or write to the whole: all of it is quantized again",
            )
        pairs = []
        for inner, mine, theirs in zip(self.inner_tensors, self.inner_list(), src.inner_list(), strict=True):
            if mine is None:
                continue
            if theirs is None:
                raise UsageError(
                    f"the source holds no {inner.argument!r}",
                    expected="a source quantized for the same usages",
                    remedy="quantize it with the usages of the destination",
                )
            if theirs.shape != mine.shape:
                what = f"{inner.argument!r} of the source has shape {tuple(theirs.shape)}"
                raise ShapeError(what, expected=str(tuple(mine.shape)))
            pairs.append((mine, theirs))
        if not pairs:
            raise UsageError(f"{type(self).__name__} holds no data to write to", remedy="it was cleared or saved")
        if noop_flag is not None:
            check_noop_flag(noop_flag, self.device)
        for mine, theirs in pairs:
            mine.copy_(theirs if noop_flag is None else torch.where(noop_flag.reshape(()) == 1, mine, theirs))
            bump_version(mine)
        if isinstance(self, torch.Tensor):
            bump_version(self)
        for written in (self, self._whole):
            if written is not None:
                written.mark_written()

    # -- views, which share scales with the rest of their tensor --

    def shared_inner(self) -> list[InnerTensor]:
        """The inner tensors held that belong to all rows alike: one scale for the tensor, say."""
        held = zip(self.inner_tensors, self.inner_list(), strict=True)
        return [inner for inner, tensor in held if inner.usage == "both" and not inner.gather and tensor is not None]

    def shares_scales(self, other: QuantizedTensorStorage) -> bool:
        """Whether what all rows have in common is equal in ``other``, so that its rows mean the same here."""
        shared = [inner.attribute for inner in self.shared_inner()]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in shared)

    def _rest_is_zero(self) -> bool:
        """Whether the rest of the tensor holds zeros alone, as the padding of a shard does: they suit any scale."""
        mine, whole = (getattr(s, s.raw_inner()[0].attribute) for s in (self, self._whole) if s is not None)
        # What is made like a tensor without gaps and overlaps has its strides.
        if torch.compiler.is_compiling() or torch.empty_like(mine, device="meta").stride() != mine.stride():
            return False
        return bool(torch.count_nonzero(mine) == torch.count_nonzero(whole))

    def mark_written(self) -> None:
        """Called after the values changed in place, for storages that keep something derived from them."""

    # -- the elements as bytes --

    def raw_inner(self) -> tuple[InnerTensor, ...]:
        """The inner tensors held that are the elements themselves: for each usage the first one that is gathered."""
        found: dict[Usage, InnerTensor] = {}
        for inner in self.inner_tensors:
            if inner.gather and getattr(self, inner.attribute) is not None:
                found.setdefault(inner.usage, inner)
        if not found:
            raise UsageError(
                f"{type(self).__name__} holds no elements",
                expected="data of an inner tensor declared with gather=True",
                remedy="keep the rowwise usage of weights whose bytes are moved",
            )
        return tuple(found.values())

    def is_derived(self, inner: InnerTensor) -> bool:
        """Whether an inner tensor is made of the others, as a transpose is, and not written by itself."""
        return not inner.gather and inner.usage != "both"

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        """Put ``tensor``, which holds the same values, in the place of an inner tensor."""
        setattr(self, inner.attribute, tensor)

    def rebuild_derived(self, *, force: bool = False) -> None:
        """Make what derives from the elements and is outdated: nothing, unless a subclass keeps such a tensor.

        With ``force`` also what looks up to date: a collective may write bytes without counting it as a write.
        """

    def update_quantizer(self, quantizer: StorageQuantizer | None) -> None:
        """Replace the quantizer used by in-place updates.

        Raises:
            DTypeError: it has no ``update_quantized``.
        """
        if quantizer is not None and not callable(getattr(quantizer, "update_quantized", None)):
            raise DTypeError(f"the quantizer is a {type(quantizer).__name__}", expected="an ottava.Quantizer or None")
        self._quantizer = quantizer

    def __repr__(self) -> str:
        try:
            body = f"shape={tuple(self.size())}, data={self.dequantize()}"
        except Exception as error:
            body = f"no readable data: {type(error).__name__}"
        return f"{type(self).__name__}({body})"


def storage_classes() -> dict[str, type[QuantizedTensorStorage]]:
    """Every storage class that was imported, by ``"module:Class"``."""
    return dict(_CLASSES)


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two scales are equal; those on the meta device have no values to differ in."""
    if one is other or other is None:
        return one is other
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    # Comparing values would break a graph that is being traced.
    return not torch.compiler.is_compiling() and torch.equal(one, other.to(one.device))


def rebuild_storage(
    cls: type[QuantizedTensorStorage],
    tensors: Sequence[torch.Tensor | None],
    static: Sequence[Any],
    quantizer: StorageQuantizer | None,
    extra: Mapping[str, Any] | None = None,
) -> QuantizedTensorStorage:
    """What a pickle calls: it runs no code but the constructor of a registered storage class."""
    built = StorageSpec(cls, tuple(static), quantizer).build(tensors)
    for name, value in (extra or {}).items():
        setattr(built, name, value)
    return built


torch.serialization.add_safe_globals([rebuild_storage])
