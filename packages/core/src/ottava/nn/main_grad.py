"""``main_grad``: gradients of weights that are added where their owner keeps them, in float32 say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ottava.errors import DeviceError, DTypeError, ShapeError, UsageError
from ottava.kernels import HIGH_PRECISION
from ottava.tensors.storage import QuantizedTensorStorage


def main_grad_of(layer: Any, grad_enabled: bool) -> torch.Tensor | None:
    """What the gradient of the layer's weight is added to; None where it is returned, or there is none.

    Raises:
        UsageError: the weight has no ``main_grad``, and is to have one.
        DTypeError, ShapeError, DeviceError: it is no tensor that the gradient could be added to.
    """
    weight = layer.weight
    if not layer.fuse_wgrad_accumulation or not grad_enabled or not weight.requires_grad:
        return None
    main_grad = getattr(weight, "main_grad", None)
    what = f"main_grad of the weight of {layer._label()}"
    if main_grad is None:
        raise UsageError(
            f"there is no {what}",
            expected="a tensor, since fuse_wgrad_accumulation is True",
            remedy="set weight.main_grad = torch.zeros(weight.shape), or fuse_wgrad_accumulation to False",
        )
    if not isinstance(main_grad, torch.Tensor) or main_grad.dtype not in HIGH_PRECISION:
        found = main_grad.dtype if isinstance(main_grad, torch.Tensor) else type(main_grad).__name__
        raise DTypeError(f"{what} is of {found}", expected="a float32, bfloat16 or float16 tensor")
    if main_grad.shape != weight.shape:
        raise ShapeError(f"{what} has shape {tuple(main_grad.shape)}", expected=str(tuple(weight.shape)))
    if main_grad.device != weight.device:
        raise DeviceError(f"{what} is on {main_grad.device}", expected=str(weight.device))
    return main_grad


def note_added(weight: Any) -> None:
    """Tell those who ask the weight that its gradient is in ``main_grad`` already."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True


def into_main_grad(weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
    """The values of ``weight``, the gradient of which is added to ``main_grad``."""
    result: torch.Tensor = _IntoMainGrad.apply(weight, _Target(main_grad))  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _Target:
    """Holds ``main_grad`` so that autograd does not see it among the function's arguments."""

    main_grad: torch.Tensor


class _IntoMainGrad(torch.autograd.Function):
    """The values of a weight, unchanged; in the backward pass its gradient goes to ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, target: _Target) -> torch.Tensor:
        ctx.weight, ctx.target = weight, target
        return weight.dequantize() if isinstance(weight, QuantizedTensorStorage) else weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.target.main_grad.add_(grads[0])
        note_added(ctx.weight)
        return None, None
