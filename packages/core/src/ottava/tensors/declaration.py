"""The declaration of a storage class, the keywords of its constructor, and caches of tensors that
are computed from its bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch

from ottava.errors import DTypeError, OptionError
from ottava.torch_private import version_of

Usage = Literal["rowwise", "columnwise", "both"]
ProductT = TypeVar("ProductT")


@dataclass(frozen=True)
class InnerTensor:
    """One inner tensor of a storage class.

    Attributes:
        attribute: the storage's attribute for it, for example ``"_data"``.
        argument: the constructor's keyword for it, for example ``"data"``.
        usage: the GEMM usage that it serves; ``"both"`` is never dropped by ``update_usage``.
        gather: whether a sharded weight gathers it (otherwise it is the same on every shard).
        block_rows: rows of the tensor, as a matrix, that share one row of this inner tensor. None:
            it has the rows of the tensor itself.
        all_rows: whether its values belong to all rows alike, as scales that span the rows do, so
            that they are the same on every shard. The same holds, without this flag, of an inner
            tensor that serves both usages and is not gathered.
        native: the 8-bit dtype of its bytes, or the attribute that holds it, for files that other
            tools read. None: the dtype that it has.
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
        """The inverse of :meth:`by_rows`: a view."""
        return by_rows.movedim(-1, 0) if self.transposed else by_rows

    @property
    def shared(self) -> bool:
        """Whether all shards have the same values of it."""
        return self.all_rows or (self.usage == "both" and not self.gather)


@dataclass(frozen=True)
class StaticField:
    """One immutable, hashable value of a storage class.

    Attributes:
        attribute: the storage's attribute for it.
        argument: the constructor's keyword for it.
        usage: the usage whose data it describes; without such data it says nothing.
        default: its value where the constructor is called without it; ``...``: it is required.
    """

    attribute: str
    argument: str
    usage: Usage = "both"
    default: object = ...


#: Keywords of a storage's constructor: inner tensors, and static values of the types that the class
#: gives them, which no annotation here can know.
Declared = dict[str, Any]


class Declaring(Protocol):
    """The attributes of a storage that this module reads."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]]
    own_fields: ClassVar[tuple[StaticField, ...]]

    @property
    def dtype(self) -> torch.dtype: ...

    def get_usages(self) -> dict[str, bool]: ...

    @classmethod
    def check_declared(cls, declared: Declared) -> Declared: ...


def check_keywords(cls: type[Declaring], keywords: Declared, **common: object) -> Declared:
    """The keywords of a storage's constructor, with those left out, as ``check_declared`` returns
    them.

    Args:
        keywords: those that the constructor was called with.
        common: values that every quantized tensor has.

    Raises:
        OptionError: a keyword is not declared, or a static field has no value.
        DTypeError: an inner tensor is no tensor.
    """
    declared: Declared = dict.fromkeys((inner.argument for inner in cls.inner_tensors), None)
    declared |= {field.argument: field.default for field in cls.own_fields}
    for name, default in declared.items():
        if default is ... and name not in keywords:
            raise _wrong_keyword(cls, f"no {name!r}", declared)
    for name in sorted(set(keywords) - set(declared)):
        raise _wrong_keyword(cls, f"an unknown keyword {name!r}", declared)
    declared = cls.check_declared(declared | keywords | common)
    for inner in cls.inner_tensors:
        tensor = declared[inner.argument]
        if not isinstance(tensor, torch.Tensor | None):
            raise DTypeError(
                f"{inner.argument!r} is a {type(tensor).__name__}", expected="a tensor or None"
            )
    return declared


def _wrong_keyword(cls: type[Declaring], mistake: str, declared: Declared) -> OptionError:
    message = f"{cls.__name__} was given {mistake}"
    return OptionError(message, expected=", ".join(sorted(declared)))


def native_dtype(storage: object, inner: InnerTensor) -> torch.dtype | None:
    """The 8-bit dtype that the bytes of an inner tensor have, for those who read them without
    Ottava."""
    if not isinstance(inner.native, str):
        return inner.native
    dtype: torch.dtype = getattr(storage, inner.native)
    return dtype


def same_kind(one: Declaring, other: Declaring, *, nominal: bool = True) -> bool:
    """Whether two storages have the same declaration, static values and nominal dtype, whatever
    their shapes.

    Values that describe the data of a usage count where both have data for it; ``nominal`` says
    whether the dtype does.
    """
    if one.inner_tensors != other.inner_tensors:
        return False
    if nominal and one.dtype != other.dtype:
        return False
    usages, other_usages = one.get_usages(), other.get_usages()
    common = {"both", *(name for name in usages if usages[name] and other_usages[name])}
    fields = (*one.own_fields, *other.own_fields)
    names = {field.attribute for field in fields if field.usage in common} - {"_dtype"}
    return all(getattr(one, name, None) == getattr(other, name, None) for name in names)


def equal_scales(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two scales are equal; those on the meta device have no values to differ in."""
    if one is other:
        return True
    if other is None:
        return False
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    # Comparing values would break a graph that is being traced.
    return not torch.compiler.is_compiling() and torch.equal(one, other.to(one.device))


def as_data(data: object, float_dtype: torch.dtype | None, name: str) -> torch.Tensor | None:
    """:func:`as_bytes` of an argument that may be None."""
    return None if data is None else as_bytes(data, float_dtype, name)


def as_bytes(data: object, float_dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """``data`` as uint8: as it is, or a view of a tensor of ``float_dtype``, if that is a dtype.

    Raises:
        DTypeError: it is neither; ``name`` is that of the argument.
    """
    if isinstance(data, torch.Tensor) and data.dtype == torch.uint8:
        return data
    if isinstance(data, torch.Tensor) and data.dtype == float_dtype:
        return data.view(torch.uint8)
    expected = "torch.uint8 data"
    if float_dtype not in (None, torch.uint8):
        expected += f" or a {float_dtype} tensor"
    raise DTypeError(
        f"{name} is of {getattr(data, 'dtype', type(data).__name__)}",
        expected=expected,
        remedy="quantize high-precision values",
    )


def check_flag(name: str, value: object) -> None:
    """Raises OptionError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", expected="True or False")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises OptionError unless ``value`` is one of ``choices``, which are of one type."""
    if type(value) is not type(choices[0]) or value not in choices:
        raise OptionError(f"{name} is {value!r}", expected=f"one of {', '.join(map(str, choices))}")


def check_values_dtype(dtype: torch.dtype | None) -> None:
    """Raises DTypeError unless values can be dequantized to ``dtype``: a floating-point dtype, or
    None."""
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise DTypeError(
            f"cannot dequantize to {dtype!r}", expected="a floating-point dtype or None"
        )


# -- caches: a write outdates them, and all aliases count writes together --


def _version(source: torch.Tensor | None) -> int:
    # Also catches a user's own in-place write to the buffer; inference tensors have no version.
    if source is None or torch.compiler.is_compiling() or source.is_inference():
        return 0
    return version_of(source)


class DerivedTensor:
    """A tensor computed from a buffer, with the state of the buffer that it was computed from."""

    def __init__(
        self, tensor: torch.Tensor, source: torch.Tensor | None, writes: GemmCache
    ) -> None:
        self.tensor = tensor
        self.refresh(source, writes)

    def refresh(self, source: torch.Tensor | None, writes: GemmCache) -> None:
        """Declare the tensor up to date with ``source`` as it is now; aliases that share this
        object see it."""
        self._source, self._state = source, (writes.writes, _version(source))

    def fresh(self, source: torch.Tensor | None, writes: GemmCache) -> bool:
        """Whether it was computed from ``source`` and nothing was written to it since."""
        return self._source is source and self._state == (writes.writes, _version(source))


class GemmCache:
    """What products compute from an operand and use again, and the count of writes to the operand.
    All its aliases share it.

    Attributes:
        entries: an entry for each usage, by whether it is the columnwise one: the state of the
            tensors that it was computed from, these tensors, and the result. The tensors are kept
            alive, so that no others get their addresses.
        writes: how often the operand was written to in place, through any alias. A write outdates
            the entries.
    """

    # A class attribute, because most operands are multiplied once and cache nothing: an object that
    # sets no attribute is made without running Python.
    writes = 0

    @cached_property
    def entries(self) -> dict[bool, tuple[Hashable, Sequence[torch.Tensor], Any]]:
        return {}

    def get(
        self,
        columnwise: bool,
        tensors: Sequence[torch.Tensor],
        make: Callable[[], ProductT],
        option: Hashable = None,
    ) -> ProductT:
        """The result of ``make``, which is called again when ``tensors`` are others or were written
        to, or ``option`` is another."""
        tensor_states = [(t.data_ptr(), t.shape, t.stride(), _version(t)) for t in tensors]
        state = (*tensor_states, self.writes, option)
        entry = self.entries.get(columnwise)
        if entry is None or entry[0] != state:
            entry = self.entries[columnwise] = (state, tensors, make())
        result: ProductT = entry[2]
        return result


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd of writes below its level, so that a backward pass that saved the old values
    refuses."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(
            [tensor for tensor in tensors if not tensor.is_inference()]
        )
