"""``Float8BlockScaling``: the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ottava.errors import OptionError
from ottava.formats import E4M3, E5M2, Format
from ottava.kernels import check_epsilon
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava_blockwise.quantizer import Float8BlockQuantizer
from ottava_blockwise.tensors import check_options

_FAKE_QUANT_FORMATS = {"BLOCKWISEE4M3": E4M3, "BLOCKWISEE5M2": E5M2}


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 in blocks of 128 elements, or squares of 128 × 128, each with a float32 scale.

    Attributes:
        fp8_format: ``Format.E4M3`` for all tensors, ``Format.E5M2``, or ``Format.HYBRID`` (E5M2 for
            gradients).
        force_pow_2_scales: floor scales to powers of two.
        amax_epsilon: a smaller amax is replaced by this value.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: the blocks of inputs,
            weights and gradients: 1 for 1 × 128, 2 for 128 × 128.
        backward: what the backward pass reads, as :attr:`ottava.recipes.Recipe.backward` says.

    Raises:
        OptionError: a field has a value that is not allowed.
    """

    name: ClassVar[str] = "blockwise"

    fp8_format: Format = Format.E4M3
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    backward: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.fp8_format, Format):
            raise OptionError(
                f"fp8_format is {self.fp8_format!r}",
                expected=f"one of {', '.join(f'Format.{f.name}' for f in Format)}",
            )
        check_epsilon(self.amax_epsilon)
        dims = {name: value for name, value in vars(self).items() if name.endswith("_dim")}
        check_options(flag=("force_pow_2_scales", self.force_pow_2_scales), **dims)

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> Float8BlockQuantizer:
        """A quantizer with the element format and the blocks of the role.

        Nothing is reduced over ranks, because each block has its own scale.
        """
        if role.is_gradient:
            element = self.fp8_format.backward
            dim = self.grad_block_scaling_dim
        elif role.tensor_type == "weight":
            element = self.fp8_format.forward
            dim = self.w_block_scaling_dim
        else:
            element = self.fp8_format.forward
            dim = self.x_block_scaling_dim
        return Float8BlockQuantizer(
            element.torch_dtype,
            amax_epsilon=self.amax_epsilon,
            force_pow_2_scales=self.force_pow_2_scales,
            block_scaling_dim=dim,
        )

    def fake_quantizer(self, fp8_format: str) -> Float8BlockQuantizer | None:
        element = _FAKE_QUANT_FORMATS.get(fp8_format)
        if element is None:
            return None
        return Float8BlockQuantizer(
            element.torch_dtype,
            columnwise=False,
            amax_epsilon=self.amax_epsilon,
            force_pow_2_scales=self.force_pow_2_scales,
            block_scaling_dim=self.x_block_scaling_dim,
        )
