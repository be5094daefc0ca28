"""Checks of state dicts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ottava.tensors import QuantizedTensorStorage
from ottava_testing import table
from ottava_testing.checks.files import reload
from ottava_testing.checks.training import train
from ottava_testing.compare import difference, normal, plain, require, require_same
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, STATEFUL

check = partial(table.check, "state dicts")


@check()
def state_dict(subject: Subject) -> None:
    """A state dict has tensors only, and a model that loads it goes on as the one that gave it."""
    _round_trip(subject, primary=False)


@check(QUANTIZED_WEIGHTS)
def state_dict_of_quantized_weights(subject: Subject) -> None:
    """The same with weights that are kept quantized, whose bytes are loaded."""
    _round_trip(subject, primary=True)


def _round_trip(subject: Subject, *, primary: bool) -> None:
    model, other = subject.model(primary=primary), subject.model(primary=primary, seed=9)
    train(model, 2)
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        words = f"{name!r} of a state dict is a {type(value).__name__}, not a tensor"
        require(isinstance(value, torch.Tensor), words)
    loaded = reload(dict(state), "a state dict")
    lost = sorted(set(state) ^ set(loaded))
    require(not lost, f"a state dict loses {lost} in a file")
    other.load_state_dict(loaded)
    for name, value in other.state_dict().items():
        title = f"{name!r} has other values after load_state_dict(): it has"
        if not isinstance(value, QuantizedTensorStorage):
            require_same(title, value, state[name])
            continue
        error = (plain(value) - plain(state[name])).norm()
        is_near = bool(error <= subject.loose * plain(value).norm())
        require(is_near or difference(value, state[name]) is None, f"{title} another weight")
    x = normal(24, 32, seed=5)
    with torch.no_grad():
        outputs = other(x), model(x)
    subject.agree("the output of a model that loaded a state dict", *outputs, bound=0.5)
    words = "training of a model that loaded a state dict"
    subject.agree(words, train(other), train(model), subject.loose)


@check(STATEFUL)
def state_moves(subject: Subject) -> None:
    """The state of a layer is in its buffers, which move and save with the model."""
    model = subject.model()
    train(model, 2)
    names = [name for name, _ in model.named_buffers() if "recipe_state" in name]
    words = "the spec says stateful=True, and no layer has buffers in its recipe_state"
    require(names, words)
    absent = [name for name in names if name not in model.state_dict()]
    require(not absent, f"the state {absent} is not in the state dict")
    others = [name for name, buffer in model.to("meta").named_buffers() if not buffer.is_meta]
    require(not others, f".to() leaves the state {others} where it was")
