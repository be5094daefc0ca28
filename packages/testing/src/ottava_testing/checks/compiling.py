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
    use: Callable[[torch.nn.Module, Any], Results],
    *,
    primary: bool = False,
    dynamic: bool | None = None,
) -> None:
    """Compare what ``use`` gives with a compiled model and in eager mode."""
    arguments = f"fullgraph=True{', dynamic=True' if dynamic else ''}"
    words = " with weights that are kept quantized" if primary else ""
    eager, model = subject.model(primary=primary), subject.model(primary=primary)
    expected = use(eager, eager)
    torch.compiler.reset()
    try:
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        results = use(model, compiled)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CheckFailed(
            f"torch.compile({arguments}) refuses a model{words}: {type(error).__name__}: "
            f"{' '.join(lines[:3])}"
        ) from error
    finally:
        torch.compiler.reset()
    title = f"a model{words}, compiled with {arguments}, unlike in eager mode,"
    subject.agree(title, results, expected, subject.loose)


def _train(model: torch.nn.Module, run: Any) -> Results:
    return train(model, run=run)


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
    """torch.compile(fullgraph=True) takes a model, and changes no bit of its training."""
    _compare(subject, _train)


@check(QUANTIZED_WEIGHTS)
def compile_quantized_weights(subject: Subject) -> None:
    """The same with weights that are kept quantized."""
    _compare(subject, _train, primary=True)


@check()
def compile_dynamic(subject: Subject) -> None:
    """torch.compile(dynamic=True) takes batches of several sizes, and changes no bit.

    The model has two layers, because the compiler may fail at a size that both read.
    """
    _compare(subject, _batches, dynamic=True)
