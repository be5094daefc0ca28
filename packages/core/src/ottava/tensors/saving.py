"""Saving for backward, by value: nothing is mutated, so that compiled code can carry the specs to the backward pass."""

from collections.abc import Sequence
from typing import Any

import torch

from ottava.errors import DTypeError, ShapeError
from ottava.tensors.storage import QuantizedTensorStorage, StorageSpec


def prepare_for_saving(
    *tensors: torch.Tensor | QuantizedTensorStorage | None,
) -> tuple[list[torch.Tensor | None], list[StorageSpec | None]]:
    """Flatten any mix of storages, quantized tensors, plain tensors and None.

    Returns:
        The plain tensors for ``ctx.save_for_backward(*tensors)``, and one object for each argument.

    Raises:
        DTypeError: an argument is something else.
    """
    pairs: list[tuple[list[torch.Tensor | None], StorageSpec | None]] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            pairs.append(tensor.flatten_storage())
        elif tensor is None or isinstance(tensor, torch.Tensor):
            pairs.append(([tensor], None))
        else:
            what = f"cannot save a {type(tensor).__name__}"
            raise DTypeError(what, expected="quantized or plain tensors, storages, or None")
    return [inner for held, _ in pairs for inner in held], [spec for _, spec in pairs]


def restore_from_saved(tensors: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
    """What was given to :func:`prepare_for_saving`; the two lists may come in either order.

    Raises:
        DTypeError: neither list is one of objects.
        ShapeError: the number of tensors does not fit the objects.
    """
    swapped = any(isinstance(e, StorageSpec) for e in tensors) or any(isinstance(e, torch.Tensor) for e in objects)
    if swapped:
        tensors, objects = objects, tensors
    if not all(spec is None or isinstance(spec, StorageSpec) for spec in objects):
        raise DTypeError("the second list holds no saved objects", expected="both lists of one prepare_for_saving")
    wanted = sum(1 if spec is None else len(spec.cls.inner_tensors) for spec in objects)
    if wanted != len(tensors):
        remedy = "pass both lists of one prepare_for_saving"
        raise ShapeError(f"{len(tensors)} saved tensors", expected=f"{wanted}", remedy=remedy)
    return rebuild_saved(tensors, objects)


def rebuild_saved(tensors: Sequence[Any], objects: Sequence[StorageSpec | None]) -> list[Any]:
    """:func:`restore_from_saved` for who saved them: nothing is checked, and what follows the last one is left."""
    restored: list[Any] = []
    position = 0
    for spec in objects:
        end = position + (1 if spec is None else len(spec.cls.inner_tensors))
        own = tensors[position:end]
        restored.append(own[0] if spec is None else spec.rebuild(own))
        position = end
    return restored
