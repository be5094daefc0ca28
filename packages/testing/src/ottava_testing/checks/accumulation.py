"""Checks of gradients of several microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ottava.nn import Linear
from ottava_testing.checks.layers import reference
from ottava_testing.compare import CheckFailed, close, normal, relative, require
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, check

_BATCHES = 3


def _data() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    xs = [normal(24, 40, seed=50 + i) for i in range(_BATCHES)]
    return xs, [normal(24, 48, seed=60 + i) for i in range(_BATCHES)]


def _references(
    layer: Linear, xs: Sequence[torch.Tensor], dys: Sequence[torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    return [reference(layer, x, dy) for x, dy in zip(xs, dys, strict=True)]


def _run(subject: Subject, layer: Linear, *, together: bool) -> list[torch.Tensor]:
    """Run all microbatches in one step, and return the gradients of the inputs."""
    xs, dys = ([t.clone().requires_grad_() for t in tensors] for tensors in _data())
    try:
        _step(subject, layer, xs, dys, together)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise CheckFailed(
            "gradients are lost under accumulation: what one microbatch saved for its backward "
            f"pass, another one overwrote ({str(error).splitlines()[0][:160]})"
        ) from error
    return [x.grad for x in xs if x.grad is not None]


def _step(
    subject: Subject,
    layer: Linear,
    xs: Sequence[torch.Tensor],
    dys: Sequence[torch.Tensor],
    together: bool,
) -> None:
    # After a few steps the scales of a stateful recipe, which come from past values, fit these.
    for _ in range(3 if subject.spec.stateful else 1):
        layer.zero_grad()
        main_grad: torch.Tensor | None = getattr(layer.weight, "main_grad", None)
        if main_grad is not None:
            main_grad.zero_()
        for x in xs:
            x.grad = None
        ys = (layer(x) for x in xs)
        for y, dy in zip(list(ys) if together else ys, dys, strict=True):
            y.backward(dy.detach())


def _judge(
    subject: Subject, title: str, actual: torch.Tensor | None, gradients: list[torch.Tensor]
) -> None:
    """Compare an accumulated gradient with the sum of the microbatches' gradients.

    If it is that of a single microbatch, the message says which one.
    """
    start = "gradients are lost under accumulation:"
    require(actual is not None, f"{start} {title} is missing after {_BATCHES} backward passes")
    assert actual is not None
    bound = max(subject.bound, 0.01)
    total = sum(gradients[1:], gradients[0])
    if relative(actual, total) > bound:
        for gradient, which in ((gradients[-1], "last"), (gradients[0], "first")):
            near = relative(actual, gradient) <= max(2 * bound, 0.05)
            require(
                not near, f"{start} after {_BATCHES} backward passes {title} is that of the {which}"
            )
    close(
        f"after {_BATCHES} backward passes {title}, which should be the sum of all,",
        actual,
        total,
        bound,
    )


def _accumulates(subject: Subject, *, primary: bool, together: bool) -> None:
    layer = subject.layer(40, 48, primary=primary)
    xs, dys = _data()
    references = _references(layer, xs, dys)
    dxs = _run(subject, layer, together=together)
    _judge(
        subject,
        "the weight's grad",
        layer.weight.grad,
        [p["the gradient of the weight"] for p in references],
    )
    _judge(
        subject,
        "the bias's grad",
        layer.bias.grad,
        [p["the gradient of the bias"] for p in references],
    )
    for number, (dx, gradients) in enumerate(zip(dxs, references, strict=True), start=1):
        title = f"the gradient of microbatch {number}'s input"
        close(title, dx, gradients["the gradient of the input"], max(subject.bound, 0.01))


@check(
    "gradients-accumulate",
    "accumulation",
    "Backward passes of several microbatches sum their gradients",
)
def gradients_accumulate(subject: Subject) -> None:
    """Forward, backward, forward, backward."""
    _accumulates(subject, primary=False, together=False)


@check(
    "microbatches-before-backward",
    "accumulation",
    "Several forward passes may come before the first backward pass",
)
def microbatches_before_backward(subject: Subject) -> None:
    """A microbatch does not overwrite what another one saved."""
    try:
        _accumulates(subject, primary=False, together=True)
    except CheckFailed as error:
        raise CheckFailed(
            f"with all forward passes before the first backward pass, {error}"
        ) from error


@check(
    "quantized-weights-accumulate",
    "accumulation",
    "The same with a weight that is kept quantized",
    QUANTIZED_WEIGHTS,
)
def quantized_weights_accumulate(subject: Subject) -> None:
    """Each backward pass after its forward pass, and all of them after all forward passes."""
    for together in (False, True):
        _accumulates(subject, primary=True, together=together)


@check(
    "fused-accumulation",
    "accumulation",
    "With fuse_wgrad_accumulation the weight gradients are added into weight.main_grad",
)
def fused_accumulation(subject: Subject) -> None:
    """Both orders of passes, with weights in high precision and with quantized ones."""
    for primary in (False, True) if subject.spec.quantized_weights else (False,):
        for together in (False, True):
            layer = subject.layer(40, 48, primary=primary, fuse_wgrad_accumulation=True)
            weight: Any = layer.weight
            weight.main_grad = torch.zeros(48, 40)
            xs, dys = _data()
            gradients = [p["the gradient of the weight"] for p in _references(layer, xs, dys)]
            _run(subject, layer, together=together)
            _judge(subject, "weight.main_grad", weight.main_grad, gradients)
