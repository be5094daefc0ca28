"""What a storage class declares, what its constructor is given, and what is kept of the bytes of a
storage."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from ottava.errors import DTypeError, OptionError
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
        block_rows: rows of the tensor, as a matrix, that share one row of this inner tensor. None:
            it has the rows of the tensor itself.
        all_rows: whether its values belong to all rows alike, so that they are the same on every
            shard: scales that span the rows. So it is of what serves both usages and is not
            gathered.
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


def checked(cls: Any, given: dict[str, Any], **also: Any) -> dict[str, Any]:
    """What the constructor of a storage class was given, and what was left out, as
    ``check_declared`` returns it."""
    known = dict.fromkeys((inner.argument for inner in cls.inner_tensors), None)
    known |= {field.argument: field.default for field in cls.own_fields}
    wrong = [
        f"no {name!r}" for name, default in known.items() if default is ... and name not in given
    ]
    wrong += [f"an unknown keyword {name!r}" for name in sorted(set(given) - set(known))]
    if wrong:
        raise OptionError(f"{cls.__name__} was given {wrong[0]}", expected=", ".join(sorted(known)))
    declared: dict[str, Any] = cls.check_declared(known | given | also)
    for name, tensor in ((inner.argument, declared[inner.argument]) for inner in cls.inner_tensors):
        if not isinstance(tensor, torch.Tensor | None):
            raise DTypeError(f"{name!r} is a {type(tensor).__name__}", expected="a tensor or None")
    return declared


def native_dtype(storage: Any, inner: InnerTensor) -> torch.dtype | None:
    """The 8-bit dtype that the bytes of an inner tensor have, for those who read them without
    Ottava."""
    return getattr(storage, inner.native) if isinstance(inner.native, str) else inner.native


def same_kind(one: Any, other: Any, *, nominal: bool = True) -> bool:
    """Whether two storages have the same declaration, static values and nominal dtype, whatever
    their shapes.

    Values that describe the data of a usage count where both hold data for it; ``nominal`` says
    whether the dtype does.
    """
    if one.inner_tensors != other.inner_tensors or (nominal and one.dtype != other.dtype):
        return False
    both = {
        "both",
        *(usage for usage, held in one.get_usages().items() if held and other.get_usages()[usage]),
    }
    names = {
        field.attribute for field in (*one.own_fields, *other.own_fields) if field.usage in both
    }
    return all(
        getattr(one, name, None) == getattr(other, name, None) for name in names - {"_dtype"}
    )


def equal_scales(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two scales are equal; those on the meta device have no values to differ in."""
    if one is other or other is None or one.is_meta or other.is_meta:
        return one is other or (other is not None and one.is_meta and other.is_meta)
    # Comparing values would break a graph that is being traced.
    return not torch.compiler.is_compiling() and torch.equal(one, other.to(one.device))


def as_data(data: Any, float_dtype: torch.dtype, what: str) -> torch.Tensor | None:
    """``data`` as uint8: as it is, a view of a tensor of ``float_dtype``, or None as it is. Else
    raises DTypeError."""
    if data is None or (isinstance(data, torch.Tensor) and data.dtype == torch.uint8):
        return data
    if isinstance(data, torch.Tensor) and data.dtype == float_dtype:
        return data.view(torch.uint8)
    found, expected = (
        getattr(data, "dtype", type(data).__name__),
        f"torch.uint8 data or a {float_dtype} tensor",
    )
    raise DTypeError(
        f"{what} is of {found}", expected=expected, remedy="quantize high-precision values"
    )


def check_flag(name: str, value: Any) -> None:
    """Raises OptionError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", expected="True or False")


def check_values_dtype(dtype: torch.dtype | None) -> None:
    """Raises DTypeError unless values can be dequantized to ``dtype``: a floating-point dtype, or
    None."""
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise DTypeError(
            f"cannot dequantize to {dtype!r}", expected="a floating-point dtype or None"
        )


# -- what is kept of the bytes: aliases share one count of writes, which what is kept remembers --


def _version(source: torch.Tensor | None) -> int:
    # Also catches a user's own in-place write to the buffer; inference tensors have no version.
    if source is None or torch.compiler.is_compiling() or source.is_inference():
        return 0
    return version_of(source)


class DerivedTensor:
    """A tensor computed from a buffer, with the state of the buffer that it was computed from."""

    def __init__(
        self, tensor: torch.Tensor, source: torch.Tensor | None, writes: "GemmCache"
    ) -> None:
        self.tensor = tensor
        self.refresh(source, writes)

    def refresh(self, source: torch.Tensor | None, writes: "GemmCache") -> None:
        """Declare the tensor up to date with ``source`` as it is now; aliases that share this
        object see it."""
        self._source, self._state = source, (writes.writes, _version(source))

    def fresh(self, source: torch.Tensor | None, writes: "GemmCache") -> bool:
        """Whether it was computed from ``source`` and nothing was written to it since."""
        return self._source is source and self._state == (writes.writes, _version(source))


class GemmCache:
    """What products keep of an operand, and the count of writes to it, shared by all aliases.

    Attributes:
        entries: by whether it serves the columnwise usage: the state of the tensors that it was
            made of, these tensors, whose addresses are nobody else's while they are held, and what
            was made.
        writes: how often the operand was written to in place, through whichever alias: what is kept
            is outdated by one.
    """

    # Most operands are multiplied once and keep nothing: an object that sets nothing is made
    # without Python.
    writes = 0

    @cached_property
    def entries(self) -> dict[bool, tuple[Hashable, Sequence[torch.Tensor], Any]]:
        return {}

    def get(
        self,
        columnwise: bool,
        tensors: Sequence[torch.Tensor],
        make: Callable[[], Any],
        option: Any = None,
    ) -> Any:
        """What ``make`` gives, made again when ``tensors`` are others or were written to, or
        ``option`` is another."""
        found = [(t.data_ptr(), t.shape, t.stride(), _version(t)) for t in tensors]
        state = (*found, self.writes, option)
        kept = self.entries.get(columnwise)
        if kept is None or kept[0] != state:
            kept = self.entries[columnwise] = (state, tensors, make())
        return kept[2]


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd of writes below its level, so that a backward pass that saved the old values
    refuses."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(
            [tensor for tensor in tensors if not tensor.is_inference()]
        )
