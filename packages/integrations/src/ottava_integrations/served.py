"""``served``: a recipe whose forward pass computes with the bytes that an export will hold.

The weight is quantized as the format stores it, the input as servers of the format quantize it. The
backward pass is that of another recipe, through the rounding as if it were not there.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ottava.errors import OptionError
from ottava.recipes import QuantizerRole, Recipe
from ottava.recipes.backward import QUANTIZED
from ottava.recipes.base import as_recipe
from ottava.tensors import Quantizer
from ottava_custom import HybridQuantizer, IdentityQuantizer
from ottava_integrations.formats import Scheme, scheme_of


@dataclass(frozen=True)
class ServedRecipe(Recipe):
    """The forward pass of a published format, and the backward pass of a recipe.

    fprop multiplies rows of the input and of the weight. With ``backward="quantized"`` dgrad and
    wgrad read columns that the other recipe quantizes; otherwise they read what ``backward`` says,
    as :attr:`ottava.recipes.Recipe.backward` describes, and nothing is quantized twice.

    Attributes:
        format: a format of :data:`ottava_integrations.formats.FORMATS`.
        grain: ``"tensor"``, ``"channel"``, ``"block"`` or ``"group"``, where the format has
            several; None for its default.
        activations: what has one scale in inputs: the ``"tensor"``, a ``"token"``, a ``"block"`` of
            128 elements, or a ``"group"``, as in the weight; ``"none"`` for inputs in high
            precision. None: as servers of the format quantize them by default.
        training: the recipe of the backward pass, or the name of one. None: ``backward`` is
            ``"dequantized"``, so that gradients are those of the served weight and input.
        backward: the value of ``training``.

    Raises:
        OptionError: there is no such format or grain; or ``training`` keeps state.
        RecipeNotFoundError: the package of a recipe is not installed.
    """

    name: ClassVar[str] = "served"

    format: str
    grain: str | None = None
    activations: str | None = None
    training: Recipe | str | None = None
    backward: str = field(init=False, default=QUANTIZED)
    wgrad_high_precision: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        scheme = scheme_of(self.format, self.grain)
        activations = scheme.activations if self.activations is None else self.activations
        if activations != "none":
            # Words and recipes that are not there are refused now.
            scheme.input_choice(activations).make()
        scheme.exports_as.make()
        training = self.training
        if training is None:
            training = scheme.loads_as.make(backward="dequantized")
        training = as_recipe(training)
        if training.stateful:
            raise OptionError(
                f"recipe {training._label!r}, which keeps state, for the backward pass",
                expected="a recipe without state",
                remedy="take 'current' in its place",
            )
        fields = {
            "grain": scheme.grain,
            "activations": activations,
            "training": training,
            "backward": training.backward,
            "wgrad_high_precision": training.wgrad_high_precision,
        }
        for attribute, value in fields.items():
            object.__setattr__(self, attribute, value)
        super().__post_init__()

    def holds(self, name: str, module: torch.nn.Module) -> bool:
        """Whether blocks of the format divide the weight of a linear module.

        A filter for :func:`ottava.convert`: ``include=recipe.holds``. Others stay in high precision
        in the files, and so they have to be trained.
        """
        weight = getattr(module, "weight", None)
        if not isinstance(module, torch.nn.Linear) or weight is None:
            return False
        return self.scheme.divides((weight.shape[0], weight.shape[1]))

    def check_rows_suffice(self) -> None:
        """Refuse a backward pass that reads columns of a weight that has rows alone.

        Raises:
            OptionError: ``backward`` is ``"quantized"``.
        """
        if self.backward == QUANTIZED:
            raise OptionError(
                f"recipe {self._training._label!r} for the backward pass reads columns of the "
                "weight, of which a published file has rows",
                expected="backward='dequantized' or backward='high_precision'",
                remedy="pass ottava.get_recipe(name, backward='dequantized')",
            )

    @property
    def _training(self) -> Recipe:
        """The recipe of the backward pass, which is known once the fields are checked."""
        assert isinstance(self.training, Recipe)
        return self.training

    @property
    def scheme(self) -> Scheme:
        """The scheme of the weights."""
        return scheme_of(self.format, self.grain)

    def make_quantizer(self, role: QuantizerRole, *, amax_reduction_group: Any = None) -> Quantizer:
        """The quantizer of the format for the rows of a weight or an input; the other recipe's for
        columns and gradients."""
        backward = self._training.quantizer(role, amax_reduction_group=amax_reduction_group)
        if role.tensor_type not in ("weight", "input"):
            return backward
        forward = self._forward(role)
        if self.backward != QUANTIZED or self._is_one(forward, backward):
            return forward
        return HybridQuantizer(forward, backward)

    def _forward(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type == "weight":
            return self.scheme.exports_as.make().quantizer(role)
        if self.activations in (None, "none"):
            return IdentityQuantizer()
        return self.scheme.input_choice(self.activations).make().quantizer(role)

    @staticmethod
    def _is_one(forward: Quantizer, backward: Quantizer) -> bool:
        """Whether one quantizer gives the rows of the one and the columns of the other."""
        return type(forward) is type(backward) and forward.contract == backward.contract
