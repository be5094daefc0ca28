"""Checks of quantized tensors as torch tensors: ops, views, new tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ottava.errors import UsageError
from ottava.tensors import QuantizedTensor
from ottava_testing import table
from ottava_testing.compare import (
    CheckFailed,
    close,
    first_line,
    flip,
    plain,
    relative,
    require,
    same,
    wide,
)
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS

check = partial(table.check, "tensors", QUANTIZED_WEIGHTS, over=Subject.weights)
Op = Callable[[Any], Any]
Make = Callable[..., Any]

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
_DTYPES: dict[str, tuple[Op, torch.dtype]] = {
    "float()": (lambda w: w.float(), torch.float32),
    "half()": (lambda w: w.half(), torch.float16),
    "bfloat16()": (lambda w: w.bfloat16(), torch.bfloat16),
    "to(torch.bfloat16)": (lambda w: w.to(torch.bfloat16), torch.bfloat16),
    "to_dtype(torch.bfloat16)": (lambda w: w.to_dtype(torch.bfloat16), torch.bfloat16),
}
_FILLED: dict[str, tuple[Op, float]] = {
    "zeros_like": (torch.zeros_like, 0.0),
    "ones_like": (torch.ones_like, 1.0),
    "new_zeros": (lambda w: w.new_zeros(48, 40), 0.0),
    "full_like": (lambda w: torch.full_like(w, 2.0), 2.0),
}
_EMPTY: dict[str, Op] = {"empty_like": torch.empty_like, "new_empty": lambda w: w.new_empty(48, 40)}
_KEEPS_GRAD: dict[str, Op] = {
    "copy.deepcopy": copy.deepcopy,
    "copy.copy": copy.copy,
    "clone()": lambda w: w.clone(),
    "to()": lambda w: w.to(torch.bfloat16),
}


@check()
def transposes(subject: Subject, make: Make) -> None:
    """Transposing gives the transpose, of square matrices too."""
    for weight in (make(wide(32, 32)).detach(), make().detach()):
        for name, op in _TRANSPOSES.items():
            try:
                actual = plain(op(weight))
            except (RuntimeError, ValueError, IndexError) as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise CheckFailed(f"wrong transpose: {name} fails by {reason}") from error
            close(f"wrong transpose: {name}", actual, op(plain(weight)), subject.bound)


@check()
def views(subject: Subject, make: Make) -> None:
    """Views, slices and reshapes give the values that they should."""
    for name, op in _VIEWS.items():
        weight = make().detach()
        before, view = plain(weight), op(weight)
        close(name, view, op(before), subject.bound)
        if not isinstance(view, QuantizedTensor) or name.startswith("expand"):
            continue
        # A write to a view either reaches the whole tensor, or is refused and changes nothing.
        values = torch.full(tuple(view.shape), 0.5)
        try:
            view.copy_(values)
        except UsageError:
            require(same(plain(weight), before), f"a write to {name} is refused and changes it")
            continue
        error = relative(plain(op(plain(weight))), values)
        require(error <= subject.loose, f"a write to {name} does not reach the tensor")


@check()
def results_of_ops(subject: Subject, make: Make) -> None:
    """Ops see the dequantized values."""
    weight = make().detach()
    for name, op in _RESULTS.items():
        # The result of an op may be quantized again, so it is compared with the recipe's bound.
        close(name, op(weight), op(plain(weight)), subject.bound)


@check()
def nominal_dtype(subject: Subject, make: Make) -> None:
    """float(), half(), bfloat16(), to() and to_dtype() give the values in another dtype."""
    weight = make().detach()
    for name, (op, dtype) in _DTYPES.items():
        result = op(weight)
        require(result.dtype == dtype, f"{name} gives {result.dtype}")
        close(name, result, weight, 0.01)


@check()
def new_tensors(subject: Subject, make: Make) -> None:
    """zeros_like and its like give what they say, and change nothing."""
    weight = make().detach()
    values = plain(weight).clone()
    for name, (op, value) in _FILLED.items():
        # Zeros have to be exact, because their relative error is not defined.
        actual, expected = plain(op(weight)), torch.full((48, 40), value)
        is_right = relative(actual, expected) <= subject.bound if value else not actual.any()
        require(is_right, f"{name} does not hold {value}")
    for name, op in _EMPTY.items():
        empty = op(weight)
        require(tuple(empty.shape) == (48, 40), f"{name} has shape {tuple(empty.shape)}")
        empty.copy_(values)
        close(f"{name}, after copy_(),", empty, values, subject.loose)
        for tensor in empty.inner_list() if isinstance(empty, QuantizedTensor) else ():
            if tensor is not None:
                flip(tensor)
        require(torch.equal(plain(weight), values), f"writing to {name} changed the original")


@check()
def requires_grad(subject: Subject, make: Make) -> None:
    """Parameters of quantized tensors require gradients, and copies and moves keep that."""
    weight, parameter = make().detach(), make()
    require(not weight.requires_grad, "made of values without gradient, it requires one")
    require(isinstance(parameter, torch.nn.Parameter), "a parameter of it is no Parameter")
    is_leaf = parameter.requires_grad and parameter.is_leaf
    require(is_leaf, "a parameter of it requires no gradient")
    for name, op in _KEEPS_GRAD.items():
        require(op(parameter).requires_grad, f"{name} of a parameter loses requires_grad")
    frozen = torch.nn.Parameter(weight, requires_grad=False)
    require(not frozen.requires_grad, "a frozen parameter requires a gradient")
    empty: Any = subject.quantizer("weight").make_empty((4, 8), requires_grad=True)
    require(empty.requires_grad, "make_empty(requires_grad=True) requires no gradient")
