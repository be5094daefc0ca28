"""State dicts without the state of recipes, such as those of models in high precision: the state
starts afresh."""

import copy
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from ottava.errors import listed
from ottava.recipes.state import RecipeState

#: Matches names in a state dict that are of the state of a layer, and splits them into the layer's
#: and the state's.
OF_STATE = re.compile(r"(?:^|(?<=\.))recipe_state\.")


def layers_with_state(names: Iterable[str]) -> set[str]:
    """The prefixes of the layers whose states are in a state dict: ``"0."``, or ``""`` for a lone
    layer."""
    return {OF_STATE.split(name)[0] for name in names if OF_STATE.search(name)}


def fill_in_states(
    module: torch.nn.Module,
    state_dict: dict[str, torch.Tensor],
    prefix: str,
    metadata: Mapping[str, object],
    *others: object,
) -> None:
    """Fill fresh states into a state dict that has the weights of layers and not their states.

    A hook that torch calls before it loads a state dict into a converted model, or a layer. One
    ``UserWarning`` names the layers.

    Args:
        prefix: of the names of the module's tensors in the state dict.
        metadata: of the module; says whether tensors of the dict become the module's.
        others: arguments of the hook that are not needed.
    """
    with_state = layers_with_state(state_dict)
    assigns = bool(metadata.get("assign_to_params_buffers"))
    filled: list[str] = []
    for name, layer in module.named_modules(
        prefix=prefix.removesuffix("."), remove_duplicate=False
    ):
        state = layer._modules.get("recipe_state")
        layer_prefix = f"{name}." if name else ""
        weight = state_dict.get(f"{layer_prefix}weight")
        if not isinstance(state, RecipeState) or weight is None or layer_prefix in with_state:
            continue
        for key, value in _fresh_values(state, assigns, weight).items():
            state_dict[f"{layer_prefix}recipe_state.{key}"] = value
        filled.append(name)
    if filled:
        _warn(filled)


def _fresh_values(
    state: RecipeState, assigns: bool, weight: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The initial values of a state, by name.

    Args:
        assigns: whether the values become the buffers of the state, which may be on meta.
        weight: of the layer; tells the device of such buffers.
    """
    # A copy, because torch changes the state when it loads the dict.
    fresh = copy.deepcopy(state)
    assert isinstance(fresh, torch.nn.Module)
    if assigns and any(buffer.is_meta for buffer in fresh.buffers()):
        fresh.to_empty(device=weight.device)
    fresh.reset()
    return fresh.state_dict()


def _warn(names: Sequence[str]) -> None:
    # Layers that are loaded one by one all have the same text, which Python then shows once.
    layers = "a layer"
    if len(names) > 1:
        layers = f"{len(names)} layers ({listed(names)})"
    warnings.warn(
        f"the state dict has no scaling state for {layers}: there it starts afresh. To keep it, "
        f"save the state dict of the converted model.",
        UserWarning,
        stacklevel=3,
    )
