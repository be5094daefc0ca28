"""What a layer keeps for a recipe: the recipe's own state, or the states of several."""

from collections.abc import Sequence
from itertools import chain, count
from typing import Any, ClassVar

import torch

from ottava.errors import UsageError
from ottava.recipes.base import QuantizerRequest, Recipe
from ottava.recipes.role import QuantizerRole
from ottava.recipes.state import RecipeState, by_recipe
from ottava.tensors.quantizer import Quantizer
from ottava.torch_private import is_exporting, refuse_export


def layer_state(
    recipe: Recipe, roles: Sequence[QuantizerRole], amax_reduction_group: Any = None
) -> RecipeState:
    """What a layer keeps for ``recipe``: the recipe's own state, unless a factory asks for that of
    other recipes."""
    given = [(recipe.given(role), role) for role in roles]
    servers = [
        (answer.recipe if isinstance(answer, QuantizerRequest) else recipe, role)
        for answer, role in given
    ]
    parts: list[tuple[Sequence[QuantizerRole], RecipeState]] = []
    if any(server is not recipe for server, _ in servers):
        for server, together in by_recipe(servers):
            make = _own_state if server is recipe else layer_state
            parts.append((together, make(server, together, amax_reduction_group)))
    # Quantizers without state need no parts: they are the recipe's own.
    mixed = any(part.stateful for _, part in parts)
    made = (
        MixedState(recipe, parts, amax_reduction_group)
        if mixed
        else _own_state(recipe, roles, amax_reduction_group)
    )
    unquantized = [role.tensor_type for server, role in servers if server.wgrad_high_precision]
    made.wgrad_unquantized = tuple(name for name in unquantized if name != "weight")
    return made


def _own_state(
    recipe: Recipe, roles: Sequence[QuantizerRole], amax_reduction_group: Any
) -> RecipeState:
    """The recipe's own state, made under the default dtype float32 and on the CPU if it keeps
    values."""
    if not recipe.stateful:
        return recipe.make_state(roles, amax_reduction_group=amax_reduction_group)
    if torch.compiler.is_compiling():
        what = (
            f"Linear {roles[0].name!r} has no state for {recipe._label!r} yet, and compiled "
            f"code cannot make one"
        )
        expected = "a layer that was converted, or bound to the recipe, or has run under it once"
        remedy = "call ottava.convert(model, recipe) before torch.compile or torch.export"
        if is_exporting():
            refuse_export(what, expected, remedy)
        raise UsageError(what, expected, remedy)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            made = recipe.make_state(roles, amax_reduction_group=amax_reduction_group)
            made._roles = roles
            return made
    finally:
        torch.set_default_dtype(default)


class MixedState(torch.nn.Module, RecipeState):
    """The states of several recipes that serve one layer, each for some of its roles. Those that
    keep something are submodules, named after their recipes."""

    stateful: ClassVar[bool] = True
    __getstate__ = RecipeState.__getstate__  # that of a module would keep the process group

    def __init__(self, recipe: Recipe, parts: Any, amax_reduction_group: Any = None) -> None:
        super().__init__()
        self.recipe, self.factory, self.amax_reduction_group = (
            recipe,
            recipe._factory,
            amax_reduction_group,
        )
        # By the tensor type. Those without state no checkpoint sees.
        self.serving: dict[str, RecipeState] = {}
        for roles, part in parts:
            self.serving |= {role.tensor_type: part for role in roles}
            name = part.recipe._label.replace(".", "_")
            names = chain([name], (f"{name}_{number}" for number in count(2)))
            if isinstance(part, torch.nn.Module):
                self.add_module(next(name for name in names if not hasattr(self, name)), part)
        self.keeps_quantizers = all(part.keeps_quantizers for part in self.serving.values())

    def parts(self) -> list[Any]:
        return list(self._modules.values())

    def serves(self, recipe: Any, amax_reduction_group: Any) -> bool:
        """Whether this is the state for that recipe, and its parts are for that group."""
        of_group = all(
            part.serves(part.recipe, amax_reduction_group) for part in self.serving.values()
        )
        return of_group and self.is_of(recipe)

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

    def note_evaluation(self, weight: Any) -> None:
        for part in self.parts():
            part.note_evaluation(weight)

    def reset(self) -> None:
        for part in self.parts():
            part.reset()

    def weight_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        return self.serving["weight"].weight_quantizer(weight)

    def expect_weight(self, state_dict: Any, prefix: str) -> None:
        serving = self.serving["weight"]
        for name, part in self.named_children():
            if isinstance(part, RecipeState) and part is serving:
                part.expect_weight(state_dict, f"{prefix}{name}.")

    def gather_quantizer(self) -> Quantizer:
        return self.serving["weight"].gather_quantizer()

    def use_gathered(self, weight: Any, *, recording: bool) -> None:
        self.serving["weight"].use_gathered(weight, recording=recording)
