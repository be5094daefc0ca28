"""``MXBlockScaling``: the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ottava.errors import OptionError
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava.tensors.declaration import check_choice, check_flag
from ottava_mx.quantizer import FORMATS, RULES, SIZES, MXQuantizer


@dataclass(frozen=True)
class MXBlockScaling(Recipe):
    """Elements of four, six or eight bits in blocks of 32 that share a power of two (OCP MX).

    Attributes:
        element: the format of all tensors: ``"MXFP4"``, ``"MXFP6E2M3"``, ``"MXFP6E3M2"``,
            ``"MXINT8"``, or ``"MXINT8S"``, which clamps symmetrically.
        grad_element: the format of gradients; that of the others by default.
        scale_rounding: the rule from an amax to a scale: ``"up"``, ``"floor"``, ``"even"`` or
            ``"nearest"``.
        with_2d_quantization: weights have one scale for each block of 32 × 32, so that forward and
            backward use the same values.
        stochastic_rounding: gradients are rounded at random, in proportion to the distances.
        rotation: the operands of the backward pass's products are transformed by Hadamard matrices
            of this size along the summed dimension: 16, 32, 64 or 128; 0 is none.
        backward: what the backward pass reads, as :attr:`ottava.recipes.Recipe.backward` says.

    Raises:
        OptionError: a field has a value that is not allowed, or two contradict each other.
    """

    name: ClassVar[str] = "mx"

    element: str = "MXFP4"
    grad_element: str | None = None
    scale_rounding: str = "even"
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    rotation: int = 0
    backward: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("element", self.element, FORMATS)
        if self.grad_element is not None:
            check_choice("grad_element", self.grad_element, FORMATS)
        check_choice("scale_rounding", self.scale_rounding, RULES)
        check_choice("rotation", self.rotation, SIZES)
        check_flag("with_2d_quantization", self.with_2d_quantization)
        check_flag("stochastic_rounding", self.stochastic_rounding)
        if self.rotation and self.with_2d_quantization:
            raise OptionError(
                f"rotation={self.rotation} with with_2d_quantization=True",
                expected="one of them alone",
                remedy="the weights of dgrad are rotated, those of the forward pass are not",
            )

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> MXQuantizer:
        """A quantizer with the options of the role.

        Nothing is reduced over ranks, because each block has its own scale.
        """
        element = self.element
        if role.is_gradient and self.grad_element is not None:
            element = self.grad_element
        return MXQuantizer(
            element,
            scale_rounding=self.scale_rounding,
            with_2d_quantization=self.with_2d_quantization and role.tensor_type == "weight",
            stochastic_rounding=self.stochastic_rounding and role.is_gradient,
            rotation=self.rotation,
            # Both products of the backward pass read the gradient, one of them by rows.
            rotated="both" if role.is_gradient else "columnwise",
        )

    def fake_quantizer(self, fp8_format: str) -> MXQuantizer | None:
        if fp8_format not in FORMATS:
            return None
        return MXQuantizer(fp8_format, columnwise=False, scale_rounding=self.scale_rounding)
