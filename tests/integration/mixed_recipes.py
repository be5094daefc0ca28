"""Recipes that other recipes are mixed into."""

from __future__ import annotations

import ottava


def delayed_inputs(name: str = "current") -> ottava.Recipe:
    """A recipe without a state, whose inputs a factory gives to delayed scaling: the state of that
    is a part of the layer's."""
    recipe = ottava.get_recipe(name)
    request = ottava.QuantizerRequest(ottava.get_recipe("delayed", amax_history_len=4))
    recipe.set_quantizer_factory(lambda role: request if role.tensor_type == "input" else None)
    return recipe
