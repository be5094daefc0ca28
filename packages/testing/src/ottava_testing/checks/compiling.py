"""Checks under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ottava_testing import table
from ottava_testing.checks.training import train
from ottava_testing.compare import CheckFailed, normal, plain
from ottava_testing.subject import Subject
from ottava_testing.table import COMPILES, QUANTIZED_WEIGHTS

check = partial(table.check, "compiling", COMPILES, slow=True)
Results = list[torch.Tensor]


def _compare(
    subject: Subject,
    title: str,
    make: Callable[[], torch.nn.Module],
    use: Callable[[torch.nn.Module, Any], Results],
    **options: Any,
) -> None:
    """Compare what ``use`` gives with a compiled module of ``make`` and in eager mode."""
    eager, module = make(), make()
    expected = use(eager, eager)
    arguments = ", ".join(f"{name}={value}" for name, value in options.items())
    torch.compiler.reset()
    try:
        results = use(module, torch.compile(module, backend="aot_eager", **options))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CheckFailed(
            f"torch.compile({arguments}) refuses {title}: {type(error).__name__}: "
            f"{' '.join(lines[:3])}"
        ) from error
    finally:
        torch.compiler.reset()
    words = f"{title}, compiled with {arguments}, unlike in eager mode,"
    subject.agree(words, results, expected, subject.loose)


def _train(module: torch.nn.Module, run: Any) -> Results:
    return train(module, run=run)


def _batches(model: torch.nn.Module, run: Any) -> Results:
    """Outputs and gradients for batches of several sizes."""
    results = []
    for rows in (16, 24, 5):
        x = normal(rows, 32, seed=rows).requires_grad_()
        model.zero_grad()
        y = run(x)
        y.square().mean().backward()
        grads = [x.grad, *(p.grad for p in model.parameters())]
        results += [y.detach(), *(plain(grad).clone() for grad in grads if grad is not None)]
    return results


@check()
def compile_(subject: Subject) -> None:
    """torch.compile(fullgraph=True) takes a layer, and changes no bit of its training."""
    _compare(subject, "a layer", partial(subject.layer, 32, 32), _train, fullgraph=True)


@check(QUANTIZED_WEIGHTS)
def compile_quantized_weights(subject: Subject) -> None:
    """The same with a weight that is kept quantized."""
    make = partial(subject.layer, 32, 32, primary=True)
    title = "a layer whose weight is kept quantized"
    _compare(subject, title, make, _train, fullgraph=True)


@check()
def compile_dynamic(subject: Subject) -> None:
    """torch.compile(dynamic=True) takes a model and batches of several sizes, and changes no bit.

    The model has two layers, because the compiler may fail at a size that both read.
    """
    _compare(subject, "a model", subject.model, _batches, fullgraph=True, dynamic=True)
