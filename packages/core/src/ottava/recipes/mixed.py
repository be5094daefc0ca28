"""``layer_state``: the state of a layer whose roles may be served by several recipes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from ottava.errors import UsageError
from ottava.recipes.base import QuantizerRequest, Recipe
from ottava.recipes.role import QuantizerRole
from ottava.recipes.state import RecipeState, by_recipe
from ottava.tensors.quantizer import Quantizer


def layer_state(recipe: Recipe, roles: Sequence[QuantizerRole], *, amax_reduction_group: Any = None) -> RecipeState:
    """What a layer keeps for ``recipe``: the recipe's own state, unless a factory asks for that of other recipes."""
    given = [(recipe.given(role), role) for role in roles]
    servers = [(answer.recipe if isinstance(answer, QuantizerRequest) else recipe, role) for answer, role in given]
    made = _served_by(servers, recipe, roles, amax_reduction_group)
    of_wgrad = [server for server, role in servers if role.tensor_type != "weight"]
    made.wgrad_high_precision = bool(of_wgrad) and all(server.wgrad_high_precision for server in of_wgrad)
    return made


def _served_by(
    servers: Sequence[tuple[Recipe, QuantizerRole]],
    recipe: Recipe,
    roles: Sequence[QuantizerRole],
    amax_reduction_group: Any,
) -> RecipeState:
    shares = by_recipe(servers)
    if all(server is recipe for server, _ in shares):
        return recipe.make_state(roles, amax_reduction_group=amax_reduction_group)
    parts = []
    for server, together in shares:
        make = recipe.make_state if server is recipe else partial(layer_state, server)
        parts.append((together, make(together, amax_reduction_group=amax_reduction_group)))
    if not any(part.stateful for _, part in parts):
        # Quantizers without state need no parts: they are the recipe's own.
        return recipe.make_state(roles, amax_reduction_group=amax_reduction_group)
    if torch.compiler.is_compiling():
        raise UsageError(
            f"a layer has no state for {recipe.name or type(recipe).__name__!r} yet, and compiled code cannot make one",
            expected="a layer that was converted, or bound to the recipe, or has run under it once",
            remedy="call ottava.convert(model, recipe) before torch.compile",
        )
    return MixedState(recipe, parts, amax_reduction_group=amax_reduction_group)


class MixedState(torch.nn.Module, RecipeState):
    """The states of several recipes that serve one layer, each for some of its roles.

    Those that keep something are submodules, named after their recipes.
    """

    stateful: ClassVar[bool] = True

    def __init__(
        self,
        recipe: Recipe,
        parts: Sequence[tuple[Sequence[QuantizerRole], RecipeState]],
        *,
        amax_reduction_group: Any = None,
    ) -> None:
        super().__init__()
        self.recipe, self.factory = recipe, recipe._factory
        self.amax_reduction_group = amax_reduction_group
        self.names: dict[str, str] = {}
        # Those without state, which no checkpoint sees.
        self.plain: dict[str, RecipeState] = {}
        for roles, part in parts:
            name = self._free_name(part.recipe.name or type(part.recipe).__name__)
            if isinstance(part, torch.nn.Module):
                self.add_module(name, part)
            else:
                self.plain[name] = part
            self.names |= {role.tensor_type: name for role in roles}

    def _free_name(self, name: str) -> str:
        name = name.replace(".", "_")
        number, free = 2, name
        while free in self.plain or hasattr(self, free):
            number, free = number + 1, f"{name}_{number}"
        return free

    def _part(self, tensor_type: str) -> RecipeState:
        name = self.names[tensor_type]
        part: Any = self._modules.get(name)
        return self.plain[name] if part is None else part

    def parts(self) -> list[RecipeState]:
        parts: list[Any] = list(self._modules.values())
        return parts

    def serves(self, recipe: Recipe, amax_reduction_group: Any) -> bool:
        """Whether this is the state for that recipe, and its parts are for that group."""
        everyone = [*self.parts(), *self.plain.values()]
        return self.is_of(recipe) and all(part.serves(part.recipe, amax_reduction_group) for part in everyone)

    def quantizer(self, tensor_type: str, *, rowwise: bool, columnwise: bool, recording: bool = True) -> Quantizer:
        part = self._part(tensor_type)
        return part.quantizer(tensor_type, rowwise=rowwise, columnwise=columnwise, recording=recording)

    def reset(self) -> None:
        for part in self.parts():
            part.reset()

    def weight_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        return self._part("weight").weight_quantizer(weight)

    def gather_quantizer(self) -> Quantizer:
        return self._part("weight").gather_quantizer()

    def use_gathered(self, weight: Any, *, recording: bool) -> None:
        self._part("weight").use_gathered(weight, recording=recording)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.has_run = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"amax_reduction_group": None, "step": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedState:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        kept = {"factory": self.factory, "plain": self.plain}
        copied.__dict__.update(copy.deepcopy({k: v for k, v in self.__getstate__().items() if k not in kept}, memo))
        copied.__dict__.update(kept)
        return copied
