"""Checks under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ottava_testing.checks.training import equal, train
from ottava_testing.compare import CheckFailed, normal, plain
from ottava_testing.subject import Subject
from ottava_testing.table import COMPILES, QUANTIZED_WEIGHTS, check


def _compiled(subject: Subject, *, primary: bool) -> None:
    expected = train(subject.model(primary=primary))
    model = subject.model(primary=primary)
    results = _run(model, lambda compiled: train(model, run=compiled), _words(primary))
    equal(
        subject,
        f"a compiled model{_words(primary)} trains otherwise than in eager mode",
        results,
        expected,
    )


def _run(
    model: torch.nn.Module,
    use: Callable[[Any], list[torch.Tensor]],
    words: str,
    dynamic: bool | None = None,
) -> list[torch.Tensor]:
    """The result of ``use`` with the compiled model.

    Raises:
        CheckFailed: the compiler refuses the model.
    """
    torch.compiler.reset()
    try:
        return use(torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager"))
    except CheckFailed:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        arguments = f"fullgraph=True{', dynamic=True' if dynamic else ''}"
        raise CheckFailed(
            f"torch.compile({arguments}) refuses a model{words}: {type(error).__name__}: "
            f"{' '.join(lines[:3])}"
        ) from error
    finally:
        torch.compiler.reset()


def _batches(model: torch.nn.Module, run: Any) -> list[torch.Tensor]:
    """Outputs and gradients for batches of several sizes."""
    results = []
    for rows in (16, 24, 5):
        x = normal(rows, 32, seed=rows).requires_grad_()
        model.zero_grad()
        y = run(x)
        y.square().mean().backward()
        assert x.grad is not None
        grads = [plain(p.grad).clone() for p in model.parameters() if p.grad is not None]
        results += [y.detach(), x.grad, *grads]
    return results


def _words(primary: bool) -> str:
    return " with weights that are kept quantized" if primary else ""


@check(
    "compile",
    "compiling",
    "torch.compile(fullgraph=True) takes a model, and changes no bit of its training",
    COMPILES,
    slow=True,
)
def compiles(subject: Subject) -> None:
    """Forward and backward passes."""
    _compiled(subject, primary=False)


@check(
    "compile-quantized-weights",
    "compiling",
    "The same with weights that are kept quantized",
    COMPILES,
    QUANTIZED_WEIGHTS,
    slow=True,
)
def compiles_quantized_weights(subject: Subject) -> None:
    """Tensor subclasses as parameters."""
    _compiled(subject, primary=True)


@check(
    "compile-dynamic",
    "compiling",
    "torch.compile(dynamic=True) takes batches of several sizes, and changes no bit",
    COMPILES,
    slow=True,
)
def compiles_dynamic(subject: Subject) -> None:
    """The model has two layers, because the compiler may fail at a size that both read."""
    eager, model = subject.model(), subject.model()
    expected = _batches(eager, eager)
    results = _run(model, lambda compiled: _batches(model, compiled), "", dynamic=True)
    defect = "a model compiled with dynamic=True computes otherwise than in eager mode"
    equal(subject, defect, results, expected)
