"""The state that a layer keeps for a recipe."""

from collections.abc import Sequence

import torch

from ottava.collectives import Group
from ottava.errors import UsageError
from ottava.recipes.backward import ALL_QUANTIZED
from ottava.recipes.base import QuantizerRequest, Recipe
from ottava.recipes.counting import ScheduledState
from ottava.recipes.mixed import MixedState
from ottava.recipes.role import QuantizerRole
from ottava.recipes.schedule import schedule_of
from ottava.recipes.state import RecipeState, by_recipe
from ottava.torch_private import is_exporting, refuse_export


def layer_state(
    recipe: Recipe, roles: Sequence[QuantizerRole], amax_reduction_group: Group = None
) -> RecipeState:
    """The state that a layer keeps for ``recipe``: the recipe's own, or a mixed one where a factory
    asks for the states of other recipes. A recipe with a schedule has one around it, which counts
    the steps.

    Raises:
        OptionError: options of the recipe contradict each other.
        UsageError: the state keeps values, and this is being compiled.
    """
    schedule = schedule_of(recipe)
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
    if schedule is not None:
        if torch.compiler.is_compiling():
            _refuse_to_make_state(recipe, roles)
        state = ScheduledState(recipe, roles, state, schedule, amax_reduction_group)
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
