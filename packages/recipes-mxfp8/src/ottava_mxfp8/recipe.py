"""``MXFP8BlockScaling``: the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ottava.errors import OptionError
from ottava.formats import E4M3, E5M2, Format
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava_mxfp8.quantizer import MXFP8Quantizer

_FAKE_QUANT_FORMATS = {"MXFP8E4M3": E4M3, "MXFP8E5M2": E5M2}


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 in blocks of 32 elements that share a power of two, by the OCP Microscaling standard.

    Attributes:
        fp8_format: ``Format.E4M3`` for all tensors, ``Format.E5M2``, or ``Format.HYBRID`` (E5M2 for
            gradients).
        with_2d_quantization: weights have one scale for each block of 32 × 32, so that forward and
            backward use the same values.
        scale_rounding: ``"up"``, which clamps no element, or ``"floor"``, the standard's rule.
        backward: what the backward pass reads, as :attr:`ottava.recipes.Recipe.backward` says.

    Raises:
        OptionError: a field has a value that is not allowed.
    """

    name: ClassVar[str] = "mxfp8"

    fp8_format: Format = Format.E4M3
    with_2d_quantization: bool = False
    scale_rounding: str = "up"
    backward: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.fp8_format, Format):
            raise OptionError(
                f"fp8_format is {self.fp8_format!r}",
                expected=f"one of {', '.join(f'Format.{f.name}' for f in Format)}",
            )
        if not isinstance(self.with_2d_quantization, bool):
            raise OptionError(
                f"with_2d_quantization is {self.with_2d_quantization!r}", expected="True or False"
            )
        # The quantizer checks scale_rounding.
        self.make_quantizer(QuantizerRole())

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> MXFP8Quantizer:
        """A quantizer of ``fp8_format``'s forward or backward element format, by the role.

        Nothing is reduced over ranks, because each block has its own scale.
        """
        element = self.fp8_format.backward if role.is_gradient else self.fp8_format.forward
        return MXFP8Quantizer(
            element.torch_dtype,
            with_2d_quantization=self.with_2d_quantization and role.tensor_type == "weight",
            scale_rounding=self.scale_rounding,
        )

    def fake_quantizer(self, fp8_format: str) -> MXFP8Quantizer | None:
        element = _FAKE_QUANT_FORMATS.get(fp8_format)
        if element is None:
            return None
        return MXFP8Quantizer(
            element.torch_dtype, columnwise=False, scale_rounding=self.scale_rounding
        )
