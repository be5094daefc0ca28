"""State dicts without the state of recipes, such as those of models in high precision: the state
starts afresh."""

import copy
import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ottava.errors import listed
from ottava.recipes.state import RecipeState

#: Matches names in a state dict that are of the state of a layer, and splits them into the layer's
#: and the state's.
OF_STATE = re.compile(r"(?:^|(?<=\.))recipe_state\.")


def layers_with_state(names: Iterable[str]) -> set[str]:
    """What the names of each layer whose state is in a state dict begin with: ``"0."``, or ``""``
    for a lone layer."""
    return {OF_STATE.split(name)[0] for name in names if OF_STATE.search(name)}


def fill_in_states(
    module: torch.nn.Module, state_dict: Any, prefix: str, metadata: Any, *_: Any
) -> None:
    """A hook of torch, called before a state dict is loaded into a converted model, or a layer. A
    layer whose weight is in the dict, and whose state is not, gets a fresh one with the rest, and
    one warning says so."""
    present, filled = layers_with_state(state_dict), []
    for name, layer in module.named_modules(
        prefix=prefix.removesuffix("."), remove_duplicate=False
    ):
        state: Any = layer._modules.get("recipe_state")
        own = f"{name}." if name else ""
        weight = state_dict.get(f"{own}weight")
        if not isinstance(state, RecipeState) or weight is None or own in present:
            continue
        # A copy, because what a module loads is for torch to change, and not before the whole dict
        # was looked at.
        fresh: Any = copy.deepcopy(state)
        if metadata.get("assign_to_params_buffers") and any(
            buffer.is_meta for buffer in fresh.buffers()
        ):
            fresh.to_empty(device=weight.device)
        fresh.reset()
        state_dict.update(
            {f"{own}recipe_state.{key}": value for key, value in fresh.state_dict().items()}
        )
        filled.append(name)
    if filled:
        # Layers that are loaded one by one all say the same, which Python then shows once.
        layers = f"{len(filled)} layers ({listed(filled)})" if len(filled) > 1 else "a layer"
        what = f"the state dict has no scaling state for {layers}: there it starts afresh"
        warnings.warn(
            f"{what}. To keep it, save the state dict of the converted model.",
            UserWarning,
            stacklevel=2,
        )
