"""Checks of gradients of several microbatches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ottava.nn import Linear
from ottava_testing import table
from ottava_testing.checks.layers import reference
from ottava_testing.compare import CheckFailed, about, close, first_line, normal, relative, require
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS

check = partial(table.check, "accumulation")
_BATCHES = 3
_LOST = "gradients are lost under accumulation:"


def _run(subject: Subject, layer: Linear, *, together: bool) -> list[Any]:
    """Run all microbatches in one step, and return the gradients of the inputs."""
    xs = [normal(24, 40, seed=50 + i).requires_grad_() for i in range(_BATCHES)]
    dys = [normal(24, 48, seed=60 + i) for i in range(_BATCHES)]
    # After a few steps the scales of a stateful recipe, which come from past values, fit these.
    for _ in range(3 if subject.spec.stateful else 1):
        layer.zero_grad()
        main_grad: torch.Tensor | None = getattr(layer.weight, "main_grad", None)
        if main_grad is not None:
            main_grad.zero_()
        for x in xs:
            x.grad = None
        ys = (layer(x) for x in xs)
        try:
            for y, dy in zip(list(ys) if together else ys, dys, strict=True):
                y.backward(dy)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise CheckFailed(
                f"{_LOST} what one microbatch saved for its backward pass, another one overwrote "
                f"({first_line(error)[:160]})"
            ) from error
    return [x.grad for x in xs]


def _expected(layer: Linear) -> list[dict[str, torch.Tensor]]:
    return [
        reference(layer, normal(24, 40, seed=50 + i), normal(24, 48, seed=60 + i))
        for i in range(_BATCHES)
    ]


def _sum_of(subject: Subject, title: str, actual: Any, gradients: list[torch.Tensor]) -> None:
    """Compare an accumulated gradient with the sum of the microbatches' gradients.

    If it is that of a single microbatch, the message says which one.
    """
    require(actual is not None, f"{_LOST} {title} is missing after {_BATCHES} backward passes")
    bound = max(subject.bound, 0.01)
    total = sum(gradients[1:], gradients[0])
    title = f"after {_BATCHES} backward passes {title}"
    for gradient, which in ((gradients[-1], "last"), (gradients[0], "first")):
        is_one = relative(actual, total) > bound
        is_one = is_one and relative(actual, gradient) <= max(2 * bound, 0.05)
        require(not is_one, f"{_LOST} {title} is that of the {which}")
    close(f"{title}, which should be the sum of all,", actual, total, bound)


def _accumulates(subject: Subject, *, primary: bool, together: bool, fused: bool = False) -> None:
    layer = subject.layer(40, 48, primary=primary, fuse_wgrad_accumulation=fused)
    weight: Any = layer.weight
    if fused:
        weight.main_grad = torch.zeros(48, 40)
    expected = _expected(layer)
    dxs = _run(subject, layer, together=together)
    actual = {
        "weight": ("weight.main_grad", weight.main_grad)
        if fused
        else ("weight's grad", weight.grad),
        "bias": ("bias's grad", layer.bias.grad),
    }
    for name, (title, grad) in actual.items():
        gradients = [results[f"the gradient of the {name}"] for results in expected]
        _sum_of(subject, f"the {title}", grad, gradients)
    for number, (dx, results) in enumerate(zip(dxs, expected, strict=True), start=1):
        title = f"the gradient of microbatch {number}'s input"
        close(title, dx, results["the gradient of the input"], max(subject.bound, 0.01))


@check()
def gradients_accumulate(subject: Subject) -> None:
    """Backward passes of several microbatches sum their gradients."""
    _accumulates(subject, primary=False, together=False)


@check()
def microbatches_before_backward(subject: Subject) -> None:
    """Several forward passes may come before the first backward pass."""
    with about("with all forward passes before the first backward pass"):
        _accumulates(subject, primary=False, together=True)


@check(QUANTIZED_WEIGHTS)
def quantized_weights_accumulate(subject: Subject) -> None:
    """The same with a weight that is kept quantized."""
    for together in (False, True):
        _accumulates(subject, primary=True, together=together)


@check()
def fused_accumulation(subject: Subject) -> None:
    """With fuse_wgrad_accumulation the weight gradients are added into weight.main_grad."""
    for primary in subject.kinds_of_weights:
        for together in (False, True):
            _accumulates(subject, primary=primary, together=together, fused=True)
