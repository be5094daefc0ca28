"""torch.compile."""

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
    found = _run(model, lambda compiled: train(model, run=compiled), _words(primary))
    equal(
        subject,
        f"a compiled model{_words(primary)} trains otherwise than in eager mode",
        found,
        expected,
    )


def _run(
    model: torch.nn.Module,
    use: Callable[[Any], list[torch.Tensor]],
    words: str,
    dynamic: bool | None = None,
) -> list[torch.Tensor]:
    """What ``use`` gives of the compiled model, or CheckFailed where the compiler refuses it."""
    torch.compiler.reset()
    try:
        return use(torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager"))
    except CheckFailed:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        asked = f"fullgraph=True{', dynamic=True' if dynamic else ''}"
        raise CheckFailed(
            f"torch.compile({asked}) refuses a model{words}: {type(error).__name__}: "
            f"{' '.join(lines[:3])}"
        ) from error
    finally:
        torch.compiler.reset()


def _batches(model: torch.nn.Module, run: Any) -> list[torch.Tensor]:
    """Outputs and gradients of batches of several sizes."""
    seen = []
    for rows in (16, 24, 5):
        x = normal(rows, 32, seed=rows).requires_grad_()
        model.zero_grad()
        y = run(x)
        y.square().mean().backward()
        assert x.grad is not None
        grads = [plain(p.grad).clone() for p in model.parameters() if p.grad is not None]
        seen += [y.detach(), x.grad, *grads]
    return seen


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
    """Forward and backward."""
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
    """Two layers, because the compiler may fail at a number that the second one reads again."""
    eager, model = subject.model(), subject.model()
    expected = _batches(eager, eager)
    found = _run(model, lambda compiled: _batches(model, compiled), "", dynamic=True)
    defect = "a model compiled with dynamic=True computes otherwise than in eager mode"
    equal(subject, defect, found, expected)
