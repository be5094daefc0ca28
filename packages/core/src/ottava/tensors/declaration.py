"""What a storage class declares, what follows from it for storages of any class, and what a storage is given."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.torch_private import version_of

Usage = Literal["rowwise", "columnwise", "both"]


@dataclass(frozen=True)
class InnerTensor:
    """One inner tensor of a storage class.

    Attributes:
        attribute: where the storage keeps it, for example ``"_data"``.
        argument: the constructor's keyword for it, for example ``"data"``.
        usage: the GEMM usage that it serves; ``"both"`` is never dropped by ``update_usage``.
        gather: whether a sharded weight gathers it (otherwise it is the same on every shard).
        block_rows: rows of the tensor, as a matrix, that share one row of this inner tensor. None: it has the rows of
            the tensor itself.
        all_rows: whether its values belong to all rows alike, so that they are the same on every shard: scales that
            span the rows. So it is of what serves both usages and is not gathered.
        native: the 8-bit dtype of its bytes, or the attribute that holds it, for files that other tools read. None: the
            dtype that it has.
        transposed: whether it is ``[K, *leading]``, so that the rows of the tensor are its columns.
    """

    attribute: str
    argument: str
    usage: Usage = "both"
    gather: bool = False
    block_rows: int | None = None
    native: torch.dtype | str | None = None
    all_rows: bool = False
    transposed: bool = False

    def by_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """This inner tensor with the rows first: a view."""
        return tensor.movedim(0, -1) if self.transposed else tensor

    def as_held(self, by_rows: torch.Tensor) -> torch.Tensor:
        """What :meth:`by_rows` gave, as it is held: a view."""
        return by_rows.movedim(-1, 0) if self.transposed else by_rows

    @property
    def shared(self) -> bool:
        """Whether all shards have the same values of it."""
        return self.all_rows or (self.usage == "both" and not self.gather)


@dataclass(frozen=True)
class StaticField:
    """One immutable, hashable value of a storage class.

    Attributes:
        attribute: where the storage keeps it.
        argument: the constructor's keyword for it.
        usage: the usage whose data it describes; without such data it says nothing.
        default: what it is where the constructor is not given it; without one it has to be given.
    """

    attribute: str
    argument: str
    usage: Usage = "both"
    default: Any = ...


# -- what is kept of the bytes: aliases share one count of writes, which what is kept remembers --


def _version(source: torch.Tensor | None) -> int:
    # Also catches a user's own in-place write to the buffer; inference tensors have no version.
    if source is None or torch.compiler.is_compiling() or source.is_inference():
        return 0
    return version_of(source)


class DerivedTensor:
    """A tensor computed from a buffer, with the state of the buffer that it was computed from."""

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor | None, writes: "GemmCache") -> None:
        self.tensor = tensor
        self.refresh(source, writes)

    def refresh(self, source: torch.Tensor | None, writes: "GemmCache") -> None:
        """Declare the tensor up to date with ``source`` as it is now; aliases that share this object see it."""
        self._source, self._state = source, (writes.writes, _version(source))

    def fresh(self, source: torch.Tensor | None, writes: "GemmCache") -> bool:
        """Whether it was computed from ``source`` and nothing was written to it since."""
        return self._source is source and self._state == (writes.writes, _version(source))


class GemmCache:
    """What products keep of an operand, and the count of writes to it, shared by all aliases.

    Attributes:
        entries: by whether it serves the columnwise usage: the state of the tensors that it was made of, these tensors,
            whose addresses are nobody else's while they are held, and what was made.
        writes: how often the operand was written to in place, through whichever alias: what is kept is outdated by one.
    """

    # Most operands are multiplied once and keep nothing: an object that sets nothing is made without Python.
    _entries: dict[bool, tuple[Hashable, Sequence[torch.Tensor], Any]] | None = None
    writes = 0

    @property
    def entries(self) -> dict[bool, tuple[Hashable, Sequence[torch.Tensor], Any]]:
        if self._entries is None:
            self._entries = {}
        return self._entries

    def get(
        self, columnwise: bool, tensors: Sequence[torch.Tensor], make: Callable[[], Any], option: Any = None
    ) -> Any:
        """What ``make`` gives, made again when ``tensors`` are others or were written to, or ``option`` is another."""
        found = [(t.data_ptr(), t.shape, t.stride(), _version(t)) for t in tensors]
        state = (*found, self.writes, option)
        kept = self.entries.get(columnwise)
        if kept is None or kept[0] != state:
            kept = self.entries[columnwise] = (state, tensors, make())
        return kept[2]


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd of writes below its level, so that a backward pass that saved the old values refuses.

    Tensors that were made in inference mode have no version.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


# What an inner tensor may be.
_HELD = (torch.Tensor, type(None))


class Declared:
    """What follows from the declaration of a storage class, and from nothing else."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = ()
    static_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: What every instance knows by other means: quantized tensors their shape and dtype.
    common_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: The declared static fields without :attr:`common_fields`; found when the class is.
    own_fields: ClassVar[tuple[StaticField, ...]] = ()
    #: Whether in-place writes are counted, so that products may keep what they make of this operand.
    counts_writes: ClassVar[bool] = False
    #: Whether nothing but the declaration says how a bare storage is made; found when the class is.
    declares_all: ClassVar[bool] = False
    _quantizer: Any
    _dtype: torch.dtype
    # The storage of which this one is a view (rows, say), when they share what a write to the view would change.
    _whole: Any = None
    # Shared by all aliases that count writes.
    _writes: GemmCache

    def __init__(self, *, quantizer: Any = None, **declared: Any) -> None:
        self._hold(self._checked(declared), quantizer)

    @classmethod
    def _checked(cls, given: dict[str, Any], **also: Any) -> dict[str, Any]:
        """What the constructor was given, with what was left out, as :meth:`check_declared` returns it."""
        known = dict.fromkeys((inner.argument for inner in cls.inner_tensors), None)
        known |= {field.argument: field.default for field in cls.own_fields}
        missing = [name for name, default in known.items() if default is ... and name not in given]
        unknown = sorted(set(given) - set(known))
        if unknown or missing:
            what = f"no {missing[0]!r}" if missing else f"an unknown keyword {unknown[0]!r}"
            raise OptionError(f"{cls.__name__} was given {what}", expected=", ".join(sorted(known)))
        declared = cls.check_declared(known | given | also)
        for inner in cls.inner_tensors:
            if not isinstance(declared[inner.argument], _HELD):
                found = type(declared[inner.argument]).__name__
                raise DTypeError(f"{inner.argument!r} is a {found}", expected="a tensor or None")
        return declared

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        """Inner tensors, static fields and ``dtype``, by their arguments, as they are to be held.

        A subclass refuses here what does not fit together, and takes floats of 8 bits as bytes, say.
        """
        return declared

    def _hold(self, declared: dict[str, Any], quantizer: Any) -> None:
        if self.counts_writes:
            self._writes = GemmCache()
        self._quantizer = quantizer
        for field in self.own_fields:
            setattr(self, field.attribute, declared[field.argument])
        self._declare()
        self._put_inner([declared[inner.argument] for inner in self.inner_tensors])

    def _declare(self) -> None:
        """Called when the static fields have values, from which a class may take what its inner tensors are."""

    def _put_inner(self, tensors: Sequence[Any]) -> None:
        for inner, tensor in zip(self.inner_tensors, tensors, strict=True):
            setattr(self, inner.attribute, tensor)

    @classmethod
    def _arguments(cls, tensors: Sequence[Any], static: Sequence[Any]) -> dict[str, Any]:
        """Inner tensors and static values, in the order of the declaration, by their arguments."""
        declared: tuple[Any, ...] = (*cls.inner_tensors, *cls.all_static_fields())
        return {each.argument: value for each, value in zip(declared, (*tensors, *static), strict=True)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])
        cls.declares_all = cls.__init__ is Declared.__init__
        common = {field.attribute for field in cls.common_fields}
        cls.own_fields = tuple(field for field in cls.static_fields if field.attribute not in common)

    @classmethod
    def all_static_fields(cls) -> tuple[StaticField, ...]:
        """The declared static fields; quantized tensors add those that every tensor has."""
        return cls.common_fields + cls.own_fields

    def inner_list(self) -> list[torch.Tensor | None]:
        """The inner tensors in the order of the declaration; None for those not held."""
        return [getattr(self, inner.attribute) for inner in self.inner_tensors]

    def get_metadata(self) -> dict[str, Any]:
        """Constructor keywords that build this storage again (tensors are shared, not copied)."""
        static = [getattr(self, field.attribute) for field in self.all_static_fields()]
        return self._arguments(self.inner_list(), static) | {"quantizer": self._quantizer}

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Any]:
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
        self._put_inner(tensors[:count])
        return list(tensors[count:])

    def clear(self) -> None:
        """Drop all data; the object can be filled again by :meth:`restore_from_saved`."""
        self._put_inner([None] * len(self.inner_tensors))

    def _empty(self, what: str = "") -> UsageError:
        return UsageError(f"{type(self).__name__} holds no data{what}", remedy="it was cleared or saved")


def as_data(data: Any, float_dtype: torch.dtype, what: str) -> torch.Tensor | None:
    """``data`` as uint8: as it is, a view of a tensor of ``float_dtype``, or None as it is.

    Raises:
        DTypeError: it is something else.
    """
    if data is None or (isinstance(data, torch.Tensor) and data.dtype == torch.uint8):
        return data
    if isinstance(data, torch.Tensor) and data.dtype == float_dtype:
        return data.view(torch.uint8)
    found, expected = getattr(data, "dtype", type(data).__name__), f"torch.uint8 data or a {float_dtype} tensor"
    raise DTypeError(f"{what} is of {found}", expected=expected, remedy="quantize high-precision values")


def check_flag(name: str, value: Any) -> None:
    """Raises OptionError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", expected="True or False")


def check_values_dtype(dtype: torch.dtype | None) -> None:
    """Refuse what values cannot be dequantized to.

    Raises:
        DTypeError: ``dtype`` is neither None nor a floating-point dtype.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise DTypeError(f"cannot dequantize to {dtype!r}", expected="a floating-point dtype or None")


def same_kind(one: Any, other: Any, *, nominal: bool = True) -> bool:
    """Whether two storages have the same declaration, static values and nominal dtype, whatever their shapes.

    Values that describe the data of a usage count where both hold data for it; ``nominal`` says whether the dtype does.
    """
    if one.inner_tensors != other.inner_tensors or (nominal and one.dtype != other.dtype):
        return False
    both = {"both", *(usage for usage, held in one.get_usages().items() if held and other.get_usages()[usage])}
    names = {field.attribute for field in (*one.own_fields, *other.own_fields) if field.usage in both}
    return all(getattr(one, name, None) == getattr(other, name, None) for name in names - {"_dtype"})


def native_dtype(storage: Any, inner: InnerTensor) -> torch.dtype | None:
    """The 8-bit dtype that the bytes of an inner tensor have, for those who read them without Ottava."""
    native = inner.native
    return getattr(storage, native) if isinstance(native, str) else native


def equal_scales(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two scales are equal; those on the meta device have no values to differ in."""
    if one is other or other is None or one.is_meta or other.is_meta:
        return one is other or (other is not None and one.is_meta and other.is_meta)
    # Comparing values would break a graph that is being traced.
    return not torch.compiler.is_compiling() and torch.equal(one, other.to(one.device))
