"""Checks of whole training steps: recomputation, determinism, independence of models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ottava_testing.compare import close, normal, plain, require, require_same
from ottava_testing.subject import Subject
from ottava_testing.table import DETERMINISTIC, QUANTIZED_WEIGHTS, check


def step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    number: int,
    *,
    run: Any = None,
    width: int = 32,
) -> list[torch.Tensor]:
    """One training step on batch ``number``.

    Returns:
        The loss, the gradient of the input, and those of the parameters.
    """
    parameter = next(model.parameters())
    x = normal(24, width, seed=100 + number, dtype=parameter.dtype).requires_grad_()
    target = normal(24, width, seed=200 + number, dtype=parameter.dtype)
    model.zero_grad()
    loss = torch.nn.functional.mse_loss((run or model)(x), target)
    loss.backward()
    assert x.grad is not None
    grads = [plain(p.grad).clone() for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        optimizer.step()
    return [loss.detach(), x.grad, *grads]


def train(model: torch.nn.Module, count: int = 3, run: Any = None) -> list[torch.Tensor]:
    """Train some steps; return all that :func:`step` returns, and the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = [
        tensor for number in range(count) for tensor in step(model, optimizer, number, run=run)
    ]
    return [*results, *(plain(p).clone() for p in model.parameters())]


def equal(
    subject: Subject, defect: str, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]
) -> None:
    """Compare bits, or values where the recipe is not deterministic.

    Raises:
        CheckFailed: they differ; ``defect`` says what that means.
    """
    require(len(one) == len(other), f"{defect} (not the same gradients)")
    if subject.spec.deterministic:
        require_same(defect, one, other)
        return
    for mine, theirs in zip(one, other, strict=True):
        close(f"{defect}: a loss, gradient or parameter", mine, theirs, 4 * subject.bound)


@check(
    "activation-checkpointing", "training", "Recomputing activations changes no bit of any gradient"
)
def activation_checkpointing(subject: Subject) -> None:
    """Reentrant checkpointing and the other, weights in high precision and quantized ones."""
    for primary in (False, True) if subject.spec.quantized_weights else (False,):
        expected = train(subject.model(primary=primary))
        for reentrant in (False, True):
            model = subject.model(primary=primary)
            results = train(model, run=partial(checkpoint, model, use_reentrant=reentrant))
            words = f"use_reentrant={reentrant}"
            if primary:
                words += ", weights that are kept quantized"
            equal(
                subject,
                f"with activation checkpointing ({words}) training is not what it is without",
                results,
                expected,
            )


@check(
    "deterministic-training",
    "training",
    "Training twice from the same start gives the same bits",
    DETERMINISTIC,
)
def deterministic_training(subject: Subject) -> None:
    """Losses, gradients and weights."""
    for dtype in (torch.float32, torch.bfloat16):
        one, other = train(subject.model(dtype=dtype)), train(subject.model(dtype=dtype))
        require_same(
            f"training twice from the same start in {dtype} gives different bits", one, other
        )


@check(
    "models-are-apart",
    "training",
    "Training one model does not change what another one computes",
    DETERMINISTIC,
)
def models_are_apart(subject: Subject) -> None:
    """No state is in globals, in the recipe or in its quantizers."""
    alone = train(subject.model())
    recipe_of_both, model = subject.model(), subject.model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (recipe_of_both, model)]
    # Another model, which sees much larger values, runs in between.
    with torch.no_grad():
        for parameter in recipe_of_both.parameters():
            parameter.copy_(plain(parameter) * 8)
    results = []
    for number in range(3):
        step(recipe_of_both, optimizers[0], number + 10)
        results += step(model, optimizers[1], number)
    results += [plain(p).clone() for p in model.parameters()]
    require_same(
        "training another model in between changes the results: state is shared by models",
        results,
        alone,
    )


@check("model-copies", "training", "A deep copy of a model computes the same and trains by itself")
def model_copies(subject: Subject) -> None:
    """A copy by copy.deepcopy during training."""
    for primary in (False, True) if subject.spec.quantized_weights else (False,):
        model = subject.model(primary=primary)
        train(model, 2)
        clone = copy.deepcopy(model)
        before = [plain(p).clone() for p in clone.parameters()]
        results = train(model)
        require_same(
            "training a model changes its deep copy",
            [plain(p) for p in clone.parameters()],
            before,
        )
        equal(
            subject,
            "a deep copy of a model trains otherwise than the model",
            train(clone),
            results,
        )


@check(
    "training-follows-high-precision", "training", "The loss goes down as it does in high precision"
)
def training_follows_high_precision(subject: Subject) -> None:
    """A small problem with a known solution."""
    torch.manual_seed(0)
    _follows(subject, subject.model(), "")


@check(
    "quantized-weights-train",
    "training",
    "A model whose weights are kept quantized trains by an optimizer's own steps",
    QUANTIZED_WEIGHTS,
)
def quantized_weights_train(subject: Subject) -> None:
    """Steps are large, because the format rounds small ones away."""
    _follows(subject, subject.model(primary=True), " with weights that are kept quantized")


def _follows(subject: Subject, model: torch.nn.Module, words: str) -> None:
    target = normal(32, 32, seed=77) / 32**0.5
    plainly = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    with torch.no_grad():
        for mine, theirs in zip(plainly.parameters(), model.parameters(), strict=True):
            initial = getattr(theirs, "_high_precision_init_val", None)
            mine.copy_(plain(theirs) if initial is None else initial)
    losses = []
    for net in (model, plainly):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for number in range(25):
            x = normal(64, 32, seed=300 + number)
            loss = torch.nn.functional.mse_loss(net(x), x @ target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    actual, expected = losses[:25], losses[25:]
    drop, expected_drop = actual[0] - actual[-1], expected[0] - expected[-1]
    require(
        drop > 0.5 * expected_drop,
        f"training{words} does not follow high precision: in 25 steps the loss goes from "
        f"{actual[0]:.3g} to {actual[-1]:.3g}, there from {expected[0]:.3g} to {expected[-1]:.3g}",
    )
