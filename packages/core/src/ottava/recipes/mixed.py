"""The state of a layer that several recipes serve."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

import torch

from ottava.collectives import Group
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava.recipes.state import RecipeOfState, RecipeState
from ottava.tensors.quantizer import Quantizer


class MixedState(torch.nn.Module, RecipeState):
    """The states of several recipes that serve one layer, each for some of its roles.

    The stateful ones are submodules, named after their recipes.
    """

    stateful: ClassVar[bool] = True
    __getstate__ = RecipeState.__getstate__  # that of a module would keep the process group

    def __init__(
        self,
        recipe: Recipe,
        parts: Sequence[tuple[Sequence[QuantizerRole], RecipeState]],
        amax_reduction_group: Group = None,
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.factory = recipe._factory
        self.amax_reduction_group = amax_reduction_group
        # By the tensor type. No checkpoint sees those without state.
        self.serving: dict[str, RecipeState] = {}
        for roles, part in parts:
            self.serving |= {role.tensor_type: part for role in roles}
            if isinstance(part, torch.nn.Module):
                self.add_module(self._name_for(part), part)
        self.has_fixed_quantizers = all(
            part.has_fixed_quantizers for part in self._stateful_parts()
        )
        self.has_schedule = any(part.has_schedule for part in self.serving.values())

    def _name_for(self, part: RecipeState) -> str:
        name: str = part.recipe._label.replace(".", "_")
        if not hasattr(self, name):
            return name
        names = (f"{name}_{number}" for number in count(2))
        return next(name for name in names if not hasattr(self, name))

    def parts(self) -> list[RecipeState]:
        # A recipe that is asked for may ask for others, so that a part may consist of several.
        return [inner for part in self._stateful_parts() for inner in part.parts()]

    def _stateful_parts(self) -> list[RecipeState]:
        """The states of the recipes that have one."""
        # Any, because torch knows them as modules.
        submodules: dict[str, Any] = self._modules
        return list(submodules.values())

    def serves(self, recipe: RecipeOfState, amax_reduction_group: Group) -> bool:
        """Whether this is the state for that recipe, and its parts are for that group."""
        for part in self.serving.values():
            if not part.serves(part.recipe, amax_reduction_group):
                return False
        return self.is_of(recipe)

    def quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool, recording: bool = True
    ) -> Quantizer:
        part = self.serving[tensor_type]
        return part.quantizer(
            tensor_type, rowwise=rowwise, columnwise=columnwise, recording=recording
        )

    def evaluation_quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool
    ) -> Quantizer:
        part = self.serving[tensor_type]
        return part.evaluation_quantizer(tensor_type, rowwise=rowwise, columnwise=columnwise)

    def is_high_precision_step(self) -> bool:
        # One recipe's decision serves the layer, which has one product for its operands.
        return any(part.is_high_precision_step() for part in self.serving.values())

    def opens_evaluation(self) -> bool:
        # All of them open, whatever the first one says.
        opened = [part.opens_evaluation() for part in self._stateful_parts()]
        return all(opened)

    def note_evaluation(self, weight: torch.Tensor) -> None:
        for part in self._stateful_parts():
            part.note_evaluation(weight)

    def reset(self) -> None:
        for part in self._stateful_parts():
            part.reset()

    def weight_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        return self.serving["weight"].weight_quantizer(weight)

    def first_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        return self.serving["weight"].first_quantizer(weight)

    def expect_weight(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        serving = self.serving["weight"]
        for name, part in self.named_children():
            if isinstance(part, RecipeState) and part is serving:
                part.expect_weight(state_dict, f"{prefix}{name}.")

    def gather_quantizer(self) -> Quantizer:
        return self.serving["weight"].gather_quantizer()

    def use_gathered(self, weight: torch.Tensor, *, recording: bool) -> None:
        self.serving["weight"].use_gathered(weight, recording=recording)
