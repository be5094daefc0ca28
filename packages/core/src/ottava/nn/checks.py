"""What a linear layer refuses, and the dtype that it computes in."""

from __future__ import annotations

from typing import Any

import torch

from ottava.errors import DeviceError, DTypeError, ShapeError
from ottava.kernels import HIGH_PRECISION
from ottava.torch_private import any_autocast_enabled

# Asked when the module is imported, because the compiler of torch 2.11 cannot trace the question.
_WITH_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(kind)
)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """What torch.autocast computes in where ``tensor`` is; None outside of it."""
    # In eager mode this one cheap question answers for every device; compiled code cannot ask it.
    if not torch.compiler.is_compiling() and not any_autocast_enabled():
        return None
    device_type = tensor.device.type
    enabled = device_type in _WITH_AUTOCAST and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def checked_dtype(
    layer: Any, input: torch.Tensor, weight: torch.Tensor, autocast_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype that a layer computes in.

    Raises:
        ShapeError, DTypeError, DeviceError: the input does not fit the layer.
    """
    if not isinstance(input, torch.Tensor):
        raise DTypeError(f"input is a {type(input).__name__}", expected="a torch.Tensor")
    if input.is_nested:
        raise DTypeError(
            f"input of {layer._label()} is nested ({input.layout})",
            expected="one tensor with a shape",
            remedy="give input.values(), in which all rows lie one after the other, or a padded tensor",
        )
    if input.dim() == 0 or input.shape[-1] != layer.in_features:
        raise ShapeError(
            f"input of {layer._label()} has shape {tuple(input.shape)}",
            expected=f"a last dimension of {layer.in_features}",
            remedy="check the layer before this one",
        )
    if input.device != weight.device:
        raise DeviceError(
            f"input of {layer._label()} is on {input.device}, its weight on {weight.device}",
            expected="one device",
            remedy=f"move one of them, for example input.to({str(weight.device)!r})",
        )
    dtype = input.dtype
    same = dtype == weight.dtype
    if dtype not in HIGH_PRECISION or not (same or weight.dtype in HIGH_PRECISION):
        what, wrong = ("weight", weight.dtype) if dtype in HIGH_PRECISION else ("input", dtype)
        raise DTypeError(
            f"{what} of {layer._label()} has dtype {wrong}",
            expected="torch.float32, torch.bfloat16 or torch.float16",
            remedy="convert it first, for example with .to(torch.bfloat16)",
        )
    if autocast_dtype is not None:
        return autocast_dtype
    if not same:
        raise DTypeError(
            f"input of {layer._label()} has dtype {dtype}, its weight {weight.dtype}",
            expected="one dtype",
            remedy="convert one of them, or run inside torch.autocast",
        )
    return dtype
