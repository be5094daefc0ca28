"""Checks of quantized tensors as torch tensors: ops, views, new tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ottava.errors import UsageError
from ottava.tensors import QuantizedTensor
from ottava_testing.compare import CheckFailed, close, flip, plain, relative, require, same, wide
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, check

Op = Callable[[Any], Any]

_TRANSPOSES: dict[str, Op] = {
    "t()": lambda w: w.t(),
    "transpose(0, 1)": lambda w: w.transpose(0, 1),
    "permute(1, 0)": lambda w: w.permute(1, 0),
    ".mT": lambda w: w.mT,
    ".T": lambda w: w.T,
    "t().contiguous()": lambda w: w.t().contiguous(),
}
_VIEWS: dict[str, Op] = {
    "view(-1)": lambda w: w.view(-1),
    "view(2, -1, 40)": lambda w: w.view(2, -1, 40),
    "reshape(40, 48)": lambda w: w.reshape(40, 48),
    "[3:17]": lambda w: w[3:17],
    "[:, 5]": lambda w: w[:, 5],
    "[7]": lambda w: w[7],
    "unsqueeze(0)": lambda w: w.unsqueeze(0),
    "split(16)[1]": lambda w: w.split(16)[1],
    "chunk(3)[2]": lambda w: w.chunk(3)[2],
    "flatten()": lambda w: w.flatten(),
    "contiguous()": lambda w: w.contiguous(),
    "detach()": lambda w: w.detach(),
    "expand(2, 48, 40)": lambda w: w.expand(2, 48, 40),
}
_RESULTS: dict[str, Op] = {
    "w + w": lambda w: w + w,
    "w * 2": lambda w: w * 2,
    "-w": lambda w: -w,
    "w @ w.t()": lambda w: w @ w.t(),
    "sum(0)": lambda w: w.sum(0),
    "norm()": lambda w: torch.linalg.vector_norm(w).reshape(1),
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "abs()": lambda w: w.abs(),
    "linear": lambda w: torch.nn.functional.linear(wide(3, 40, seed=1), w),
}


def _compare(subject: Subject, ops: dict[str, Op], values: torch.Tensor) -> None:
    weight = subject.weight(values)
    cls, expected = type(weight).__name__, plain(weight)
    for name, op in ops.items():
        # The result of an op may be quantized again, so it is compared with the recipe's bound.
        close(f"{name} of a {cls}", plain(op(weight)), op(expected), subject.bound)


def _compare_transpose(subject: Subject, name: str, op: Op, values: torch.Tensor) -> None:
    weight = subject.weight(values)
    cls, expected = type(weight).__name__, op(plain(weight))
    try:
        actual = plain(op(weight))
    except (RuntimeError, ValueError, IndexError) as error:
        text = str(error).splitlines()[0]
        raise CheckFailed(
            f"wrong transpose: {name} of a {cls} fails by {type(error).__name__}: {text}"
        ) from error
    close(f"wrong transpose: {name} of a {cls}", actual, expected, subject.bound)


@check(
    "transposes",
    "tensors",
    "Transposing gives the transpose, of square matrices too",
    QUANTIZED_WEIGHTS,
)
def transposes(subject: Subject) -> None:
    """Every spelling of a transpose."""
    for values in (wide(32, 32), wide(48, 40)):
        for name, op in _TRANSPOSES.items():
            _compare_transpose(subject, name, op, values)


@check(
    "views",
    "tensors",
    "Views, slices and reshapes give the values that they should",
    QUANTIZED_WEIGHTS,
)
def views(subject: Subject) -> None:
    """Values of views, and writes to views that are quantized.

    Such a write either reaches the whole tensor, or is refused and changes nothing.
    """
    _compare(subject, _VIEWS, wide(48, 40))
    for name, op in _VIEWS.items():
        weight = subject.weight(wide(48, 40))
        view = op(weight)
        if not isinstance(view, QuantizedTensor) or name.startswith("expand"):
            continue
        cls, before = type(weight).__name__, plain(weight)
        try:
            with torch.no_grad():
                view.copy_(torch.full(tuple(view.shape), 0.5))
        except UsageError:
            require(
                same(plain(weight), before),
                f"a write to {name} of a {cls} is refused, and changes the {cls}",
            )
            continue
        error = relative(plain(op(plain(weight))), torch.full(tuple(view.shape), 0.5))
        require(
            error <= min(0.5, 4 * subject.bound),
            f"a write to {name} of a {cls} does not reach the {cls}",
        )


@check("results-of-ops", "tensors", "Ops see the dequantized values", QUANTIZED_WEIGHTS)
def results_of_ops(subject: Subject) -> None:
    """Results of arithmetic, products and reductions."""
    _compare(subject, _RESULTS, wide(48, 40))


@check(
    "nominal-dtype",
    "tensors",
    "float(), half(), bfloat16(), to() and to_dtype() give the values in another dtype",
    QUANTIZED_WEIGHTS,
)
def nominal_dtype(subject: Subject) -> None:
    """A change of the nominal dtype keeps the values."""
    weight = subject.weight(wide(48, 40))
    cls, values = type(weight).__name__, plain(weight)
    ways: dict[str, tuple[Op, torch.dtype]] = {
        "float()": (lambda w: w.float(), torch.float32),
        "half()": (lambda w: w.half(), torch.float16),
        "bfloat16()": (lambda w: w.bfloat16(), torch.bfloat16),
        "to(torch.bfloat16)": (lambda w: w.to(torch.bfloat16), torch.bfloat16),
        "to_dtype(torch.bfloat16)": (lambda w: w.to_dtype(torch.bfloat16), torch.bfloat16),
    }
    for name, (way, dtype) in ways.items():
        result = way(weight)
        require(result.dtype == dtype, f"{name} of a {cls} gives {result.dtype}")
        close(f"{name} of a {cls}", plain(result), values, 0.01)


@check(
    "new-tensors",
    "tensors",
    "zeros_like and its like give what they say, and change nothing",
    QUANTIZED_WEIGHTS,
)
def new_tensors(subject: Subject) -> None:
    """Optimizers make their state with these functions."""
    weight = subject.weight(wide(48, 40))
    cls, values = type(weight).__name__, plain(weight).clone()
    cases: dict[str, tuple[Any, float]] = {
        "zeros_like": (torch.zeros_like(weight), 0.0),
        "ones_like": (torch.ones_like(weight), 1.0),
        "new_zeros": (weight.new_zeros(48, 40), 0.0),
        "full_like": (torch.full_like(weight, 2.0), 2.0),
    }
    for name, (tensor, value) in cases.items():
        # The relative error of zeros is not defined, so they have to be exact.
        is_right = not bool(plain(tensor).any())
        if value:
            is_right = relative(plain(tensor), torch.full((48, 40), value)) <= subject.bound
        require(is_right, f"{name} of a {cls} does not hold {value}")
    for name, empty in (
        ("empty_like", torch.empty_like(weight)),
        ("new_empty", weight.new_empty(48, 40)),
    ):
        require(tuple(empty.shape) == (48, 40), f"{name} of a {cls} has shape {tuple(empty.shape)}")
        with torch.no_grad():
            empty.copy_(values)
        bound = min(0.5, 4 * subject.bound)
        close(f"{name} of a {cls}, after copy_(),", plain(empty), values, bound)
        if isinstance(empty, QuantizedTensor):
            for tensor in empty.inner_list():
                if tensor is not None:
                    flip(tensor)
        require(
            torch.equal(plain(weight), values), f"writing to {name} of a {cls} changed the {cls}"
        )


@check(
    "requires-grad",
    "tensors",
    "Parameters of quantized tensors require gradients, and copies and moves keep that",
    QUANTIZED_WEIGHTS,
)
def requires_grad(subject: Subject) -> None:
    """requires_grad of parameters, of their copies, and of what to() gives."""
    import copy

    weight = subject.weight(wide(48, 40))
    cls = type(weight).__name__
    require(not weight.requires_grad, f"a {cls} made of values without gradient requires one")
    parameter: Any = torch.nn.Parameter(weight)
    require(
        parameter.requires_grad and parameter.is_leaf,
        f"a parameter around a {cls} requires no gradient",
    )
    require(
        isinstance(parameter, torch.nn.Parameter), f"a parameter around a {cls} is no Parameter"
    )
    require(
        copy.deepcopy(parameter).requires_grad,
        f"a deep copy of a parameter around a {cls} loses requires_grad",
    )
    require(
        copy.copy(parameter).requires_grad,
        f"copy.copy of a parameter around a {cls} loses requires_grad",
    )
    require(
        parameter.clone().requires_grad, f"clone() of a parameter around a {cls} loses its gradient"
    )
    require(
        parameter.to(torch.bfloat16).requires_grad,
        f"to() of a parameter around a {cls} loses its gradient",
    )
    require(
        not torch.nn.Parameter(weight, requires_grad=False).requires_grad,
        f"a frozen {cls} requires a gradient",
    )
    empty: Any = subject.quantizer("weight").make_empty((4, 8), requires_grad=True)
    require(empty.requires_grad, f"make_empty(requires_grad=True) of a {cls} requires no gradient")
