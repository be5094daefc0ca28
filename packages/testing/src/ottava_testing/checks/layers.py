"""Checks of linear layers against high precision."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

import ottava
from ottava.nn import Linear
from ottava_testing.compare import CheckFailed, close, normal, plain, require
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, check

_WARM = 3


def passes(
    layer: Linear, x: torch.Tensor, dy: torch.Tensor, **options: Any
) -> dict[str, torch.Tensor]:
    """The output and the gradients of one forward and backward pass, by their names in messages.

    ``x`` is ``[*, columns]`` and ``dy`` ``[*, rows]``; ``options`` go to the layer's forward.
    """
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x, **options)
    y.backward(dy)
    assert x.grad is not None
    results = {"the output": y.detach(), "the gradient of the input": x.grad}
    results |= {
        f"the gradient of the {name}": p.grad
        for name, p in layer.named_parameters()
        if p.grad is not None
    }
    return results


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


def _compare(subject: Subject, layer: Linear, x: torch.Tensor, dy: torch.Tensor, case: str) -> None:
    # After a few steps the scales of a stateful recipe, which come from past values, fit these.
    for _ in range(_WARM if subject.spec.stateful else 0):
        passes(layer, x, dy)
    actual, expected = passes(layer, x, dy), reference(layer, x, dy)
    for name, value in expected.items():
        require(name in actual, f"{name} is missing, {case}")
        close(f"{name}, {case},", actual[name], value, max(subject.bound, 0.01))


@check(
    "linear",
    "layers",
    "Output and gradients of a linear layer are within relative_error of high precision",
)
def linear(subject: Subject) -> None:
    """float32 and bfloat16, with and without bias, several leading dimensions."""
    for dtype in (torch.float32, torch.bfloat16):
        for bias, leading in ((True, (64,)), (False, (2, 4, 16))):
            layer = subject.layer(96, 80, dtype=dtype, bias=bias)
            x = normal(*leading, 96, seed=1, dtype=dtype)
            dy = normal(*leading, 80, seed=2, dtype=dtype)
            _compare(subject, layer, x, dy, f"{dtype}, bias={bias}, input {tuple(x.shape)}")


@check(
    "linear-with-quantized-weight",
    "layers",
    "The same holds with a weight that is kept quantized",
    QUANTIZED_WEIGHTS,
)
def linear_with_quantized_weight(subject: Subject) -> None:
    """The layer is made under quantized_model_init."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = subject.layer(96, 80, dtype=dtype, primary=True)
        x, dy = normal(64, 96, seed=1, dtype=dtype), normal(64, 80, seed=2, dtype=dtype)
        _compare(subject, layer, x, dy, f"{dtype}, with a weight that is kept quantized")
        initial = getattr(layer.weight, "_high_precision_init_val", None)
        require(
            initial is not None,
            "quantized_model_init does not keep the values that the weight was made of",
        )


@check(
    "linear-shapes",
    "layers",
    "A linear layer takes any sizes, ragged and empty ones, forward and backward",
)
def linear_shapes(subject: Subject) -> None:
    """The caller need not pad anything."""
    bound = min(0.6, 4 * subject.bound)
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
        case = (
            f"of a layer with {columns} columns and {rows} rows for an input of shape "
            f"{tuple(x.shape)}"
        )
        for _ in range(_WARM if subject.spec.stateful else 0):
            passes(layer, x, dy)
        actual, expected = passes(layer, x, dy), reference(layer, x, dy)
        for name, value in expected.items():
            require(
                actual[name].shape == value.shape,
                f"{name} {case} has shape {tuple(actual[name].shape)}",
            )
            close(f"{name} {case}", actual[name], value, bound)


@check(
    "frozen-parts",
    "layers",
    "What requires no gradient gets none, and the other gradients are as ever",
)
def frozen_parts(subject: Subject) -> None:
    """A frozen weight, an input without gradient, and no_grad."""
    x, dy = normal(24, 40, seed=1), normal(24, 48, seed=2)
    full = passes(subject.layer(40, 48), x, dy)
    frozen, first = subject.layer(40, 48), subject.layer(40, 48)
    frozen.weight.requires_grad_(False)
    other = passes(frozen, x, dy)
    require("the gradient of the weight" not in other, "a frozen weight gets a gradient")
    first(x).backward(dy)
    pairs = {
        "the gradient of the input, with a frozen weight,": (
            other["the gradient of the input"],
            full["the gradient of the input"],
        ),
        "the gradient of the weight, with an input that needs none,": (
            first.weight.grad,
            full["the gradient of the weight"],
        ),
    }
    tolerance = 0.0 if subject.spec.deterministic else 2 * subject.bound
    for name, (one, two) in pairs.items():
        if one is None:
            raise CheckFailed(f"{name} is missing")
        close(name, one, two, tolerance)
    with torch.no_grad():
        y = subject.layer(40, 48)(x)
    require(not y.requires_grad, "the output under no_grad requires a gradient")
    close("the output under no_grad", y, full["the output"], tolerance)


@check(
    "convert-and-autocast",
    "layers",
    "convert() and autocast() give the same layer as one that is bound to the recipe",
)
def convert_and_autocast(subject: Subject) -> None:
    """Three ways of giving a layer its recipe; enabled=False means high precision."""
    x = normal(24, 40, seed=1)
    bound = subject.layer(40, 48)
    values = {
        name: value for name, value in bound.state_dict().items() if "recipe_state" not in name
    }
    linear, alone = torch.nn.Linear(40, 48), Linear(40, 48, name=bound.name)
    for layer in (linear, alone):
        layer.load_state_dict(values)
    model = ottava.convert(torch.nn.Sequential(OrderedDict({bound.name: linear})), subject.recipe())
    expected = bound(x)
    with ottava.autocast(subject.recipe()):
        inside = alone(x)
    with ottava.autocast(enabled=False):
        outside = bound(x)
    tolerance = 0.0 if subject.spec.deterministic else 2 * subject.bound
    close("the output of a converted layer", model(x).detach(), expected, tolerance)
    close("the output of a layer inside autocast", inside.detach(), expected, tolerance)
    close("the output inside autocast(enabled=False)", outside.detach(), linear_of(bound, x), 1e-5)


def linear_of(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """The output of a layer computed in high precision."""
    bias = None if layer.bias is None else layer.bias.detach()
    return torch.nn.functional.linear(x, plain(layer.weight), bias)


@check("kept-weight", "layers", "A weight quantized for the first microbatch serves those after it")
def kept_weight(subject: Subject) -> None:
    """The argument is_first_microbatch of a layer."""
    layer, other = subject.layer(40, 48), subject.layer(40, 48)
    x, dy = normal(24, 40, seed=1), normal(24, 48, seed=2)
    # All calls belong to one step, because a kept weight is used only in its own step.
    with ottava.autocast(subject.recipe()):
        first = layer(x, is_first_microbatch=True)
        second = layer(x, is_first_microbatch=False)
        expected = other(x)
    second.backward(dy)
    expected.backward(dy)
    pairs = {
        "the output of the first microbatch": (first, expected),
        "the output of the second microbatch": (second, expected),
        "the gradient of the weight in the second microbatch": (
            layer.weight.grad,
            other.weight.grad,
        ),
    }
    for name, (actual, value) in pairs.items():
        require(
            actual is not None and value is not None,
            f"{name}, with a weight that is kept, is missing",
        )
        assert actual is not None
        assert value is not None
        tolerance = 0.0 if subject.spec.deterministic else 2 * subject.bound
        close(f"{name}, with a weight that is kept,", actual.detach(), value.detach(), tolerance)
