"""What a storage class declares, what follows from it for storages of any class, and what a storage is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from ottava.errors import DeviceError, DTypeError, ShapeError

Usage = Literal["rowwise", "columnwise", "both"]


class StorageQuantizer(Protocol):
    """What a storage asks of the quantizer that it keeps, an :class:`ottava.Quantizer`, which says what each does."""

    columnwise_usage: bool

    def copy(self) -> Any: ...
    def with_usage(self, rowwise: bool, columnwise: bool) -> Any: ...
    def is_alike(self, other: Any) -> bool: ...
    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any: ...
    def for_shards(self, group: Any) -> Any: ...


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
        native: the 8-bit dtype of its bytes, or the attribute that holds it, for files that other tools read. None: the
            dtype that it has.
    """

    attribute: str
    argument: str
    usage: Usage = "both"
    gather: bool = False
    block_rows: int | None = None
    native: torch.dtype | str | None = None


@dataclass(frozen=True)
class StaticField:
    """One immutable, hashable value of a storage class.

    Attributes:
        attribute: where the storage keeps it.
        argument: the constructor's keyword for it.
        usage: the usage whose data it describes; without such data it says nothing.
    """

    attribute: str
    argument: str
    usage: Usage = "both"


def check_values_dtype(dtype: torch.dtype | None) -> None:
    """Refuse what values cannot be dequantized to.

    Raises:
        DTypeError: ``dtype`` is neither None nor a floating-point dtype.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise DTypeError(f"cannot dequantize to {dtype!r}", expected="a floating-point dtype or None")


def check_noop_flag(noop_flag: torch.Tensor, device: torch.device) -> None:
    """Refuse a ``noop_flag`` that is not a float32 tensor with one element on ``device``.

    Raises:
        DTypeError, ShapeError, DeviceError: it is not.
    """
    if not isinstance(noop_flag, torch.Tensor) or noop_flag.dtype != torch.float32:
        raise DTypeError("noop_flag is not a float32 tensor", expected="torch.ones(1)")
    if noop_flag.numel() != 1:
        raise ShapeError(f"noop_flag has shape {tuple(noop_flag.shape)}", expected="one element")
    if noop_flag.device != device:
        raise DeviceError(f"noop_flag is on {noop_flag.device}", expected=f"{device}, where the values are")


def same_kind(one: Any, other: Any) -> bool:
    """Whether two storages have the same declaration, nominal dtype and static values, whatever their shapes.

    Values that describe the data of a usage count where both hold data for it.
    """
    if one.inner_tensors != other.inner_tensors or one.dtype != other.dtype:
        return False
    mine, theirs = one.get_usages(), other.get_usages()
    fields = {field for cls in (type(one), type(other)) for field in cls.static_fields}
    names = {f.attribute for f in fields if f.usage == "both" or (mine[f.usage] and theirs[f.usage])}
    return all(getattr(one, name, None) == getattr(other, name, None) for name in names)


def native_dtype(storage: Any, inner: InnerTensor) -> torch.dtype | None:
    """The 8-bit dtype that the bytes of an inner tensor have, for those who read them without Ottava."""
    native = inner.native
    return getattr(storage, native) if isinstance(native, str) else native
