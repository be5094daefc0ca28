"""``layer_state``: the state of a layer whose roles may be served by several recipes."""

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
    """What a layer keeps for ``recipe``: the recipe's own state, unless a factory asks for that of other recipes.

    Raises:
        UsageError: in compiled code, where there is something to keep.
    """
    given = [(recipe.given(role), role) for role in roles]
    servers = [(answer.recipe if isinstance(answer, QuantizerRequest) else recipe, role) for answer, role in given]
    shares = by_recipe(servers)
    parts: list[tuple[Sequence[QuantizerRole], RecipeState]] = []
    if any(server is not recipe for server, _ in shares):
        for server, together in shares:
            make = partial(_own_state if server is recipe else layer_state, server)
            parts.append((together, make(together, amax_reduction_group=amax_reduction_group)))
    # Quantizers without state need no parts: they are the recipe's own.
    mixed = any(part.stateful for _, part in parts)
    if torch.compiler.is_compiling() and (mixed or recipe.stateful):
        name = recipe.name or type(recipe).__name__
        what = f"Linear {roles[0].name!r} has no state for {name!r} yet, and compiled code cannot make one"
        expected = "a layer that was converted, or bound to the recipe, or has run under it once"
        raise UsageError(what, expected=expected, remedy="call ottava.convert(model, recipe) before torch.compile")
    made: RecipeState
    if mixed:
        made = MixedState(recipe, parts, amax_reduction_group=amax_reduction_group)
    else:
        made = _own_state(recipe, roles, amax_reduction_group=amax_reduction_group)
    unquantized = [role.tensor_type for server, role in servers if server.wgrad_high_precision]
    made.wgrad_unquantized = tuple(name for name in unquantized if name != "weight")
    return made


def _own_state(recipe: Recipe, roles: Sequence[QuantizerRole], *, amax_reduction_group: Any) -> RecipeState:
    """The recipe's own state, made under the default dtype float32 and on the CPU if it keeps values."""
    if not recipe.stateful:
        return recipe.make_state(roles, amax_reduction_group=amax_reduction_group)
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
        # By the tensor type. Those without state no checkpoint sees.
        self.serving: dict[str, RecipeState] = {}
        taken: set[str] = set()
        for roles, part in parts:
            name = free = (part.recipe.name or type(part.recipe).__name__).replace(".", "_")
            number = 2
            while free in taken or hasattr(self, free):
                number, free = number + 1, f"{name}_{number}"
            taken.add(free)
            if isinstance(part, torch.nn.Module):
                self.add_module(free, part)
            self.serving |= {role.tensor_type: part for role in roles}

    def parts(self) -> list[RecipeState]:
        parts: list[Any] = list(self._modules.values())
        return parts

    def serves(self, recipe: Any, amax_reduction_group: Any) -> bool:
        """Whether this is the state for that recipe, and its parts are for that group."""
        of_group = all(part.serves(part.recipe, amax_reduction_group) for part in self.serving.values())
        return of_group and self.is_of(recipe)

    def quantizer(self, tensor_type: str, *, rowwise: bool, columnwise: bool, recording: bool = True) -> Quantizer:
        part = self.serving[tensor_type]
        return part.quantizer(tensor_type, rowwise=rowwise, columnwise=columnwise, recording=recording)

    def reset(self) -> None:
        for part in self.parts():
            part.reset()

    def weight_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        return self.serving["weight"].weight_quantizer(weight)

    def gather_quantizer(self) -> Quantizer:
        return self.serving["weight"].gather_quantizer()

    def use_gathered(self, weight: Any, *, recording: bool) -> None:
        self.serving["weight"].use_gathered(weight, recording=recording)

    def __getstate__(self) -> dict[str, Any]:
        # Not that of a module, which would keep the process group.
        return RecipeState.__getstate__(self)
