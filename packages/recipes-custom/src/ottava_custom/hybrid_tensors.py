"""Tensors whose rows and columns were quantized by different quantizers.

There is a class for each pair of storage classes, and not one class that holds two storages. The
declaration of inner tensors is needed where there is no instance yet: to check the arguments of a
constructor, to read a file, to load a pickle, to take tensors back in a backward pass, to build
what FSDP2 gathered, and in ``__tensor_unflatten__``, to which torch passes no instance. Each of
these places has a class and asks it. A pair that were not a class would have to be one in all but
name: it would declare inner tensors, be called, be found by its name in a file, and be a safe
global of ``torch.load``.

:func:`hybrid_class` joins the declarations of a pair: each inner tensor and each static field of a
side keeps its name, with ``rowwise_`` or ``columnwise_`` before it. The tensors of a side lie flat
in the hybrid, because core reads and writes them by the attributes that a class declares.
:meth:`HybridTensorStorage.side` puts them into a storage of the side, which does everything else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeGuard

import torch

from ottava.recipes.registry import import_offered
from ottava.tensors import (
    GridTensorStorage,
    InnerTensor,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    StaticField,
    StorageSpec,
)
from ottava.tensors.storage import storage_classes

Side = Literal["rowwise", "columnwise"]
SIDES: tuple[Side, Side] = ("rowwise", "columnwise")
_Kind = type[QuantizedTensorStorage]
#: Static values that both sides have in common with the hybrid.
_COMMON = ("_dtype", "_shape")


class HybridTensorStorage(QuantizedTensorStorage):
    """A storage with the inner tensors of two others: rows are read from the first, columns from
    the second.

    The classes of pairs, which :func:`hybrid_class` makes, derive from this one.
    """

    #: The storage classes of rows and columns.
    kinds: ClassVar[tuple[_Kind, _Kind]]
    _dtype: torch.dtype
    _shape: tuple[int, ...]

    @classmethod
    def of_sides(
        cls,
        rows: QuantizedTensorStorage | None,
        columns: QuantizedTensorStorage | None,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Quantizer,
    ) -> HybridTensorStorage:
        """A hybrid around a storage for each usage; None for a usage that is not wanted."""
        arguments: dict[str, Any] = {"shape": shape, "dtype": dtype, "quantizer": quantizer}
        if rows is not None:
            arguments |= _arguments_of_side("rowwise", rows)
        if columns is not None:
            arguments |= _arguments_of_side("columnwise", columns)
        return cls(**arguments)

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        # Files have elements in dtypes of their own, and storages hold them as bytes.
        arguments = dict(declared)
        for name, value in declared.items():
            if isinstance(value, torch.Tensor) and value.element_size() == 1:
                arguments[name] = value.view(torch.uint8)
        return arguments

    def _hold(self, declared: dict[str, Any], quantizer: Any) -> None:
        if any(_has_layouts(kind) for kind in self.kinds):
            # The declaration of the class has names; the layouts of the sides say the rest.
            self.inner_tensors = tuple(  # type: ignore[misc]
                inner
                for side, kind in zip(SIDES, self.kinds, strict=True)
                for inner in _inner_tensors_of_side(side, kind, declared, quantizer)
            )
        super()._hold(declared, quantizer)

    def side(self, columnwise: bool) -> QuantizedTensorStorage:
        """The storage of one side, around inner tensors of this one.

        Raises:
            UsageError: this storage holds no data of the side.
        """
        # The compiler of torch 2.11 indexes with no bool.
        number = int(columnwise)
        side, kind = SIDES[number], self.kinds[number]
        if not self.get_usages()[side]:
            raise self._without(side)
        tensors = [getattr(self, _attribute(side, inner.attribute)) for inner in kind.inner_tensors]
        static = [getattr(self, _attribute(side, field.attribute)) for field in kind.static_fields]
        quantizer: Quantizer | None = getattr(self._quantizer, f"{side}_quantizer", None)
        storage: QuantizedTensorStorage = StorageSpec(kind, tuple(static), quantizer).build(tensors)
        return storage

    def size(self, dim: int | None = None) -> Any:
        shape = torch.Size(self._shape)
        return shape if dim is None else shape[dim]

    def element_range(self, inner: InnerTensor, start: int, count: int) -> range | None:
        # Elements of a side may share bytes.
        columnwise = inner.usage == "columnwise"
        side = self.side(columnwise)
        for own in side.inner_tensors:
            if _attribute(SIDES[int(columnwise)], own.attribute) == inner.attribute:
                return side.element_range(own, start, count)
        return None

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        super().update_usage(rowwise_usage, columnwise_usage)
        usages = self.get_usages()
        for side, kind in zip(SIDES, self.kinds, strict=True):
            if not usages[side]:
                # Without its data a side needs no scale either.
                for inner in kind.inner_tensors:
                    setattr(self, _attribute(side, inner.attribute), None)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of the rows, or of the columns where no rows are held, in ``dtype`` or the
        nominal dtype."""
        columnwise = not self.get_usages()["rowwise"]
        return self.side(columnwise).dequantize(dtype or self.dtype)

    def gemm_operand(
        self, *, columnwise: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.side(columnwise).gemm_operand(columnwise=columnwise, dtype=dtype)

    def grid_operand(self, *, columnwise: bool) -> tuple[torch.Tensor | None, ...] | None:
        return self.side(columnwise).grid_operand(columnwise=columnwise)

    @property
    def layout_text(self) -> str:  # type: ignore[override]
        return self.side(columnwise=False).layout_text

    @property
    def column_layout_text(self) -> str:  # type: ignore[override]
        side = self.side(columnwise=True)
        return side.column_layout_text or side.layout_text


def _attribute(side: Side, attribute: str) -> str:
    """Where a hybrid holds an attribute of a side. Both sides have its shape and nominal dtype."""
    if attribute in _COMMON:
        return attribute
    return f"_{side}_{attribute.lstrip('_')}"


def _fields_of_side(kind: _Kind) -> list[StaticField]:
    """The static fields of a class that a hybrid holds for each side."""
    return [field for field in kind.static_fields if field.attribute not in _COMMON]


def _arguments_of_side(side: Side, storage: QuantizedTensorStorage) -> dict[str, Any]:
    """The arguments of a hybrid's constructor for a side: inner tensors and static values."""
    has_elements = holds_elements(storage)
    arguments: dict[str, Any] = {}
    for inner in storage.inner_tensors:
        # A transpose beside its elements would have to be made again whenever these are written.
        if not (has_elements and storage.is_derived(inner)):
            arguments[f"{side}_{inner.argument}"] = getattr(storage, inner.attribute)
    for field in _fields_of_side(type(storage)):
        arguments[f"{side}_{field.argument}"] = getattr(storage, field.attribute)
    return arguments


def holds_elements(storage: QuantizedTensorStorage) -> bool:
    """Whether a storage holds an inner tensor that shards gather."""
    return any(
        inner.gather and getattr(storage, inner.attribute) is not None
        for inner in storage.inner_tensors
    )


def _has_layouts(kind: _Kind) -> TypeGuard[type[GridTensorStorage]]:
    """Whether the class declares names of inner tensors, and a layout of each instance the rest."""
    gathers = any(inner.gather for inner in kind.inner_tensors)
    return issubclass(kind, GridTensorStorage) and not gathers


def _inner_tensors_of_side(
    side: Side, kind: _Kind, declared: Mapping[str, Any], quantizer: Quantizer | None
) -> list[InnerTensor]:
    """The inner tensors of a side, in a hybrid that is given the arguments ``declared`` and
    ``quantizer``."""
    inner_tensors = kind.inner_tensors
    if _has_layouts(kind):
        fields = _fields_of_side(kind)
        static = {field.argument: declared[f"{side}_{field.argument}"] for field in fields}
        # A side that is not held has no static values. It has the layout of its quantizer, so that
        # hybrids of one quantizer are of one kind.
        layout = getattr(getattr(quantizer, f"{side}_quantizer", None), "layout", None)
        if None not in static.values():
            layout = kind.layout_of(static)
        if layout is not None:
            inner_tensors = kind.inner_tensors_of(layout)
    return [_inner_tensor(side, inner) for inner in inner_tensors]


def _inner_tensor(side: Side, inner: InnerTensor) -> InnerTensor:
    """The declaration in a hybrid of an inner tensor of a side."""
    native = inner.native
    if isinstance(native, str):
        native = _attribute(side, native)
    return replace(
        inner,
        attribute=_attribute(side, inner.attribute),
        argument=f"{side}_{inner.argument}",
        usage="both" if inner.shared else side,
        native=native,
    )


def _static_field(side: Side, field: StaticField) -> StaticField:
    """The declaration in a hybrid of a static field of a side."""
    attribute, argument = _attribute(side, field.attribute), f"{side}_{field.argument}"
    # A side that is not held has no static values.
    return StaticField(attribute, argument, usage=side, default=None)


_classes: dict[tuple[_Kind, _Kind, bool], type[HybridTensorStorage]] = {}


def hybrid_class(rowwise: _Kind, columnwise: _Kind, *, tensor: bool) -> type[HybridTensorStorage]:
    """The class for a pair of storage classes: a tensor, or a bare storage."""
    key = (rowwise, columnwise, tensor)
    if key not in _classes:
        _classes[key] = _make_class(rowwise, columnwise, tensor)
    return _classes[key]


def _make_class(rowwise: _Kind, columnwise: _Kind, tensor: bool) -> type[HybridTensorStorage]:
    inner_tensors: list[InnerTensor] = []
    static_fields = [StaticField("_shape", "shape"), StaticField("_dtype", "dtype")]
    for side, kind in zip(SIDES, (rowwise, columnwise), strict=True):
        inner_tensors += [_inner_tensor(side, inner) for inner in kind.inner_tensors]
        static_fields += [_static_field(side, field) for field in _fields_of_side(kind)]
    own_name = "HybridTensor" if tensor else "HybridTensorStorage"
    # Pickles and files find the class by this name, errors show the short one.
    full_name = f"{own_name}[{_reference(rowwise)},{_reference(columnwise)}]"
    short_name = f"{own_name}[{rowwise.__name__}, {columnwise.__name__}]"
    namespace = {
        "__module__": __name__,
        "__qualname__": full_name,
        "__doc__": f"Rows of a {rowwise.__name__}, columns of a {columnwise.__name__}.",
        "kinds": (rowwise, columnwise),
        "inner_tensors": tuple(inner_tensors),
        "static_fields": tuple(static_fields),
    }
    bases = (QuantizedTensor, HybridTensorStorage) if tensor else (HybridTensorStorage,)
    cls: type[HybridTensorStorage] = type(short_name, bases, namespace)
    setattr(sys.modules[__name__], full_name, cls)
    return cls


def _reference(kind: _Kind) -> str:
    # Pickle would take a dot for an attribute of an attribute.
    return f"{kind.__module__}:{kind.__qualname__}".replace(".", "/")


def __getattr__(name: str) -> Any:
    """The class of a pair that a file names; its sides are of modules that installed recipes
    offer."""
    own_name, _, rest = name.partition("[")
    references = rest.removesuffix("]").replace("/", ".").split(",")
    if own_name in ("HybridTensor", "HybridTensorStorage") and len(references) == 2:
        for reference in references:
            if reference not in storage_classes():
                import_offered(reference.partition(":")[0])
        classes = storage_classes()
        if set(references) <= set(classes):
            rowwise, columnwise = (classes[reference] for reference in references)
            return hybrid_class(rowwise, columnwise, tensor=own_name == "HybridTensor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
