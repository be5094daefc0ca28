"""Checks of linear layers against high precision."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import torch

import ottava
from ottava.nn import Linear
from ottava_testing import table
from ottava_testing.compare import close, normal, plain, require
from ottava_testing.subject import Subject
from ottava_testing.table import DETERMINISTIC, QUANTIZED_WEIGHTS

check = partial(table.check, "layers")


def passes(
    layer: Linear, x: torch.Tensor, dy: torch.Tensor, count: int = 1
) -> dict[str, torch.Tensor]:
    """The output and the gradients of the last of some passes, by their names in messages.

    Each pass is a forward and a backward one; ``x`` is ``[*, columns]`` and ``dy`` ``[*, rows]``.
    """
    for _ in range(count):
        layer.zero_grad()
        x = x.detach().clone().requires_grad_()
        y = layer(x)
        y.backward(dy)
    results = {"the output": y.detach(), "the gradient of the input": x.grad}
    results |= {f"the gradient of the {name}": p.grad for name, p in layer.named_parameters()}
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def reference(layer: Linear, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same in float64, computed from the values that the weight was made of."""
    initial = getattr(layer.weight, "_high_precision_init_val", None)
    w = plain(layer.weight if initial is None else initial).double()
    x64, dy64 = x.double(), dy.double()
    rows, grads = x64.reshape(-1, x.shape[-1]), dy64.reshape(-1, dy.shape[-1])
    results = {
        "the output": x64 @ w.t(),
        "the gradient of the input": dy64 @ w,
        "the gradient of the weight": grads.t() @ rows,
    }
    if layer.bias is not None:
        results["the output"] = results["the output"] + layer.bias.detach().double()
        results["the gradient of the bias"] = grads.sum(0)
    return results


def _compare(
    subject: Subject, layer: Linear, x: torch.Tensor, dy: torch.Tensor, case: str, bound: float
) -> None:
    # After a few steps the scales of a stateful recipe, which come from past values, fit these.
    actual = passes(layer, x, dy, count=4 if subject.spec.stateful else 1)
    for name, value in reference(layer, x, dy).items():
        require(name in actual, f"{name} is missing, {case}")
        close(f"{name}, {case},", actual[name], value, max(bound, 0.01))


@check()
def linear(subject: Subject) -> None:
    """Output and gradients of a linear layer are within relative_error of high precision."""
    for dtype in (torch.float32, torch.bfloat16):
        for bias, leading in ((True, (64,)), (False, (2, 4, 16))):
            layer = subject.layer(96, 80, dtype=dtype, bias=bias)
            x = normal(*leading, 96, seed=1, dtype=dtype)
            dy = normal(*leading, 80, seed=2, dtype=dtype)
            case = f"{dtype}, bias={bias}, input {tuple(x.shape)}"
            _compare(subject, layer, x, dy, case, subject.bound)


@check(QUANTIZED_WEIGHTS)
def linear_with_quantized_weight(subject: Subject) -> None:
    """The same holds with a weight that is kept quantized."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = subject.layer(96, 80, dtype=dtype, primary=True)
        x, dy = normal(64, 96, seed=1, dtype=dtype), normal(64, 80, seed=2, dtype=dtype)
        case = f"{dtype}, with a weight that is kept quantized"
        _compare(subject, layer, x, dy, case, subject.bound)
        initial = getattr(layer.weight, "_high_precision_init_val", None)
        words = "quantized_model_init does not keep the values that the weight was made of"
        require(initial is not None, words)


@check()
def linear_shapes(subject: Subject) -> None:
    """A linear layer takes any sizes, ragged and empty ones, forward and backward."""
    for columns, rows, leading in (
        (33, 65, (7,)),
        (1, 1, (1,)),
        (40, 17, (2, 3)),
        (5, 3, ()),
        (40, 16, (0,)),
        (8, 8, (2, 0)),
    ):
        layer = subject.layer(columns, rows)
        x, dy = normal(*leading, columns, seed=1) + 1, normal(*leading, rows, seed=2) + 1
        case = f"of a layer from {columns} to {rows} for an input of shape {tuple(x.shape)}"
        _compare(subject, layer, x, dy, case, min(0.6, 4 * subject.bound))


@check()
def frozen_parts(subject: Subject) -> None:
    """What requires no gradient gets none, and the other gradients are as ever."""
    x, dy = normal(24, 40, seed=1), normal(24, 48, seed=2)
    frozen, first = subject.layer(40, 48), subject.layer(40, 48)
    frozen.weight.requires_grad_(False)
    full = passes(subject.layer(40, 48), x, dy)
    other = passes(frozen, x, dy)
    require("the gradient of the weight" not in other, "a frozen weight gets a gradient")
    first(x).backward(dy)
    with torch.no_grad():
        y = subject.layer(40, 48)(x)
    require(not y.requires_grad, "the output under no_grad requires a gradient")
    for title, actual, name in (
        ("with a frozen weight,", other.get("the gradient of the input"), "input"),
        ("with an input that needs none,", first.weight.grad, "weight"),
    ):
        name = f"the gradient of the {name}"
        require(actual is not None, f"{name}, {title} is missing")
        subject.agree(f"{name}, {title}", actual, full[name])
    subject.agree("the output under no_grad", y, full["the output"])


def _model_with(name: str, layer: torch.nn.Module) -> torch.nn.Module:
    """A model that calls ``layer``, which has the qualified ``name`` in it."""
    for part in reversed(name.split(".")):
        layer = torch.nn.Sequential(OrderedDict({part: layer}))
    return layer


@check()
def convert_and_autocast(subject: Subject) -> None:
    """convert() and autocast() give the same layer as one that is bound to the recipe."""
    x = normal(24, 40, seed=1)
    bound = subject.layer(40, 48)
    values = {
        name: value for name, value in bound.state_dict().items() if "recipe_state" not in name
    }
    linear, alone = torch.nn.Linear(40, 48), Linear(40, 48, name=bound.name)
    for layer in (linear, alone):
        layer.load_state_dict(values)
    model = ottava.convert(_model_with(bound.name, linear), subject.recipe())
    expected = bound(x)
    with ottava.autocast(subject.recipe()):
        inside = alone(x)
    with ottava.autocast(enabled=False):
        outside = bound(x)
    high = torch.nn.functional.linear(x, plain(bound.weight), plain(bound.bias))
    subject.agree("the output of a converted layer", model(x), expected)
    subject.agree("the output of a layer inside autocast", inside, expected)
    close("the output inside autocast(enabled=False)", outside, high, 1e-5)


@check()
def kept_weight(subject: Subject) -> None:
    """A weight quantized for the first microbatch serves those after it."""
    layer, other = subject.layer(40, 48), subject.layer(40, 48)
    x, dy = normal(24, 40, seed=1), normal(24, 48, seed=2)
    # All calls belong to one step, because a kept weight is used only in its own step.
    with ottava.autocast(subject.recipe()):
        first = layer(x, is_first_microbatch=True)
        second = layer(x, is_first_microbatch=False)
        expected = other(x)
    second.backward(dy)
    expected.backward(dy)
    pairs: dict[str, tuple[Any, Any]] = {
        "the output of the first microbatch": (first, expected),
        "the output of the second microbatch": (second, expected),
        "the gradient of the weight": (layer.weight.grad, other.weight.grad),
    }
    for name, (actual, value) in pairs.items():
        require(actual is not None, f"{name}, with a weight that is kept, is missing")
        subject.agree(f"{name}, with a weight that is kept,", actual, value)


@check(DETERMINISTIC)
def backward_words(subject: Subject) -> None:
    """With backward="high_precision" or "dequantized", gradients are those of the values."""
    x, dy = normal(24, 40, seed=1), normal(24, 48, seed=2)
    for word in ("high_precision", "dequantized"):
        recipe = copy.copy(subject.recipe())
        if recipe.wgrad_high_precision and word == "dequantized":
            continue
        # The recipe may be a frozen dataclass, or have no such field.
        object.__setattr__(recipe, "backward", word)
        layer = subject.layer(40, 48)
        layer.bind(recipe)
        results = passes(layer, x, dy)
        operands = {"input": x, "weight": plain(layer.weight).detach()}
        if word == "dequantized":
            operands = {name: _as_fprop_reads(layer, name, operands[name]) for name in operands}
        for name, value in (
            ("input", dy.double() @ operands["weight"].double()),
            ("weight", dy.double().t() @ operands["input"].double()),
        ):
            title = f"the gradient of the {name}, with backward={word!r},"
            close(title, results[f"the gradient of the {name}"], value, 1e-5)


def _as_fprop_reads(layer: Linear, role: str, values: torch.Tensor) -> torch.Tensor:
    """The values of an operand that the forward pass multiplied, by the scales of its step."""
    state = layer._binding.state
    assert state is not None
    quantizer = state.quantizer(role, rowwise=True, columnwise=False, recording=False)
    dequantized: torch.Tensor = quantizer.quantize(values).dequantize()
    return dequantized
