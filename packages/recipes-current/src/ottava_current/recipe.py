"""``Float8CurrentScaling``: the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ottava.errors import OptionError
from ottava.formats import E4M3, E5M2, Format
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava_current.quantizer import Float8CurrentScalingQuantizer

_FAKE_QUANT_FORMATS = {"FP8E4M3": E4M3, "FP8E5M2": E5M2}


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8 that takes the scale of each tensor from its current amax.

    Attributes:
        fp8_format: ``Format.HYBRID`` (E4M3 forward, E5M2 for gradients), ``Format.E4M3`` or
            ``Format.E5M2``.
        force_pow_2_scales: floor scales to powers of two.
        amax_epsilon: a smaller amax is replaced by this value.
        with_amax_reduction: inputs and gradients use the largest amax of all ranks of autocast's
            ``amax_reduction_group``, or of the default group where autocast names none.
        backward: what the backward pass reads, as :attr:`ottava.recipes.Recipe.backward` says.

    Raises:
        OptionError: a field has a value that is not allowed.
    """

    name: ClassVar[str] = "current"

    fp8_format: Format = Format.HYBRID
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0
    with_amax_reduction: bool = False
    backward: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.fp8_format, Format):
            raise OptionError(
                f"fp8_format is {self.fp8_format!r}",
                expected=f"one of {', '.join(f'Format.{f.name}' for f in Format)}",
            )
        # The quantizer checks the remaining fields.
        self.make_quantizer(QuantizerRole())

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> Float8CurrentScalingQuantizer:
        """A quantizer of ``fp8_format``'s forward or backward element format, by the role.

        Weights are equal on all ranks, so their amaxes are not reduced.
        """
        element = self.fp8_format.backward if role.is_gradient else self.fp8_format.forward
        return Float8CurrentScalingQuantizer(
            element.torch_dtype,
            with_amax_reduction=self.with_amax_reduction if role.tensor_type != "weight" else False,
            amax_reduction_group=amax_reduction_group,
            force_pow_2_scales=self.force_pow_2_scales,
            amax_epsilon=self.amax_epsilon,
        )

    def fake_quantizer(self, fp8_format: str) -> Float8CurrentScalingQuantizer | None:
        element = _FAKE_QUANT_FORMATS.get(fp8_format)
        if element is None:
            return None
        return Float8CurrentScalingQuantizer(
            element.torch_dtype,
            columnwise=False,
            force_pow_2_scales=self.force_pow_2_scales,
            amax_epsilon=self.amax_epsilon,
        )
