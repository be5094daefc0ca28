"""Tensors whose rows and columns were quantized by different quantizers.

A hybrid holds the inner tensors of both storages under their own names with a prefix, so that
everything that is derived from a declaration (saving, moving, checkpoints, gathers) is derived from
theirs. There is a class for each pair of storage classes, made when the pair is first met, and an
attribute of this module under the name that files have.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ottava.errors import UsageError
from ottava.recipes.registry import import_offered
from ottava.tensors import (
    GridTensorStorage,
    InnerTensor,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    StaticField,
    StorageSpec,
    inner_tensors_of,
)
from ottava.tensors.storage import storage_classes

SIDES = ("rowwise", "columnwise")
_Kind = type[QuantizedTensorStorage]


class HybridTensorStorage(QuantizedTensorStorage):
    """What is common to the storages of all pairs. Each has a class of its own, with the
    declaration of the pair."""

    #: The storage class of each side.
    kinds: ClassVar[tuple[_Kind, ...]] = ()
    _dtype: torch.dtype

    @classmethod
    def around(
        cls,
        sides: Sequence[QuantizedTensorStorage | None],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Quantizer | None,
    ) -> HybridTensorStorage:
        """A hybrid around a storage for each side; None where the usage is not wanted."""
        arguments: dict[str, Any] = {}
        for side, kind, storage in zip(SIDES, cls.kinds, sides, strict=True):
            # Of the storage, because the declaration of a class on a grid has names alone.
            inner_tensors = (kind if storage is None else storage).inner_tensors
            held = {
                i: None if storage is None else getattr(storage, i.attribute) for i in inner_tensors
            }
            elements = any(inner.gather and tensor is not None for inner, tensor in held.items())
            for inner, tensor in held.items():
                # A transpose beside its elements would have to be made again whenever these are
                # written.
                derived = elements and storage is not None and storage.is_derived(inner)
                arguments[f"{side}_{inner.argument}"] = None if derived else tensor
            for field in _own_fields(kind):
                arguments[f"{side}_{field.argument}"] = (
                    None if storage is None else getattr(storage, field.attribute)
                )
        made: Any = cls
        return made(shape=shape, dtype=dtype, quantizer=quantizer, **arguments)  # type: ignore[no-any-return]

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        # Files have elements in dtypes of their own, which a declaration that follows from a layout
        # names too late.
        narrow = {
            k: v
            for k, v in declared.items()
            if isinstance(v, torch.Tensor) and v.element_size() == 1
        }
        return declared | {name: data.view(torch.uint8) for name, data in narrow.items()}

    def _hold(self, declared: dict[str, Any], quantizer: Any) -> None:
        if any(map(_follows_layout, self.kinds)):
            inner_tensors: list[InnerTensor] = []
            for side, kind in zip(SIDES, self.kinds, strict=True):
                fields = {f.argument: declared[f"{side}_{f.argument}"] for f in _own_fields(kind)}
                known = _follows_layout(kind) and None not in fields.values()
                own = inner_tensors_of(kind.layout_of(fields)) if known else kind.inner_tensors  # type: ignore[attr-defined]
                inner_tensors += [_declared(side, inner) for inner in own]
            self.inner_tensors = tuple(inner_tensors)  # type: ignore[misc]
        super()._hold(declared, quantizer)

    def side(self, columnwise: bool) -> QuantizedTensorStorage:
        """The storage of one side, around the inner tensors that this holds.

        Raises:
            UsageError: it holds no data for that side.
        """
        # The compiler of torch 2.11 takes no bool for an index.
        number = int(columnwise)
        side, kind = SIDES[number], self.kinds[number]
        tensors = [getattr(self, _attribute(side, inner.attribute)) for inner in kind.inner_tensors]
        if not self.get_usages()[side]:
            what, expected = (
                f"{type(self).__name__} has no {side} data",
                f"a tensor quantized with {side}=True",
            )
            raise UsageError(
                what,
                expected=expected,
                remedy=f"call quantizer.set_usage({side}=True) before quantizing",
            )
        static = tuple(
            self.dtype
            if field.attribute == "_dtype"
            else getattr(self, _attribute(side, field.attribute))
            for field in kind.static_fields
        )
        quantizer: Any = getattr(self._quantizer, f"{side}_quantizer", None)
        return StorageSpec(kind, static, quantizer).build(tensors)  # type: ignore[no-any-return]

    def size(self, dim: int | None = None) -> Any:
        shape = torch.Size(self._shape)  # type: ignore[attr-defined]
        return shape if dim is None else shape[dim]

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        super().update_usage(rowwise_usage, columnwise_usage)
        held = self.get_usages()
        for side, kind in zip(SIDES, self.kinds, strict=True):
            # Without its data a side needs no scale either.
            for inner in () if held[side] else kind.inner_tensors:
                setattr(self, _attribute(side, inner.attribute), None)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of the rows; of the columns where only these are held. In ``dtype`` or the
        nominal dtype."""
        return self.side(columnwise=not self.get_usages()["rowwise"]).dequantize(
            dtype or self.dtype
        )

    def gemm_operand(
        self, *, columnwise: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.side(columnwise).gemm_operand(columnwise=columnwise, dtype=dtype)

    def grid_operand(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.side(columnwise).grid_operand(columnwise=columnwise)

    @property
    def layout_text(self) -> str:  # type: ignore[override]
        return self.side(columnwise=False).layout_text

    @property
    def column_layout_text(self) -> str:  # type: ignore[override]
        side = self.side(columnwise=True)
        return side.column_layout_text or side.layout_text


def _follows_layout(kind: _Kind) -> bool:
    """Whether the declaration of the class has names alone, and the layout of a tensor the rest."""
    return issubclass(kind, GridTensorStorage) and not any(
        inner.gather for inner in kind.inner_tensors
    )


def _attribute(side: str, attribute: str) -> str:
    return f"_{side}_{attribute.lstrip('_')}"


def _own_fields(kind: _Kind) -> tuple[StaticField, ...]:
    return tuple(field for field in kind.static_fields if field.attribute != "_dtype")


def _declared(side: str, inner: InnerTensor) -> InnerTensor:
    """The declaration of a side's inner tensor in a hybrid: it serves that side, whatever it serves
    by itself."""
    return replace(
        inner,
        attribute=_attribute(side, inner.attribute),
        argument=f"{side}_{inner.argument}",
        usage="both" if inner.shared else side,  # type: ignore[arg-type]
        native=_attribute(side, inner.native) if isinstance(inner.native, str) else inner.native,
    )


def _reference(kind: _Kind) -> str:
    # A dot would be taken for an attribute of an attribute.
    return f"{kind.__module__}:{kind.__qualname__}".replace(".", "/")


_made: dict[tuple[_Kind, _Kind, bool], type[HybridTensorStorage]] = {}


def hybrid_class(rowwise: _Kind, columnwise: _Kind, *, tensor: bool) -> type[HybridTensorStorage]:
    """The class for a pair of storage classes: a tensor, or a bare storage."""
    if (rowwise, columnwise, tensor) in _made:
        return _made[rowwise, columnwise, tensor]
    kinds = (rowwise, columnwise)
    pairs = list(zip(SIDES, kinds, strict=True))
    own = tuple(
        StaticField(_attribute(side, field.attribute), f"{side}_{field.argument}", usage=side)  # type: ignore[arg-type]
        for side, kind in pairs
        for field in _own_fields(kind)
    )
    common = () if tensor else (StaticField("_shape", "shape"), StaticField("_dtype", "dtype"))
    namespace = {
        "__module__": __name__,
        "__doc__": f"Rows of a {rowwise.__name__}, columns of a {columnwise.__name__}.",
        "kinds": kinds,
        "inner_tensors": tuple(
            _declared(side, inner) for side, kind in pairs for inner in kind.inner_tensors
        ),
        "static_fields": (*common, *own),
    }
    bases = (QuantizedTensor, HybridTensorStorage) if tensor else (HybridTensorStorage,)
    own_name = "HybridTensor" if tensor else "HybridTensorStorage"
    name = f"{own_name}[{_reference(rowwise)},{_reference(columnwise)}]"
    made = type(name, bases, namespace)
    setattr(sys.modules[__name__], name, made)
    _made[rowwise, columnwise, tensor] = made
    return made


def __getattr__(name: str) -> Any:
    """The class that a file names. Of its sides, only what installed recipes bring is imported."""
    kind, _, rest = name.partition("[")
    references = rest.removesuffix("]").replace("/", ".").split(",")
    if kind in ("HybridTensor", "HybridTensorStorage") and len(references) == 2:
        for reference in references:
            if reference not in storage_classes():
                import_offered(reference.partition(":")[0])
        known = storage_classes()
        if set(references) <= set(known):
            return hybrid_class(
                known[references[0]], known[references[1]], tensor=kind == "HybridTensor"
            )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
