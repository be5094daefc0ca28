"""``HybridQuantizer``: one quantizer for rows, another one for columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ottava.distributed import ShardRule, rule_of
from ottava.errors import DTypeError, OptionError
from ottava.recipes import QuantizerRequest, QuantizerRole, Recipe
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_custom.hybrid_tensors import SIDES, hybrid_class
from ottava_custom.identity import IdentityQuantizer


def side_of(recipe: Recipe, role: QuantizerRole, side: str) -> Quantizer:
    """The quantizer that a recipe gives one side of a hybrid.

    Where the recipe keeps wgrad in high precision, the operands of wgrad are not quantized.
    """
    of_wgrad = side == "columnwise" and role.tensor_type != "weight"
    if recipe.wgrad_high_precision and of_wgrad:
        return IdentityQuantizer()
    return recipe.quantizer(role)


def quantizer_for_side(
    factory: Callable[[QuantizerRole], Quantizer | QuantizerRequest | None],
    role: QuantizerRole,
    side: str,
) -> Quantizer:
    """The quantizer that a factory gives one side of a hybrid.

    Raises:
        OptionError: the factory gives none for the role, or one that keeps state.
    """
    quantizer = factory(role)
    if isinstance(quantizer, QuantizerRequest):
        quantizer = side_of(quantizer.recipe, role, side)
    if quantizer is None:
        what = f"there is no quantizer for {role.tensor_type!r} of layer {role.name!r}"
        raise OptionError(what, expected="a quantizer, for either direction")
    if quantizer.stateful:
        raise OptionError(
            "a recipe that keeps state cannot serve one direction",
            expected="recipes without state for rowwise and columnwise",
            remedy="let it serve the whole role",
        )
    return quantizer


class _BothSides(ShardRule):
    """Rows are independent where those of both sides are."""

    def independent_rows(self, quantizer: Any) -> int | None:
        sides = (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)
        rows = [rule_of(side).independent_rows(side) for side in sides]
        return None if None in rows else math.lcm(*filter(None, rows))


class HybridQuantizer(Quantizer):
    """Quantizes along rows as one quantizer does and along columns as another: one for each
    direction of a layer.

    fprop reads rows of the input and of the weight; dgrad reads rows of ``grad_output`` and columns
    of the weight; wgrad reads columns of both.

    Args:
        rowwise_quantizer: for the rowwise usage.
        columnwise_quantizer: for the columnwise usage.
        rowwise, columnwise: usages to produce.

    Raises:
        DTypeError: one of them is no quantizer, or is a hybrid itself.
        OptionError: one of them holds state: what a layer's state belongs to has to serve a whole
            tensor.
    """

    shards: ClassVar[ShardRule] = _BothSides()

    def __init__(
        self,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        sides = []
        for side, quantizer in zip(SIDES, (rowwise_quantizer, columnwise_quantizer), strict=True):
            if not isinstance(quantizer, Quantizer) or isinstance(quantizer, HybridQuantizer):
                what = f"{side}_quantizer is a {type(quantizer).__name__}"
                raise DTypeError(what, expected="an ottava.Quantizer that is no hybrid itself")
            if quantizer.stateful:
                what = f"{side}_quantizer is a {type(quantizer).__name__}, which holds state"
                remedy = (
                    "use it for a whole role: return an ottava.QuantizerRequest from the factory"
                )
                raise OptionError(what, expected="a quantizer without state", remedy=remedy)
            copied = quantizer.copy()
            copied.set_usage(rowwise=side == "rowwise", columnwise=side == "columnwise")
            copied.internal = True
            sides.append(copied)
        self.rowwise_quantizer, self.columnwise_quantizer = sides
        self.keeps_operands = any(quantizer.keeps_operands for quantizer in sides)
        self.keeps_values = all(quantizer.keeps_values for quantizer in sides)
        # The storage class of each side, also where only the other is asked.
        self.kinds = tuple(type(quantizer.make_empty((1, 1), device="cpu")) for quantizer in sides)
        for tensor in (False, True):
            # From now on a file may hold one.
            hybrid_class(*self.kinds, tensor=tensor)

    def is_requantization_safe(self) -> bool:
        sides = (self.rowwise_quantizer, self.columnwise_quantizer)
        return all(quantizer.is_requantization_safe() for quantizer in sides)

    def for_usage(self, columnwise: bool) -> Quantizer:
        return self.columnwise_quantizer if columnwise else self.rowwise_quantizer

    def for_shards(self, group: Any) -> HybridQuantizer:
        copied = self.copy()
        copied.rowwise_quantizer = self.rowwise_quantizer.for_shards(group)
        copied.columnwise_quantizer = self.columnwise_quantizer.for_shards(group)
        return copied

    def is_alike(self, other: Quantizer) -> bool:
        if not isinstance(other, HybridQuantizer) or not self.rowwise_quantizer.is_alike(
            other.rowwise_quantizer
        ):
            return False
        return self.columnwise_quantizer.is_alike(other.columnwise_quantizer)

    def quantize_impl(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        dtype = dtype or tensor.dtype
        cls = hybrid_class(*self.kinds, tensor=not self.internal)
        if self.keeps_operands and not self.internal:
            tensor = tensor.clone()
        rows = self.rowwise_quantizer.quantize_impl(tensor, dtype) if self.rowwise_usage else None
        columns = (
            self.columnwise_quantizer.quantize_impl(tensor, dtype)
            if self.columnwise_usage
            else None
        )
        if columns is not None and not self.internal:
            held = [
                inner
                for inner in columns.inner_tensors
                if getattr(columns, inner.attribute) is not None
            ]
            if not any(inner.gather for inner in held):
                # A weight whose bytes are written or gathered by rows; a transpose alone is made of
                # such.
                columns = self.columnwise_quantizer.with_usage(True, True).quantize_impl(
                    tensor, dtype
                )
        return cls.around([rows, columns], tuple(tensor.shape), dtype, self)
