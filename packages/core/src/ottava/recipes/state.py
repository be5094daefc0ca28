"""``RecipeState``: what a layer keeps for the recipe that it runs under."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ottava.recipes.role import QuantizerRole

if TYPE_CHECKING:
    from ottava.recipes.base import Recipe
    from ottava.tensors import Quantizer

_USAGES = ((True, False), (False, True), (True, True))


class RecipeState:
    """The quantizers of one layer, one for each role and combination of usages.

    They are made beforehand, so that a forward pass only looks them up and never changes one: a compiled graph then
    has nothing to mutate. A stateful recipe derives from this and from ``torch.nn.Module``, with its state in buffers.
    """

    def __init__(self, recipe: Recipe, roles: Sequence[QuantizerRole], *, amax_reduction_group: Any = None) -> None:
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group
        self.quantizers: dict[tuple[str, bool, bool], Quantizer] = {}
        for role in roles:
            quantizer = recipe.quantizer(role, amax_reduction_group=amax_reduction_group)
            for rowwise, columnwise in _USAGES:
                variant = quantizer.copy()
                variant.set_usage(rowwise=rowwise, columnwise=columnwise)
                variant.internal = True
                self.quantizers[role.tensor_type, rowwise, columnwise] = variant

    def quantizer(self, tensor_type: str, *, rowwise: bool, columnwise: bool) -> Quantizer:
        """The quantizer of ``tensor_type`` with these usages."""
        return self.quantizers[tensor_type, rowwise, columnwise]

    def __getstate__(self) -> dict[str, Any]:
        # A process group belongs to its process.
        return self.__dict__ | {"amax_reduction_group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> RecipeState:
        # A process group cannot be copied, and quantizers without state need not be.
        return self
