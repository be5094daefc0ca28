"""Saving by value: nothing is mutated, so that compiled code can carry the specs to the backward
pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch

from ottava.errors import DTypeError, ShapeError


@dataclass(frozen=True)
class StorageSpec:
    """What is left of a storage when its tensors are taken out: immutable, so it can cross into the
    backward."""

    cls: type[Any]
    static: tuple[Any, ...]
    quantizer: Any
    whole: Any = field(default=None, compare=False, repr=False)
    # In eager code, what bare storages of this spec have in common; made once, by :meth:`pattern`.
    held: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def build(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """A new storage (or quantized tensor) around ``tensors``, in the order of the
        declaration."""
        built = self.cls(**self.cls._arguments(tensors, self.static), quantizer=self.quantizer)
        built._whole = self.whole
        return built

    def rebuild(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """:meth:`build` around the tensors that were taken out, which need no second look."""
        if self.held is not None:
            return self.around(tensors, self.quantizer)
        if self.whole is not None or not self.cls.declares_all:
            return self.build(tensors)
        made = object.__new__(self.cls)
        made._hold(self.cls._arguments(tensors, self.static), self.quantizer)
        return made

    def pattern(self, tensors: Sequence[torch.Tensor | None], late: bool) -> "StorageSpec":
        """This spec for bare storages on a grid, around tensors on the device of these: they are
        made without checks and loops, by :meth:`around`. ``late`` says whether rows may stay unread
        until somebody asks for them."""
        made = self.rebuild(tensors)
        layout, known = made.grid_layout, vars(made)
        # Columns that may be made of rows are held under another name, and know of them if they
        # are.
        places = [
            name if name in known else f"_kept{name}"
            for name in (i.attribute for i in self.cls.inner_tensors)
        ]
        held = {name: value for name, value in known.items() if name not in (*places, "_writes")}
        spec = replace(self, held=held)
        held |= {"_pattern": spec, "_places": None}
        if not (layout.square and layout.transposed):
            rows = 0 if layout.one_buffer else len(places) // 2
            unread = ["_unread"] * rows + places[rows:] if late else None
            held["_places"] = places, unread, (None,) * rows, itemgetter(*places[rows:])
        return spec

    def around(self, tensors: Sequence[Any], quantizer: Any, unread: Any = False) -> Any:
        """A bare storage like those of a :meth:`pattern`, whose rows may be ``unread``."""
        made = object.__new__(self.cls)
        # In few steps: each operand of a product comes here.
        made.__dict__ = held = self.held.copy()  # type: ignore[union-attr]
        held["_quantizer"], places = quantizer, held["_places"]
        if unread and (places is None or places[1] is None):
            tensors, unread = (*unread.tensors(), *tensors[2:]), False
        if places is None:
            made._put_inner(tensors)
        else:
            held.update(zip(places[1] if unread else places[0], tensors))
        return made


#: What is left of a bare storage of a pattern, with its quantizer: made in less time than a spec.
OfPattern = tuple[StorageSpec, Any]


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
            what = f"cannot save a {type(tensor).__name__}"
            raise DTypeError(what, expected="quantized or plain tensors, storages, or None")
    return [inner for held, _ in pairs for inner in held], [spec for _, spec in pairs]


def restore_from_saved(tensors: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
    """What was given to :func:`prepare_for_saving`; the two lists may come in either order.

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
    wanted = sum(1 if spec is None else len(spec.cls.inner_tensors) for spec in objects)
    if wanted != len(tensors):
        remedy = "pass both lists of one prepare_for_saving"
        raise ShapeError(f"{len(tensors)} saved tensors", expected=f"{wanted}", remedy=remedy)
    return rebuild_saved(tensors, objects)


def rebuild_saved(
    tensors: Sequence[Any], objects: Sequence[StorageSpec | OfPattern | None]
) -> list[Any]:
    """:func:`restore_from_saved` for who saved them: nothing is checked, and what follows the last
    one is left."""
    restored: list[Any] = []
    position = 0
    for saved in objects:
        spec = saved[0] if isinstance(saved, tuple) else saved
        end = position + (1 if spec is None else len(spec.cls.inner_tensors))
        own = tensors[position:end]
        if isinstance(saved, tuple):
            restored.append(saved[0].around(own, saved[1]))
        else:
            restored.append(own[0] if saved is None else saved.rebuild(own))
        position = end
    return restored
