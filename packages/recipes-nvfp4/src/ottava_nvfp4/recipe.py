"""``NVFP4BlockScaling``: the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ottava.errors import OptionError
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava.tensors.declaration import check_choice, check_flag
from ottava_nvfp4.quantizer import BOUNDS, ERRORS, NVFP4Quantizer

#: The values of ``four_over_six`` -> the types of the tensors that it means.
_FOUR_OVER_SIX: dict[str, tuple[str, ...]] = {
    "none": (),
    "weights": ("weight",),
    "activations": ("input",),
    "all": ("weight", "input"),
}
_FLAGS = (
    "disable_rht",
    "disable_stochastic_rounding",
    "disable_2d_quantization",
    "row_scaled_activation",
)


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """FP4 in blocks of 16 elements with E4M3 scales, and one float32 scale for the tensor.

    Weights have one scale for each 16 × 16. Inputs and gradients have one for each 16, and their
    columnwise data are those after a random Hadamard transform. Gradients are rounded at random.

    Attributes:
        disable_rht: leave out the transform.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: weights have one scale for each 16 elements, in each direction.
        row_scaled_activation: inputs have one amax for each row of the summed dimension.
        four_over_six: ``"none"``, ``"weights"``, ``"activations"`` or ``"all"``: which tensors take
            the better one of two scales for each block. Gradients never do. Inputs that do have no
            transform, so that ``disable_rht`` must be set.
        four_over_six_bound: 256 or 448: the scale of the largest block.
        four_over_six_error: ``"MAE"`` or ``"MSE"``.
        backward: what the backward pass reads, as :attr:`ottava.recipes.Recipe.backward` says.
        high_precision_until_step: the number of the first steps that compute in high precision.
        high_precision_after_step: the last step that is quantized; None quantizes to the end.
        nvfp4_4over6, nvfp4_4over6_e4m3_use_256, nvfp4_4over6_err_mode: TransformerEngine's names
            for the three of 4-over-6. A value that is not None replaces theirs.

    Raises:
        OptionError: a field has a value that is not allowed, or two contradict each other.
    """

    name: ClassVar[str] = "nvfp4"

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    four_over_six: str = "none"
    four_over_six_bound: int = 256
    four_over_six_error: str = "MAE"
    backward: str = "quantized"
    high_precision_until_step: int = 0
    high_precision_after_step: int | None = None
    nvfp4_4over6: str | None = None
    nvfp4_4over6_e4m3_use_256: bool | None = None
    nvfp4_4over6_err_mode: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_other_names()
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        check_choice("four_over_six", self.four_over_six, tuple(_FOUR_OVER_SIX))
        check_choice("four_over_six_bound", self.four_over_six_bound, BOUNDS)
        check_choice("four_over_six_error", self.four_over_six_error, ERRORS)
        if "input" in _FOUR_OVER_SIX[self.four_over_six] and not self.disable_rht:
            raise OptionError(
                f"four_over_six={self.four_over_six!r} with the Hadamard transform",
                expected="inputs with one of them alone",
                remedy="set disable_rht=True, or four_over_six='weights'",
            )

    def _take_other_names(self) -> None:
        """Let TransformerEngine's names replace the fields that they mean."""
        bound = None
        if self.nvfp4_4over6_e4m3_use_256 is not None:
            bound = 256 if self.nvfp4_4over6_e4m3_use_256 else 448
        others = {
            "four_over_six": self.nvfp4_4over6,
            "four_over_six_bound": bound,
            "four_over_six_error": self.nvfp4_4over6_err_mode,
        }
        for name, value in others.items():
            if value is not None:
                object.__setattr__(self, name, value)
        # Equal recipes have equal fields, whichever name was used.
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"):
            object.__setattr__(self, name, None)

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> NVFP4Quantizer:
        """A quantizer with the options of the role.

        Nothing is reduced over ranks: their inputs and gradients are different tensors.
        """
        kind = role.tensor_type
        is_weight = kind == "weight"
        return NVFP4Quantizer(
            with_rht=not (self.disable_rht or is_weight),
            with_2d_quantization=is_weight and not self.disable_2d_quantization,
            stochastic_rounding=role.is_gradient and not self.disable_stochastic_rounding,
            row_scaled=self.row_scaled_activation and kind == "input",
            four_over_six=kind in _FOUR_OVER_SIX[self.four_over_six],
            four_over_six_bound=self.four_over_six_bound,
            four_over_six_error=self.four_over_six_error,
        )

    def fake_quantizer(self, fp8_format: str) -> NVFP4Quantizer | None:
        if fp8_format != "NVFP4":
            return None
        return NVFP4Quantizer(columnwise=False)
