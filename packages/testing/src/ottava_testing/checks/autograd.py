"""Checks of gradients through quantizing and dequantizing, and of saving for backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ottava.tensors import prepare_for_saving, restore_from_saved
from ottava.torch_private import version_of
from ottava_testing import table
from ottava_testing.compare import plain, require, require_same, same, wide
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS

check = partial(table.check, "autograd")
_WAYS: dict[str, Callable[[Any], Any]] = {
    "dequantize()": lambda w: w.dequantize(),
    "dequantize(torch.bfloat16)": lambda w: w.dequantize(torch.bfloat16),
    "float()": lambda w: w.float(),
    "w * 1": lambda w: w * 1.0,
    "to_dtype().dequantize()": lambda w: w.to_dtype(torch.bfloat16).dequantize(),
    "clone().dequantize()": lambda w: w.clone().dequantize(),
}
_WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda w: w.mul_(2.0),
    "quantize_": lambda w: w.quantize_(wide(48, 40, seed=5)),
    "copy_": lambda w: w.copy_(wide(48, 40, seed=6)),
}


@check(QUANTIZED_WEIGHTS)
def quantize_is_straight_through(subject: Subject) -> None:
    """The gradient of quantizing is that of the identity."""
    for dtype in (torch.float32, torch.bfloat16):
        x, grad = wide(48, 40, dtype=dtype).requires_grad_(), wide(48, 40, seed=4)
        quantized = subject.quantizer("weight")(x)
        cls = type(quantized).__name__
        words = f"a {cls} of a tensor that requires a gradient requires none: the graph is cut"
        require(quantized.requires_grad, words)
        (quantized.dequantize(torch.float32) * grad).sum().backward()
        require(x.grad is not None, f"no gradient comes through quantizing to a {cls}")
        title = f"through quantizing to a {cls} the gradient is not that of the identity, but has"
        require_same(title, x.grad, grad.to(dtype))


@check(QUANTIZED_WEIGHTS, over=Subject.weights)
def dequantize_is_straight_through(subject: Subject, make: Callable[[], Any]) -> None:
    """The gradient of dequantizing is that of the identity."""
    grad = wide(48, 40, seed=4)
    for name, way in _WAYS.items():
        weight = make()
        values = way(weight)
        values.backward(grad.to(values.dtype))
        require(weight.grad is not None, f"no gradient comes through {name}")
        title = f"through {name} the gradient is not that of the identity, but has"
        require_same(title, plain(weight.grad).float(), grad.to(values.dtype).float())


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


@check(over=Subject.storages)
def saved_for_backward(subject: Subject, storage: Any) -> None:
    """Saved for backward, storages and tensors come back as they were, twice if asked."""
    x = wide(48, 40, seed=7).requires_grad_()
    restored: list[Any] = []
    expected = plain(storage).clone()
    y = _Keeps.apply(x, storage, restored)  # type: ignore[no-untyped-call]
    y.sum().backward(retain_graph=True)
    title = "saved for backward, it comes back"
    require_same(f"{title} with", x.grad, expected.float())
    kind = type(restored[0])
    require(kind is type(storage), f"{title} as a {kind.__name__}")
    is_whole = restored[2] is None and torch.equal(restored[1], x)
    require(is_whole, "what was saved with it does not come back")
    y.sum().backward()
    require_same(f"{title} in a second backward pass with", plain(restored[3]), expected)
    require(same(plain(storage), expected), "it was changed by saving it for backward")


@check(QUANTIZED_WEIGHTS, over=Subject.weights)
def saved_weights_are_guarded(subject: Subject, make: Callable[[], Any]) -> None:
    """A backward pass refuses a weight that was written since the forward pass."""
    weight = make()
    for name, write in _WRITES.items():
        version = version_of(weight)
        with torch.no_grad():
            write(weight)
        words = f"{name} is not counted as a write: a backward pass would use new values"
        require(version_of(weight) > version, words)
