"""Checks of state dicts."""

from __future__ import annotations

from typing import Any

import torch

from ottava.tensors import QuantizedTensorStorage
from ottava_testing.checks.files import reload
from ottava_testing.checks.training import equal, train
from ottava_testing.compare import difference, normal, plain, require, require_same
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, STATEFUL, check


@check(
    "state-dict",
    "state dicts",
    "A state dict has tensors only, and a model that loads it goes on as the one that gave it",
)
def state_dict(subject: Subject) -> None:
    """A state dict is saved during training, and loaded with weights_only=True."""
    _round_trip(subject, primary=False)


@check(
    "state-dict-of-quantized-weights",
    "state dicts",
    "The same with weights that are kept quantized, whose bytes are loaded",
    QUANTIZED_WEIGHTS,
)
def state_dict_of_quantized_weights(subject: Subject) -> None:
    """load_state_dict copies data where it can."""
    _round_trip(subject, primary=True)


def _round_trip(subject: Subject, *, primary: bool) -> None:
    model, other = subject.model(primary=primary), subject.model(primary=primary, seed=9)
    train(model, 2)
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        require(
            isinstance(value, torch.Tensor),
            f"{name!r} of a state dict is a {type(value).__name__}, not a tensor",
        )
    loaded = reload(dict(state), "a state dict")
    require(
        set(loaded) == set(state),
        f"a state dict loses {sorted(set(state) ^ set(loaded))} in a file",
    )
    other.load_state_dict(loaded)
    for name, value in other.state_dict().items():
        if isinstance(value, QuantizedTensorStorage):
            is_same = difference(value, state[name]) is None
            error = (plain(value) - plain(state[name])).norm()
            is_near = bool(error <= min(0.5, 4 * subject.bound) * plain(value).norm())
            require(is_same or is_near, f"{name!r} has other values after load_state_dict()")
        else:
            require_same(
                f"{name!r} has other values after load_state_dict()", [value], [state[name]]
            )
    x = normal(24, 32, seed=5)
    with torch.no_grad():
        one, two = model(x), other(x)
    if subject.spec.deterministic:
        require_same(
            "a model that loaded a state dict computes otherwise than the one that gave it",
            [two],
            [one],
        )
    equal(
        subject,
        "a model that loaded a state dict trains otherwise than the one that gave it",
        train(other),
        train(model),
    )


@check(
    "state-moves",
    "state dicts",
    "The state of a layer is in its buffers, which move and save with the model",
    STATEFUL,
)
def state_moves(subject: Subject) -> None:
    """state_dict() has the state, and .to() moves it."""
    layer = subject.model()
    train(layer, 2)
    names = [name for name, _ in layer.named_buffers() if "recipe_state" in name]
    require(
        bool(names), "the spec says stateful=True, and no layer has buffers in its recipe_state"
    )
    absent = [name for name in names if name not in layer.state_dict()]
    require(not absent, f"the state {absent} is not in the state dict")
    on_meta = layer.to("meta")
    others = [name for name, buffer in on_meta.named_buffers() if not buffer.is_meta]
    require(not others, f".to() leaves the state {others} where it was")
