"""``HybridQuantizer``: one quantizer for rows, another one for columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ottava.contract import Contract
from ottava.distributed import ShardRule, rule_of
from ottava.errors import DTypeError, OptionError
from ottava.recipes import QuantizerRequest, QuantizerRole, Recipe
from ottava.recipes.backward import HIGH_PRECISION, QUANTIZED
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_custom.hybrid_tensors import SIDES, holds_elements, hybrid_class
from ottava_custom.identity import IdentityQuantizer


def side_of(recipe: Recipe, role: QuantizerRole, side: str) -> Quantizer:
    """The quantizer that a recipe gives one side of a hybrid.

    A side that a product of the backward pass reads in high precision is not quantized.

    Raises:
        OptionError: the backward pass is to read the rows of the forward pass, dequantized, in the
            place of the columns.
    """
    gemm = "wgrad" if side == "columnwise" and role.tensor_type != "weight" else "dgrad"
    word = recipe.backward_reads(role).get((gemm, role.tensor_type), QUANTIZED)
    reads_side = side == "columnwise" or role.is_gradient
    if not reads_side or word == QUANTIZED:
        return recipe.quantizer(role)
    if word == HIGH_PRECISION:
        return IdentityQuantizer()
    raise OptionError(
        f"the columns of a hybrid are those of a recipe with backward={word!r}, which reads rows",
        expected="a recipe for columns with another value of backward",
        remedy="set backward on the recipe whose factory gives the hybrid",
    )


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
        raise OptionError(
            f"there is no quantizer for {role.tensor_type!r} of layer {role.name!r}",
            expected="a quantizer, for either direction",
        )
    if quantizer.stateful:
        raise OptionError(
            "a recipe that keeps state cannot serve one direction",
            expected="recipes without state for rowwise and columnwise",
            remedy="let it serve the whole role",
        )
    return quantizer


class _BothSides(ShardRule):
    """Rows are independent of each other where they are so on both sides."""

    def independent_rows(self, quantizer: Any) -> int | None:
        rowwise, columnwise = (rule_of(side).independent_rows(side) for side in quantizer.sides)
        if rowwise is None or columnwise is None:
            return None
        return math.lcm(rowwise, columnwise)


class HybridQuantizer(Quantizer):
    """Quantizes along rows as one quantizer does, and along columns as another.

    fprop reads rows of the input and of the weight; dgrad reads rows of ``grad_output`` and columns
    of the weight; wgrad reads columns of ``grad_output`` and of the input.

    Options belong to the sides: set them on ``rowwise_quantizer`` and ``columnwise_quantizer``.

    Args:
        rowwise_quantizer: the quantizer of the rowwise usage; of a hybrid, its rowwise one.
        columnwise_quantizer: the quantizer of the columnwise usage; of a hybrid, its columnwise
            one.
        rowwise, columnwise: usages to produce.

    Raises:
        DTypeError: a side is no quantizer.
        OptionError: a side keeps state, which has to serve a whole tensor; or an option of a side
            is set on the hybrid.
    """

    shards: ClassVar[ShardRule] = _BothSides()
    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer

    def __init__(
        self,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.rowwise_quantizer = _as_side("rowwise", rowwise_quantizer)
        self.columnwise_quantizer = _as_side("columnwise", columnwise_quantizer)
        self.aliases_operands = any(side.aliases_operands for side in self.sides)
        self.in_high_precision = all(side.in_high_precision for side in self.sides)
        # The storage class of each side, also for hybrids that hold the other side alone.
        self.kinds = tuple(type(side.make_empty((1, 1), device="cpu")) for side in self.sides)
        # Files that hold a hybrid can be read from now on.
        for tensor in (False, True):
            hybrid_class(*self.kinds, tensor=tensor)

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(self, name):
            for side in SIDES:
                if hasattr(self.__dict__.get(f"{side}_quantizer"), name):
                    raise OptionError(
                        f"{name} is set on a HybridQuantizer, and is an option of its sides",
                        expected=f"{name} of a side",
                        remedy=f"set it on {side}_quantizer, before anything is quantized",
                    )
        super().__setattr__(name, value)

    @property
    def sides(self) -> tuple[Quantizer, Quantizer]:
        """The quantizers of rows and columns."""
        return self.rowwise_quantizer, self.columnwise_quantizer

    def is_requantization_safe(self) -> bool:
        return all(side.is_requantization_safe() for side in self.sides)

    @property
    def contract(self) -> Contract:
        rows, columns = (side.contract for side in self.sides)
        return Contract(rows.rowwise, columns.columnwise)

    def for_usage(self, columnwise: bool) -> Quantizer:
        return self.columnwise_quantizer if columnwise else self.rowwise_quantizer

    def for_shards(self, group: Any) -> HybridQuantizer:
        copy = self.copy()
        copy.rowwise_quantizer = self.rowwise_quantizer.for_shards(group)
        copy.columnwise_quantizer = self.columnwise_quantizer.for_shards(group)
        return copy

    def is_alike(self, other: Quantizer) -> bool:
        if not isinstance(other, HybridQuantizer):
            return False
        pairs = zip(self.sides, other.sides, strict=True)
        return all(own.is_alike(others) for own, others in pairs)

    def quantize_impl(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        dtype = dtype or tensor.dtype
        if self.aliases_operands and not self.internal:
            tensor = tensor.clone()
        rows = columns = None
        if self.rowwise_usage:
            rows = self.rowwise_quantizer.quantize_impl(tensor, dtype)
        if self.columnwise_usage:
            columns = self._quantize_columns(tensor, dtype)
        cls = hybrid_class(*self.kinds, tensor=not self.internal)
        return cls.of_sides(rows, columns, shape=tuple(tensor.shape), dtype=dtype, quantizer=self)

    def _quantize_columns(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        """The columnwise storage. That of a tensor holds elements, which can be written to and
        gathered."""
        quantizer = self.columnwise_quantizer
        columns = quantizer.quantize_impl(tensor, dtype)
        if self.internal or holds_elements(columns):
            return columns
        # The storage holds a transpose alone, which is derived from the elements of the rows.
        return quantizer.with_usage(True, True).quantize_impl(tensor, dtype)


def _as_side(side: str, quantizer: Quantizer) -> Quantizer:
    """A copy of a quantizer that serves one side of a hybrid."""
    kind = f"{side}_quantizer is a {type(quantizer).__name__}"
    if not isinstance(quantizer, Quantizer):
        raise DTypeError(kind, expected="an ottava.Quantizer")
    if quantizer.stateful:
        raise OptionError(
            f"{kind}, which keeps state",
            expected="a quantizer without state",
            remedy="use it for a whole role: return an ottava.QuantizerRequest from the factory",
        )
    own = quantizer.for_usage(side == "columnwise").copy()
    own.set_usage(rowwise=side == "rowwise", columnwise=side == "columnwise")
    own.internal = True
    return own
