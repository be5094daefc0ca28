"""Saving by value: nothing is mutated, so that compiled code can carry the specs to the backward
pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ottava.errors import DTypeError, ShapeError


class SavedSpec(Protocol):
    """Rebuilds an operand or a storage from its saved tensors."""

    @property
    def tensor_count(self) -> int:
        """How many tensors :meth:`rebuild` takes."""

    # Any, because an operand is defined above storages, and a storage above its spec.
    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The operand or the storage around these tensors."""


@dataclass(frozen=True)
class StorageSpec:
    """Rebuilds a storage from its inner tensors.

    A spec is immutable, so that compiled code can carry it to the backward pass.

    Attributes:
        cls: the class of the storage.
        static: the values of its static fields, in the order of the declaration.
        quantizer: its quantizer, or None.
        whole: the storage of which it is a view, or None.
    """

    cls: type[Any]
    static: tuple[Any, ...]
    quantizer: Any
    whole: Any = field(default=None, compare=False, repr=False)

    @property
    def tensor_count(self) -> int:
        """How many tensors :meth:`build` takes."""
        return len(self.cls.inner_tensors)

    def build(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """A new storage (or quantized tensor) around ``tensors``, in the order of the
        declaration."""
        built = self.cls(**self.cls._arguments(tensors, self.static), quantizer=self.quantizer)
        built._whole = self.whole
        return built

    def rebuild(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """:meth:`build` around the tensors that were taken out, which need no second look."""
        if not self.cls.declares_all:
            return self.build(tensors)
        storage = object.__new__(self.cls)
        storage._hold(self.cls._arguments(tensors, self.static), self.quantizer)
        return storage


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[StorageSpec | None]]:
    """Flatten any mix of storages, quantized tensors, plain tensors and None.

    Returns:
        The plain tensors for ``ctx.save_for_backward(*tensors)``, and one object for each argument.

    Raises:
        DTypeError: an argument is something else.
    """
    pairs: list[tuple[list[torch.Tensor | None], StorageSpec | None]] = []
    for tensor in tensors:
        if hasattr(tensor, "flatten_storage"):
            pairs.append(tensor.flatten_storage())
        elif tensor is None or isinstance(tensor, torch.Tensor):
            pairs.append(([tensor], None))
        else:
            raise DTypeError(
                f"cannot save a {type(tensor).__name__}",
                expected="quantized or plain tensors, storages, or None",
            )
    plain = [tensor for tensors_of_one, _ in pairs for tensor in tensors_of_one]
    return plain, [spec for _, spec in pairs]


def restore_from_saved(tensors: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
    """The arguments of :func:`prepare_for_saving`; the two lists may come in either order.

    Raises:
        DTypeError, ShapeError: they are not both lists of one :func:`prepare_for_saving`.
    """
    if any(isinstance(e, StorageSpec) for e in tensors) or any(
        isinstance(e, torch.Tensor) for e in objects
    ):
        tensors, objects = objects, tensors
    if not all(spec is None or isinstance(spec, StorageSpec) for spec in objects):
        raise DTypeError(
            "the second list holds no saved objects",
            expected="both lists of one prepare_for_saving",
        )
    count = sum(1 if spec is None else spec.tensor_count for spec in objects)
    if count != len(tensors):
        raise ShapeError(
            f"{len(tensors)} saved tensors",
            expected=f"{count}",
            remedy="pass both lists of one prepare_for_saving",
        )
    return rebuild_saved(tensors, objects)


def rebuild_saved(tensors: Sequence[Any], specs: Sequence[SavedSpec | None]) -> list[Any]:
    """:func:`restore_from_saved` without its checks, for operands too; ``tensors`` may be followed
    by others."""
    restored: list[Any] = []
    position = 0
    for spec in specs:
        if spec is None:
            restored.append(tensors[position])
            position += 1
        else:
            end = position + spec.tensor_count
            restored.append(spec.rebuild(tensors[position:end]))
            position = end
    return restored
