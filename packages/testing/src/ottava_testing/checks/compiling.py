"""torch.compile."""

from __future__ import annotations

import torch

from ottava_testing.checks.training import equal, train
from ottava_testing.compare import CheckFailed
from ottava_testing.subject import Subject
from ottava_testing.table import COMPILES, QUANTIZED_WEIGHTS, check


def _compiled(subject: Subject, *, primary: bool) -> None:
    expected = train(subject.model(primary=primary))
    model = subject.model(primary=primary)
    torch.compiler.reset()
    try:
        found = train(model, run=torch.compile(model, fullgraph=True, backend="aot_eager"))
    except CheckFailed:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CheckFailed(
            f"torch.compile(fullgraph=True) refuses a model{_words(primary)}: {type(error).__name__}: "
            f"{' '.join(lines[:3])}"
        ) from error
    finally:
        torch.compiler.reset()
    equal(subject, f"a compiled model{_words(primary)} trains otherwise than in eager mode", found, expected)


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
