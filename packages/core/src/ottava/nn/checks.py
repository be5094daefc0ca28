"""What a linear layer refuses, the dtype that it computes in, and where the gradient of its weight goes."""

from typing import Any

import torch

from ottava.errors import DeviceError, DTypeError, ShapeError, UsageError
from ottava.kernels.checks import HIGH_PRECISION, check_dense, check_device, check_high_precision
from ottava.kernels.direct import has_tangent, transform
from ottava.recipes.binding import label_of
from ottava.torch_private import any_autocast_enabled

# Asked when the module is imported, because the compiler of torch 2.11 cannot trace the question.
_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
_WITH_AUTOCAST = frozenset(kind for kind in _KINDS if torch.amp.is_autocast_available(kind))


def autocast_dtype(tensor: torch.Tensor, compiling: bool) -> torch.dtype | None:
    """What torch.autocast computes in where ``tensor`` is; None outside of it."""
    # In eager mode this one cheap question answers for every device; compiled code cannot ask it.
    if not compiling and not any_autocast_enabled():
        return None
    device_type = tensor.device.type
    enabled = device_type in _WITH_AUTOCAST and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def checked_dtype(layer: Any, input: torch.Tensor, weight: torch.Tensor, amp_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a layer computes in; a ShapeError, DTypeError or DeviceError where the input does not fit it."""
    if not isinstance(input, torch.Tensor):
        check_high_precision(input)
    if input.is_nested:
        check_dense(input, f"input of {label_of(layer)}")
    if input.dim() == 0 or input.shape[-1] != layer.in_features:
        what, remedy = f"input of {label_of(layer)} has shape {tuple(input.shape)}", "check the layer before this one"
        raise ShapeError(what, expected=f"a last dimension of {layer.in_features}", remedy=remedy)
    if input.device != weight.device:
        what = f"input of {label_of(layer)} is on {input.device}, its weight on {weight.device}"
        remedy = f"move one of them, for example input.to({str(weight.device)!r})"
        raise DeviceError(what, expected="one device", remedy=remedy)
    dtype = input.dtype
    same = dtype == weight.dtype
    if dtype not in HIGH_PRECISION or not (same or weight.dtype in HIGH_PRECISION):
        check_high_precision(input, f"input of {label_of(layer)}")
        check_high_precision(weight, f"weight of {label_of(layer)}")
    if amp_dtype is None and not same:
        what = f"input of {label_of(layer)} has dtype {dtype}, its weight {weight.dtype}"
        raise DTypeError(what, expected="one dtype", remedy="convert one of them, or run inside torch.autocast")
    return dtype if amp_dtype is None else amp_dtype


def check_use(layer: Any, *tensors: torch.Tensor | None) -> None:
    """Refuse what takes functions apart to differentiate or to record them, which quantization does not survive: a
    transform of torch.func, ``torch.jit.trace``, forward-mode derivatives; and to export a layer that makes steps."""
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting() and layer.training and layer._binding.state.stateful:
            what = f"{label_of(layer)} is in training mode, and torch.export writes no steps for its recipe's state"
            raise UsageError(what, expected="a model in evaluation", remedy="call model.eval() before torch.export")
        return
    name, remedy = transform(), "use it inside ottava.autocast(enabled=False), or backward() for gradients"
    found = f"{name}, a transform of torch.func," if name else None
    if name == "trace":
        found, remedy = "torch.jit.trace", "use torch.export, or trace inside ottava.autocast(enabled=False)"
    elif has_tangent(*tensors):
        found = found or "forward-mode derivatives"
    if found is not None:
        what = f"{label_of(layer)} computes on quantized operands, which {found} cannot take"
        raise UsageError(what, expected="a plain call, or high precision", remedy=remedy)


def main_grad_of(layer: Any, grad_enabled: bool) -> torch.Tensor | None:
    """What the gradient of the layer's weight is added to, as a matrix ``[out, in]``; None where nothing is added.
    Refused where it is missing, or is not of the weight's kind."""
    weight = layer.weight
    if not layer.fuse_wgrad_accumulation or not grad_enabled or not weight.requires_grad:
        return None
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    what = f"main_grad of the weight of {label_of(layer)}"
    if main_grad is None:
        remedy = "set weight.main_grad = torch.zeros(weight.shape), or fuse_wgrad_accumulation to False"
        raise UsageError(f"there is no {what}", expected="a tensor to add to", remedy=remedy)
    check_high_precision(main_grad, what)
    if main_grad.shape != weight.shape:
        raise ShapeError(f"{what} has shape {tuple(main_grad.shape)}", expected=str(tuple(weight.shape)))
    check_device(main_grad, weight.device, what)
    return main_grad.t() if layer.weight_is_transposed else main_grad
