"""Prepares a model for replays: converts it to the captured recipes, and loads the captured
state."""

import warnings
from functools import partial
from typing import Any

import torch

import ottava
from ottava.errors import CheckpointError, text_of
from ottava.nn.loading import OF_STATE
from ottava.recipes import Recipe
from ottava.recipes.role import OF_LINEAR
from ottava_bisect.bundle import Bundle
from ottava_bisect.recipe_data import build

_SAME = {"expected": "the model that was captured", "remedy": "give the same model"}


def convert_model(model: torch.nn.Module, step: Bundle, recipe: Recipe | None) -> torch.nn.Module:
    """The model with its captured layers converted to the recipe.

    With None the layers keep their own recipes if all have one, and otherwise get the captured
    ones.

    Raises:
        CheckpointError: the model lacks a captured layer.
        UsageError: a captured recipe cannot be built from data.
    """
    modules = dict(model.named_modules())
    if absent := [name for name in step.layers if name not in modules]:
        raise CheckpointError(f"the model has no module {absent[0]!r}", **_SAME)
    linear = (torch.nn.Linear, ottava.nn.Linear)
    for name in step.layers:
        if not isinstance(modules[name], linear):
            raise CheckpointError(
                f"module {name!r} of the model is a {type(modules[name]).__name__}", **_SAME
            )
    recipes = [getattr(modules[name], "recipe", None) for name in step.layers]
    if recipe is None and all(isinstance(own, Recipe) for own in recipes):
        return model
    for number, data in enumerate(step.recipes):
        names = {name for name, own_number in step.layers.items() if own_number == number}
        with warnings.catch_warnings():
            # The user saw the warnings about layers that are not converted before the capture.
            warnings.simplefilter("ignore")
            model = ottava.convert(model, recipe or build(data), include=partial(_is_among, names))
    return model


def _is_among(names: set[str], name: str, module: torch.nn.Module) -> bool:
    return name in names


def restore(model: torch.nn.Module, step: Bundle, state: dict[str, Any]) -> None:
    """Load the captured weights, buffers, scaling state and modes into a model.

    ``state`` is the result of :func:`fitting_state`.

    Raises:
        CheckpointError: the state does not fit the model.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"the model does not fit the step: {text_of(error)}", **_SAME
        ) from error
    buffers = dict(model.named_buffers())
    for name, value in step.buffers.items():
        if name in buffers and buffers[name].shape == value.shape:
            buffers[name].copy_(value)
    training, frozen = set(step.training), set(step.frozen)
    for name, module in model.named_modules():
        module.training = name in training
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
        p.grad = None


def fitting_state(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The captured state with the keys and shapes of the model's own state.

    Scaling state of another recipe is carried over slot by slot.
    """
    own = model.state_dict()
    fitting = {
        name: value for name, value in state.items() if name in own or not OF_STATE.search(name)
    }
    for name, value in own.items():
        captured = fitting.get(name)
        if OF_STATE.search(name) and (captured is None or captured.shape != value.shape):
            fitting[name] = _slots_of(model, name, value, state)
    return fitting


def _slots_of(
    model: torch.nn.Module, name: str, value: torch.Tensor, state: dict[str, Any]
) -> torch.Tensor:
    """A buffer for a state that serves some roles of a layer, from a captured state of all roles.

    The slots of the roles, along the last dimension, are taken from the captured buffer. Where that
    is not possible, the buffer keeps the model's own values.
    """
    layer, _, rest = name.partition(".recipe_state.")
    part, _, buffer = f"recipe_state.{rest}".rpartition(".")
    slots = getattr(model.get_submodule(f"{layer}.{part}"), "slots", None)
    captured = state.get(f"{layer}.recipe_state.{buffer}")
    if not isinstance(slots, dict) or captured is None or captured.shape[-1] != len(OF_LINEAR):
        return value.clone()
    own_slots: torch.Tensor = captured[..., [OF_LINEAR.index(role) for role in slots]]
    return own_slots.to(value)
