"""``Float8RowwiseScaling``: the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ottava.errors import OptionError
from ottava.formats import E4M3, E5M2, Format
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava_rowwise.quantizer import Float8RowwiseQuantizer

_FAKE_QUANT_FORMATS = {"ROWWISEE4M3": E4M3, "ROWWISEE5M2": E5M2}


@dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """FP8 with a float32 scale for each row that a GEMM sums over.

    Attributes:
        fp8_format: ``Format.E4M3`` for all tensors, ``Format.E5M2``, or ``Format.HYBRID`` (E5M2 for
            gradients).
        force_pow_2_scales: floor scales to powers of two.
        amax_epsilon: a smaller amax is replaced by this value.
        wgrad_high_precision: wgrad multiplies unquantized operands.
        backward: what the backward pass reads, as :attr:`ottava.recipes.Recipe.backward` says.

    Raises:
        OptionError: a field has a value that is not allowed.
    """

    name: ClassVar[str] = "rowwise"

    fp8_format: Format = Format.E4M3
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0
    wgrad_high_precision: bool = False
    backward: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.fp8_format, Format):
            raise OptionError(
                f"fp8_format is {self.fp8_format!r}",
                expected=f"one of {', '.join(f'Format.{f.name}' for f in Format)}",
            )
        if not isinstance(self.wgrad_high_precision, bool):
            raise OptionError(
                f"wgrad_high_precision is {self.wgrad_high_precision!r}", expected="True or False"
            )
        # The quantizer checks the remaining fields.
        self.make_quantizer(QuantizerRole())

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> Float8RowwiseQuantizer:
        """A quantizer of ``fp8_format``'s forward or backward element format, by the role.

        Nothing is reduced over ranks, because each row has its own scale.
        """
        element = self.fp8_format.backward if role.is_gradient else self.fp8_format.forward
        return self._quantizer(element.torch_dtype)

    def fake_quantizer(self, fp8_format: str) -> Float8RowwiseQuantizer | None:
        element = _FAKE_QUANT_FORMATS.get(fp8_format)
        if element is None:
            return None
        return self._quantizer(element.torch_dtype, columnwise=False)

    def _quantizer(self, fp8_dtype: torch.dtype, columnwise: bool = True) -> Float8RowwiseQuantizer:
        return Float8RowwiseQuantizer(
            fp8_dtype,
            columnwise=columnwise,
            amax_epsilon=self.amax_epsilon,
            force_pow_2_scales=self.force_pow_2_scales,
        )
