"""The state that a layer keeps for a recipe: the recipe's own, or the states of several."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

import torch

from ottava.collectives import Group
from ottava.errors import UsageError
from ottava.recipes.backward import ALL_QUANTIZED
from ottava.recipes.base import QuantizerRequest, Recipe
from ottava.recipes.role import QuantizerRole
from ottava.recipes.state import RecipeOfState, RecipeState, by_recipe
from ottava.tensors.quantizer import Quantizer
from ottava.torch_private import is_exporting, refuse_export


def layer_state(
    recipe: Recipe, roles: Sequence[QuantizerRole], amax_reduction_group: Group = None
) -> RecipeState:
    """The state that a layer keeps for ``recipe``: the recipe's own, or a mixed one where a factory
    asks for the states of other recipes."""
    servers = [(_server_of(recipe, role), role) for role in roles]
    parts: list[tuple[Sequence[QuantizerRole], RecipeState]] = []
    if any(server is not recipe for server, _ in servers):
        for server, roles_of_server in by_recipe(servers):
            make = _own_state if server is recipe else layer_state
            parts.append((roles_of_server, make(server, roles_of_server, amax_reduction_group)))
    state: RecipeState
    if any(part.stateful for _, part in parts):
        state = MixedState(recipe, parts, amax_reduction_group)
    else:
        # Quantizers without state need no parts: they are the recipe's own.
        state = _own_state(recipe, roles, amax_reduction_group)
    state.backward_reads = dict(ALL_QUANTIZED)
    for role in roles:
        state.backward_reads |= recipe.backward_reads(role)
    return state


def _server_of(recipe: Recipe, role: QuantizerRole) -> Recipe:
    """The recipe that serves a role: that of the factory's request, if it makes one."""
    answer = recipe.factory_answer(role)
    return answer.recipe if isinstance(answer, QuantizerRequest) else recipe


def _own_state(
    recipe: Recipe, roles: Sequence[QuantizerRole], amax_reduction_group: Group
) -> RecipeState:
    """The recipe's own state. One that keeps values is made under the default dtype float32 and on
    the CPU."""
    if not recipe.stateful:
        return recipe.make_state(roles, amax_reduction_group=amax_reduction_group)
    if torch.compiler.is_compiling():
        _refuse_to_make_state(recipe, roles)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # A state that is first needed in inference mode is trained later.
        with torch.device("cpu"), torch.inference_mode(False):
            state = recipe.make_state(roles, amax_reduction_group=amax_reduction_group)
            state._roles = roles
            return state
    finally:
        torch.set_default_dtype(default)


def _refuse_to_make_state(recipe: Recipe, roles: Sequence[QuantizerRole]) -> None:
    message = (
        f"Linear {roles[0].name!r} has no state for {recipe._label!r} yet, and compiled code "
        f"cannot make one"
    )
    expected = "a layer that was converted, or bound to the recipe, or has run under it once"
    remedy = "call ottava.convert(model, recipe) before torch.compile or torch.export"
    if is_exporting():
        refuse_export(message, expected, remedy)
    raise UsageError(message, expected, remedy)


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
        self.has_fixed_quantizers = all(part.has_fixed_quantizers for part in self.parts())

    def _name_for(self, part: RecipeState) -> str:
        name: str = part.recipe._label.replace(".", "_")
        if not hasattr(self, name):
            return name
        names = (f"{name}_{number}" for number in count(2))
        return next(name for name in names if not hasattr(self, name))

    def parts(self) -> list[RecipeState]:
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

    def opens_evaluation(self) -> bool:
        # All of them open, whatever the first one says.
        opened = [part.opens_evaluation() for part in self.parts()]
        return all(opened)

    def note_evaluation(self, weight: torch.Tensor) -> None:
        for part in self.parts():
            part.note_evaluation(weight)

    def reset(self) -> None:
        for part in self.parts():
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
