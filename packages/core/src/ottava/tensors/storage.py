"""``QuantizedTensorStorage``: inner tensors declared once, everything else derived from the declaration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.kernels.checks import check_scalar
from ottava.tensors.declaration import Declared, GemmCache, Usage, bump_versions, check_flag, equal_scales
from ottava.tensors.declaration import InnerTensor as InnerTensor
from ottava.tensors.declaration import native_dtype as native_dtype


@dataclass(frozen=True)
class StorageSpec:
    """What is left of a storage when its tensors are taken out: immutable, so it can cross into the backward."""

    cls: type[QuantizedTensorStorage]
    static: tuple[Any, ...]
    quantizer: Any
    whole: QuantizedTensorStorage | None = field(default=None, compare=False, repr=False)
    # What made the storage, in eager code.
    pattern: Pattern | None = field(default=None, compare=False, repr=False)

    def build(self, tensors: Sequence[torch.Tensor | None]) -> QuantizedTensorStorage:
        """A new storage (or quantized tensor) around ``tensors``, in the order of the declaration."""
        built = self.cls(**self.cls._arguments(tensors, self.static), quantizer=self.quantizer)
        built._whole = self.whole
        return built

    def rebuild(self, tensors: Sequence[torch.Tensor | None]) -> QuantizedTensorStorage:
        """:meth:`build` around the tensors that were taken out, which need no second look."""
        if self.pattern is not None:
            return self.pattern.make(tensors, self.quantizer)
        if self.whole is not None or not self.cls.declares_all:
            return self.build(tensors)
        made = object.__new__(self.cls)
        made._hold(self.cls._arguments(tensors, self.static), self.quantizer)
        return made


class Pattern:
    """What all bare storages of a class have in common that have the same static values: made once, for eager code.

    Attributes:
        fetch: gives what such a storage holds for each inner tensor, in the order of the declaration.
        rows: how many of them, the first ones, serve rows alone.
        spec: the attributes of a :class:`StorageSpec` but for the quantizer.
    """

    def __init__(self, cls: type[QuantizedTensorStorage], static: Sequence[Any]) -> None:
        empty: Any = StorageSpec(cls, tuple(static), None).rebuild((None,) * len(cls.inner_tensors))
        held, names = vars(empty), [inner.attribute for inner in empty.inner_tensors]
        self._cls, self._attributes = cls, {k: v for k, v in held.items() if k != "_writes"} | {"_pattern": self}
        # Columns that may be made of rows are held under another name, and know of them if they are.
        self._places = [name if name in held else f"_kept{name}" for name in names]
        self._derives = empty.grid_layout.square and empty.grid_layout.transposed
        self.fetch = attrgetter(*self._places)
        self.rows = sum(inner.usage == "rowwise" for inner in cls.inner_tensors)
        self.spec = vars(StorageSpec(cls, tuple(static), None, pattern=self))

    def make(self, tensors: Sequence[torch.Tensor | None], quantizer: Any) -> QuantizedTensorStorage:
        """A storage around what fits together because a kernel made it."""
        made = object.__new__(self._cls)
        made.__dict__ = held = self._attributes.copy()
        held["_quantizer"], held["_writes"] = quantizer, GemmCache()
        if self._derives and tensors[self.rows] is not None:
            made._put_inner(tensors)
            return made
        for place, tensor in zip(self._places, tensors, strict=True):
            if tensor is not None:
                held[place] = tensor
        return made


# Every storage class that was imported, by its name.
_CLASSES: dict[str, type[QuantizedTensorStorage]] = {}


class QuantizedTensorStorage(Declared):
    """Quantized data without the tensor interface.

    A subclass sets :attr:`inner_tensors` and :attr:`static_fields`, and defines :meth:`dequantize`. Its constructor
    takes the declared keywords and ``quantizer``; this one does, a subclass may define its own. Saving for backward,
    moving, cloning, pinning, pickling under ``weights_only=True``, ``nbytes`` and metadata are derived from that.
    Invariant of every subclass: ``original ≈ dequantize()``.

    Raises:
        OptionError: the constructor was given a keyword that is not declared, or no value for a static field.
        UsageError: it was given no inner tensor at all.
    """

    #: True for a user-defined storage whose GEMM is its quantizer's ``qgemm``.
    custom: bool = False
    #: Whether rowwise data alone can serve the columnwise usage.
    rowwise_serves_columnwise: bool = False
    #: Whether the next forward pass makes what derives from the elements and is outdated.
    rebuilds_derived: bool = True
    # What made a bare storage in eager code, by which it is taken apart.
    _pattern: Pattern | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _CLASSES[f"{cls.__module__}:{cls.__qualname__}"] = cls

    # torch.Tensor says that it can be set; a class that derives from both would have to say so too.
    nbytes: int
    if not TYPE_CHECKING:

        @property
        def nbytes(self) -> int:
            """Bytes that the inner tensors hold."""
            return sum(t.numel() * t.element_size() for t in self.inner_list() if t is not None)

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
        """Shape of the tensor that was quantized, or one of its dimensions; by default the first inner tensor's."""
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
        """A new storage with ``function`` applied to each inner tensor held; the quantizer is copied."""
        tensors, spec = self.flatten_storage()
        with torch.no_grad():
            changed = [None if t is None else function(t) for t in tensors]
            return StorageSpec(spec.cls, spec.static, self._copied_quantizer()).build(changed)

    def _copied_quantizer(self) -> Any:
        return None if self._quantizer is None else self._quantizer.copy()

    def clone_storage(self) -> QuantizedTensorStorage:
        """A copy that shares nothing."""
        return self.apply_to_inner(lambda t: t.clone())

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

    # -- usages --

    def flatten_columnwise(self) -> tuple[Sequence[torch.Tensor | None], StorageSpec]:
        """:meth:`flatten_storage` without the rowwise usage, which may be given up: what a backward pass reads."""
        self.update_usage(rowwise_usage=False, columnwise_usage=True)
        return self.flatten_storage()

    def get_usages(self) -> dict[str, bool]:
        """Which usages the data held can serve, ``{"rowwise": …, "columnwise": …}``."""
        held = {i.usage for i, t in zip(self.inner_tensors, self.inner_list(), strict=True) if t is not None}
        both = {i.usage for i in self.inner_tensors} == held == {"both"}
        return {usage: both or usage in held for usage in ("rowwise", "columnwise")}

    def _requested_usages(self, rowwise_usage: bool | None, columnwise_usage: bool | None) -> tuple[bool, bool]:
        """Rowwise and columnwise usage after an update."""
        if rowwise_usage is None or columnwise_usage is None:
            had = self.get_usages()
            rowwise_usage = had["rowwise"] if rowwise_usage is None else rowwise_usage
            columnwise_usage = had["columnwise"] if columnwise_usage is None else columnwise_usage
        check_flag("rowwise_usage", rowwise_usage)
        check_flag("columnwise_usage", columnwise_usage)
        if not (rowwise_usage or columnwise_usage):
            what, expected = "update_usage would leave neither usage", "rowwise_usage or columnwise_usage to stay"
            raise OptionError(what, expected=expected, remedy="call clear() to drop all data")
        return rowwise_usage, columnwise_usage

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop the data of a usage (False), ask for one (True), or leave it (None).

        Raises:
            UsageError: a usage is asked for that the data held cannot give.
            OptionError: neither usage would be left.
        """
        have = self.get_usages()
        wanted = dict(zip(have, self._requested_usages(rowwise_usage, columnwise_usage), strict=True))
        for usage in (usage for usage, want in wanted.items() if want and not have[usage]):
            raise self._without(usage)
        for inner in self.inner_tensors:
            if not wanted.get(inner.usage, True):
                setattr(self, inner.attribute, None)

    def _without(self, usage: str, also: str = "") -> UsageError:
        remedy = f"call quantizer.set_usage({usage}=True) before quantizing{also}"
        what, expected = f"{type(self).__name__} has no {usage} data", f"a tensor quantized with {usage}=True"
        return UsageError(what, expected=expected, remedy=remedy)

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
        self._required_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def _required_quantizer(self) -> Any:
        if self._quantizer is None:
            raise UsageError(f"{type(self).__name__} has no quantizer", remedy="set one with update_quantizer()")
        return self._quantizer

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
        if self._whole is not None and not (self.shares_scales(src) or self._rest_is_zero()):
            what = f"a write to a view of a {type(self).__name__} would change the scale of the rest of the tensor"
            remedy = "assign with tensor[index] = values, or write to the whole: all of it is quantized again"
            raise UsageError(what, expected="values that are quantized with the scale that it has", remedy=remedy)
        pairs = []
        for inner, mine, theirs in zip(self.inner_tensors, self.inner_list(), src.inner_list(), strict=True):
            if mine is None:
                continue
            if theirs is None:
                remedy = "quantize it with the usages of the destination"
                raise UsageError(f"the source holds no {inner.argument!r}", expected="the same usages", remedy=remedy)
            if native_dtype(src, inner) != native_dtype(self, inner):
                raise DTypeError(f"source holds {native_dtype(src, inner)}", expected=str(native_dtype(self, inner)))
            if theirs.shape != mine.shape:
                what = f"{inner.argument!r} of the source has shape {tuple(theirs.shape)}"
                raise ShapeError(what, expected=str(tuple(mine.shape)))
            pairs.append((mine, theirs))
        if not pairs:
            raise self._empty(" to write to")
        if noop_flag is not None:
            check_scalar(noop_flag, pairs[0][0], "noop_flag")
        for mine, theirs in pairs:
            mine.copy_(theirs if noop_flag is None else torch.where(noop_flag.reshape(()) == 1, mine, theirs))
        written = [mine for mine, _ in pairs]
        bump_versions([*written, self] if isinstance(self, torch.Tensor) else written)
        self.mark_written()
        if self._whole is not None:
            self._whole.mark_written()

    # -- views, which share scales with the rest of their tensor --

    def shared_inner(self) -> list[InnerTensor]:
        """The inner tensors held that belong to all rows alike: one scale for the tensor, say."""
        return [inner for inner in self.inner_tensors if inner.shared and getattr(self, inner.attribute) is not None]

    def shared_with_whole(self) -> list[str]:
        """Attributes of a view with what belongs to more of its tensor than the view has; by default to all rows."""
        return [inner.attribute for inner in self.shared_inner()]

    def shares_scales(self, other: QuantizedTensorStorage) -> bool:
        """Whether what a view shares with its tensor is equal in ``other``, so that its elements mean the same here."""
        return all(equal_scales(getattr(self, name), getattr(other, name)) for name in self.shared_with_whole())

    def _rest_is_zero(self) -> bool:
        """Whether the rest of the tensor holds zeros alone, as the padding of a shard does: they suit any scale."""
        mine, whole = (getattr(s, s.raw_inner()[0].attribute) for s in (self, self._whole) if s is not None)
        # What is made like a tensor without gaps and overlaps has its strides.
        if torch.compiler.is_compiling() or torch.empty_like(mine, device="meta").stride() != mine.stride():
            return False
        return bool(torch.count_nonzero(mine) == torch.count_nonzero(whole))

    def mark_written(self) -> None:
        """Called after the values changed in place: what is kept of them is outdated."""
        if self.counts_writes:
            self._writes.writes += 1

    def share_writes(self, other: QuantizedTensorStorage) -> None:
        """Count writes together with ``other``, an alias."""
        if self.counts_writes and other.counts_writes:
            self._writes = other._writes

    # -- as an operand of a product: by its values, unless a subclass overrides one of these --

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This tensor as a GEMM operand ``[rows, columns]`` in ``dtype``, and a float32 scalar still to multiply.

        The default dequantizes in high precision and leaves no factor. A storage whose elements are exact in
        ``dtype`` returns the bare elements and its scale.
        """
        values: torch.Tensor = self.dequantize(dtype)
        return values.reshape(-1, values.shape[-1]), None

    #: The text of the layout of :meth:`grid_operand`.
    layout_text: str = ""

    @property
    def column_layout_text(self) -> str:
        """The same of columns, where it is another one."""
        return self.layout_text

    def grid_operand(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This tensor as a GEMM operand on a grid, or None for :meth:`gemm_operand`, as is the default.

        Returns:
            The bytes of the elements as a matrix, and scales, as they are stored for the usage.

        Raises:
            UsageError: the data held does not serve the usage.
        """
        return None

    def gemm_cache(self) -> GemmCache | None:
        """Where products keep what they make of this operand; None where nobody counts the writes to it."""
        # A graph has no place for it.
        return None if not self.counts_writes or torch.compiler.is_compiling() else self._writes

    # -- the elements as bytes --

    def raw_inner(self) -> tuple[InnerTensor, ...]:
        """The inner tensors held that are the elements in their order: for each usage the first that is gathered."""
        found: dict[Usage, InnerTensor] = {}
        for inner in self.inner_tensors:
            if inner.gather and not inner.transposed and getattr(self, inner.attribute) is not None:
                found.setdefault(inner.usage, inner)
        if not found:
            expected, remedy = "an inner tensor declared with gather=True", "keep the rowwise usage of moved weights"
            raise UsageError(f"{type(self).__name__} holds no elements", expected=expected, remedy=remedy)
        return tuple(found.values())

    def is_derived(self, inner: InnerTensor) -> bool:
        """Whether an inner tensor is made of the others, as a transpose is, and not written by itself."""
        return not (inner.gather or inner.shared)

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        """Put ``tensor``, which holds the same values, in the place of an inner tensor."""
        setattr(self, inner.attribute, tensor)

    def rebuild_derived(self, *, force: bool = False) -> None:
        """Make what derives from the elements and is outdated: nothing, unless a subclass keeps such a tensor.

        With ``force`` also what looks up to date: a collective may write bytes without counting it as a write.
        """

    def update_quantizer(self, quantizer: Any) -> None:
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
