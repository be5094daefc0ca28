"""Checks of whole training steps: recomputation, determinism, independence of models."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ottava.distributed import quantize_master_weights
from ottava.tensors import QuantizedTensor
from ottava_testing import table
from ottava_testing.compare import normal, plain, require, require_same, snapshot
from ottava_testing.subject import Subject
from ottava_testing.table import DETERMINISTIC, QUANTIZED_WEIGHTS

check = partial(table.check, "training")


def optimizer_of(model: torch.nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    """An optimizer without state."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters' values."""
    return list(snapshot(list(model.parameters())).values())


def step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
    *,
    run: Any = None,
    width: int = 32,
) -> list[torch.Tensor]:
    """One training step on batch ``number``.

    Returns:
        The loss, the gradient of the input, and those of the parameters.
    """
    dtype = next(model.parameters()).dtype
    x = normal(24, width, seed=100 + number, dtype=dtype).requires_grad_()
    target = normal(24, width, seed=200 + number, dtype=dtype)
    optimizer.zero_grad()
    y = model(x) if run is None else run(x)
    loss = torch.nn.functional.mse_loss(y, target)
    loss.backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    results = [loss.detach(), *(plain(grad).clone() for grad in grads if grad is not None)]
    optimizer.step()
    return results


def train(model: torch.nn.Module, count: int = 3, run: Any = None) -> list[torch.Tensor]:
    """Train some steps; return all that :func:`step` returns, and the parameters at the end."""
    optimizer = optimizer_of(model)
    results = [
        tensor for number in range(count) for tensor in step(model, optimizer, number, run=run)
    ]
    return results + values_of(model)


@check()
def activation_checkpointing(subject: Subject) -> None:
    """Recomputing activations changes no bit of any gradient."""
    for primary in subject.kinds_of_weights:
        expected = train(subject.model(primary=primary))
        for reentrant in (False, True):
            model = subject.model(primary=primary)
            results = train(model, run=partial(checkpoint, model, use_reentrant=reentrant))
            title = f"with activation checkpointing (use_reentrant={reentrant}, primary={primary})"
            subject.agree(f"training {title}", results, expected, subject.loose)


@check(DETERMINISTIC)
def deterministic_training(subject: Subject) -> None:
    """Training twice from the same start gives the same bits."""
    for dtype in (torch.float32, torch.bfloat16):
        one, other = train(subject.model(dtype=dtype)), train(subject.model(dtype=dtype))
        require_same(f"training twice from the same start in {dtype} gives", one, other)


@check(DETERMINISTIC)
def models_are_apart(subject: Subject) -> None:
    """Training one model does not change what another one computes."""
    alone = train(subject.model())
    other, model = subject.model(), subject.model()
    # The other model sees much larger values.
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(plain(parameter) * 8)
    of_other, of_model = optimizer_of(other), optimizer_of(model)
    results = []
    for number in range(3):
        step(other, of_other, number + 10)
        results += step(model, of_model, number)
    words = "models share state: training another model in between gives"
    require_same(words, results + values_of(model), alone)


@check()
def model_copies(subject: Subject) -> None:
    """A deep copy of a model computes the same and trains by itself."""
    for primary in subject.kinds_of_weights:
        model = subject.model(primary=primary)
        train(model, 2)
        clone = copy.deepcopy(model)
        before = values_of(clone)
        results = train(model)
        require_same("training a model gives its deep copy", values_of(clone), before)
        subject.agree("training of a deep copy", train(clone), results, subject.loose)


@check()
def training_follows_high_precision(subject: Subject) -> None:
    """The loss goes down as it does in high precision."""
    _follows(subject.model(), "training")


@check(QUANTIZED_WEIGHTS)
def quantized_weights_train(subject: Subject) -> None:
    """A model whose weights are kept quantized trains by an optimizer's own steps, or from master
    weights if relative_error is 0.2 or more.

    The steps are lost in a format of so few bits.
    """
    title = "training with weights that are kept quantized"
    if subject.is_coarse:
        title += " and written from master weights"
    _follows(subject.model(primary=True), title, has_masters=subject.is_coarse)


class _Masters:
    """Steps the high-precision values of a model's quantized weights, and writes the weights."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        self._parameters = list(model.parameters())
        self._masters = [
            torch.nn.Parameter(plain(getattr(p, "_high_precision_init_val", p)).clone())
            for p in self._parameters
        ]
        self._optimizer = torch.optim.SGD(self._masters, lr=lr)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            grad = parameter.grad
            master.grad = None if grad is None else plain(grad)
        self._optimizer.step()
        weights, masters = [], []
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if isinstance(parameter, QuantizedTensor):
                weights.append(parameter)
                masters.append(master.detach())
            else:
                parameter.data.copy_(master.detach())
        quantize_master_weights(weights, masters, None)


def _follows(model: torch.nn.Module, title: str, *, has_masters: bool = False) -> None:
    target = normal(32, 32, seed=77) / 32**0.5
    high = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    with torch.no_grad():
        for mine, theirs in zip(high.parameters(), model.parameters(), strict=True):
            initial = getattr(theirs, "_high_precision_init_val", None)
            mine.copy_(plain(theirs) if initial is None else initial)
    ends = []
    for net in (model, high):
        # Steps are large, because the format rounds small ones away.
        optimizer: Any = optimizer_of(net, lr=1.0)
        if has_masters and net is model:
            optimizer = _Masters(net, lr=1.0)
        losses = []
        for number in range(25):
            x = normal(64, 32, seed=300 + number)
            loss = torch.nn.functional.mse_loss(net(x), x @ target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        ends.append((losses[0], losses[-1]))
    (first, last), (high_first, high_last) = ends
    require(
        first - last > 0.5 * (high_first - high_last),
        f"{title} does not follow high precision: in 25 steps the loss goes from {first:.3g} to "
        f"{last:.3g}, there from {high_first:.3g} to {high_last:.3g}",
    )
