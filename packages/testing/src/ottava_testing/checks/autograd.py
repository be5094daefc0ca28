"""Checks of gradients through quantizing and dequantizing, and of saving for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ottava.tensors import prepare_for_saving, restore_from_saved
from ottava.torch_private import version_of
from ottava_testing.compare import plain, require, same, wide
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, check


@check(
    "quantize-is-straight-through",
    "autograd",
    "The gradient of quantizing is that of the identity",
    QUANTIZED_WEIGHTS,
)
def quantize_is_straight_through(subject: Subject) -> None:
    """The gradient also has the dtype of the tensor that was quantized."""
    for dtype in (torch.float32, torch.bfloat16):
        x = wide(48, 40, dtype=dtype).requires_grad_()
        quantized = subject.quantizer("weight")(x)
        cls = type(quantized).__name__
        require(
            quantized.requires_grad,
            f"a {cls} of a tensor that requires a gradient requires none: the graph is cut",
        )
        grad = wide(48, 40, seed=4)
        (quantized.dequantize(torch.float32) * grad).sum().backward()
        require(x.grad is not None, f"no gradient comes through quantizing to a {cls}")
        assert x.grad is not None
        require(
            x.grad.dtype == dtype,
            f"the gradient through quantizing {dtype} has dtype {x.grad.dtype}",
        )
        require(
            same(x.grad, grad.to(dtype)),
            f"the gradient of quantizing to a {cls} is not that of the identity",
        )


@check(
    "dequantize-is-straight-through",
    "autograd",
    "The gradient of dequantizing is that of the identity",
    QUANTIZED_WEIGHTS,
)
def dequantize_is_straight_through(subject: Subject) -> None:
    """Every way from a quantized tensor to its values."""
    grad = wide(48, 40, seed=4)
    ways: dict[str, Any] = {
        "dequantize()": lambda w: w.dequantize(),
        "dequantize(torch.bfloat16)": lambda w: w.dequantize(torch.bfloat16),
        "float()": lambda w: w.float(),
        "w * 1": lambda w: w * 1.0,
        "to_dtype().dequantize()": lambda w: w.to_dtype(torch.bfloat16).dequantize(),
        "clone().dequantize()": lambda w: w.clone().dequantize(),
    }
    for name, way in ways.items():
        weight: Any = torch.nn.Parameter(subject.weight(wide(48, 40)))
        cls = type(weight).__name__
        values = way(weight)
        values.backward(grad.to(values.dtype))
        require(weight.grad is not None, f"no gradient comes through {name} of a {cls}")
        require(
            weight.grad.shape == (48, 40),
            f"the gradient through {name} of a {cls} is {tuple(weight.grad.shape)}",
        )
        expected = grad.to(values.dtype).float()
        require(
            torch.equal(plain(weight.grad).float(), expected),
            f"the gradient of {name} of a {cls} is not that of the identity",
        )


class _Keeps(torch.autograd.Function):
    """Saves quantized tensors for backward and multiplies the gradient by their values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantized: Any, restored: list[Any]) -> torch.Tensor:
        tensors, ctx.objects = prepare_for_saving(quantized, x, None)
        ctx.save_for_backward(*tensors)
        ctx.seen = restored
        return x * plain(quantized)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        restored, x, nothing = restore_from_saved(list(ctx.saved_tensors), ctx.objects)
        ctx.seen.extend([restored, x, nothing])
        return grads[0] * plain(restored), None, None


@check(
    "saved-for-backward",
    "autograd",
    "Saved for backward, storages and tensors come back as they were, twice if asked",
)
def saved_for_backward(subject: Subject) -> None:
    """ctx.save_for_backward, with a second backward pass under retain_graph."""
    for words, storage, _ in subject.quantized():
        x = wide(48, 40, seed=7).requires_grad_()
        restored: list[Any] = []
        expected = plain(storage).clone()
        y = _Keeps.apply(x, storage, restored)  # type: ignore[no-untyped-call]
        y.sum().backward(retain_graph=True)
        require(
            x.grad is not None and same(x.grad, expected.float()),
            f"{words}, saved for backward, comes back with other values",
        )
        require(
            type(restored[0]) is type(storage),
            f"{words}, saved for backward, comes back as a {type(restored[0]).__name__}",
        )
        require(
            restored[2] is None and torch.equal(restored[1], x),
            f"what was saved with {words} does not come back",
        )
        y.sum().backward()
        require(
            same(plain(restored[3]), expected),
            f"{words}, saved for backward, has other values in a second backward pass",
        )
        require(same(plain(storage), expected), f"{words} was changed by saving it for backward")


@check(
    "saved-weights-are-guarded",
    "autograd",
    "A backward pass refuses a weight that was written since the forward pass",
    QUANTIZED_WEIGHTS,
)
def saved_weights_are_guarded(subject: Subject) -> None:
    """Autograd counts writes to quantized tensors."""
    weight: Any = torch.nn.Parameter(subject.weight(wide(48, 40)))
    writes: dict[str, Callable[[], Any]] = {
        "mul_": lambda: weight.mul_(2.0),
        "quantize_": lambda: weight.quantize_(wide(48, 40, seed=5)),
        "copy_": lambda: weight.copy_(wide(48, 40, seed=6)),
    }
    cls = type(weight).__name__
    for name, write in writes.items():
        _guarded(cls, name, weight, write)


def _guarded(cls: str, name: str, weight: Any, write: Callable[[], Any]) -> None:
    version = version_of(weight)
    with torch.no_grad():
        write()
    require(
        version_of(weight) > version,
        f"{name} on a {cls} is not counted as a write: a backward pass would use new values",
    )
