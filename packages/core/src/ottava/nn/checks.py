"""What a layer refuses: operands that do not fit, tensor parallel plans, transforms; and the dtype
that it computes in."""

from typing import Any

import torch

from ottava import torch_private
from ottava.errors import DeviceError, DTypeError, ShapeError, UsageError
from ottava.kernels.checks import HIGH_PRECISION, check_dense, check_fits, check_high_precision
from ottava.kernels.direct import has_tangent, transform
from ottava.nn.layer import Layer, label_of
from ottava.tensors.slots import above
from ottava.torch_private import any_autocast_enabled, is_distributed

_STRIDED = torch.strided
# Types that are no DTensor, and are asked nothing else.
_NO_DTENSOR = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
_NO_PLAN = (
    "leave the layer out of the plan of parallelize_module, or exclude it from "
    "ottava.convert; use fully_shard"
)


def check_not_parallel(layer: Layer, name: str, parameter: Any) -> None:
    """Refuse a parameter that a tensor parallel plan shards, alone or together with FSDP2.

    Args:
        name: of the parameter.

    Raises:
        UsageError: it is such a DTensor.
    """
    if type(parameter) is torch.nn.Parameter or not is_distributed(parameter):
        return
    sharded = [placement for placement in parameter.placements if not placement.is_replicate()]
    if len(sharded) <= 1 and above("fsdp2").is_sharded(layer):
        return
    raise UsageError(
        f"{name} of {label_of(layer)} is a DTensor, {parameter.placements}, as of a tensor "
        f"parallel plan",
        "a plain parameter, or a shard of FSDP2: such plans are not supported",
        _NO_PLAN,
    )


def check_plain_operands(layer: Layer, *operands: tuple[str, Any]) -> None:
    """Refuse DTensors in a forward pass that quantizes: FSDP2 gives layers their whole weights.

    Args:
        operands: their names, and the tensors.

    Raises:
        UsageError: one is a DTensor.
    """
    for name, tensor in operands:
        if type(tensor) not in _NO_DTENSOR and is_distributed(tensor):
            raise UsageError(
                f"{name} of {label_of(layer)} is a DTensor, {tensor.placements}",
                "a plain tensor: tensor parallel plans are not supported",
                _NO_PLAN,
            )


def autocast_dtype(tensor: torch.Tensor, compiling: bool) -> torch.dtype | None:
    """The dtype of torch.autocast on the device of ``tensor``; None outside of it."""
    # In eager mode this one cheap question answers for every device; compiled code cannot ask it.
    if not compiling and not any_autocast_enabled():
        return None
    device_type = tensor.device.type
    if device_type in torch_private.WITH_AUTOCAST and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def checked_dtype(
    layer: Layer,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    amp_dtype: torch.dtype | None,
) -> torch.dtype:
    """The dtype that a layer computes in.

    Args:
        input: ``[*, in_features]``.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
        amp_dtype: of torch.autocast; None outside of it.

    Raises:
        ShapeError, DeviceError, DTypeError: the operands do not fit.
    """
    if not isinstance(input, torch.Tensor):
        check_high_precision(input, f"input of {label_of(layer)}")
    if input.is_nested or input.layout is not _STRIDED:
        check_dense(input, f"input of {label_of(layer)}")
    shape = input.shape
    rows, columns = weight.shape if weight.dim() == 2 else (-1, -1)
    if not shape or shape[-1] != columns or (bias is not None and bias.shape != (rows,)):
        raise _misfit(layer, shape, weight.shape, bias)
    device = weight.device
    if input.device != device:
        raise _elsewhere(layer, "input", input, device)
    if bias is not None and bias.device != device:
        raise _elsewhere(layer, "bias", bias, device)
    dtype = input.dtype
    same = dtype == weight.dtype
    if dtype not in HIGH_PRECISION or not (same or weight.dtype in HIGH_PRECISION):
        check_high_precision(input, f"input of {label_of(layer)}")
        check_high_precision(weight, f"weight of {label_of(layer)}")
    if bias is not None and (bias.dtype not in HIGH_PRECISION or bias.layout is not _STRIDED):
        check_high_precision(bias, f"bias of {label_of(layer)}")
    if amp_dtype is not None:
        return amp_dtype
    if not same:
        raise DTypeError(
            f"input of {label_of(layer)} has dtype {dtype}, its weight {weight.dtype}",
            expected="one dtype",
            remedy="convert one of them, or run inside torch.autocast",
        )
    return dtype


def _misfit(
    layer: Layer, input_shape: torch.Size, weight_shape: torch.Size, bias: torch.Tensor | None
) -> ShapeError:
    """The error for the first of weight, input and bias whose shape does not fit."""
    features, where = layer.in_features, f"of {label_of(layer)} has shape"
    another = "give the layer another one"
    whole = len(weight_shape) == 2
    if not whole or (weight_shape[1] != features and input_shape[-1:] == (features,)):
        return ShapeError(f"weight {where} {tuple(weight_shape)}", f"[*, {features}]", another)
    if bias is None or input_shape[-1:] != weight_shape[1:]:
        return ShapeError(
            f"input {where} {tuple(input_shape)}",
            f"a last dimension of {weight_shape[1]}",
            "check the layer before this one",
        )
    return ShapeError(
        f"bias {where} {tuple(bias.shape)}", f"({weight_shape[0]},), as the weight", another
    )


def _elsewhere(layer: Layer, name: str, operand: torch.Tensor, device: torch.device) -> DeviceError:
    """The error for an operand that is not on the device of the weight."""
    return DeviceError(
        f"{name} of {label_of(layer)} is on {operand.device}, its weight on {device}",
        "one device",
        f"move one of them, for example {name}.to({str(device)!r})",
    )


def check_use(layer: Layer, *tensors: torch.Tensor | None) -> None:
    """Refuse transforms and traces, which take functions apart and would lose the quantization; and
    refuse to export a layer that makes steps.

    Args:
        tensors: the operands, of which a forward-mode derivative may be asked.

    Raises:
        UsageError: a transform of torch.func, ``torch.jit.trace`` or a forward-mode derivative is
            at work; or the layer is in training mode, with a stateful recipe, and exported.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and torch_private.is_exporting():
        _check_export(layer)
    name = transform()
    if name == "trace":
        raise _refusal(
            layer,
            "torch.jit.trace",
            "use torch.export, or trace inside ottava.autocast(enabled=False)",
        )
    by_backward = "use it inside ottava.autocast(enabled=False), or backward() for gradients"
    if name:
        raise _refusal(layer, f"{name}, a transform of torch.func,", by_backward)
    if not compiling and has_tangent(*tensors):
        raise _refusal(layer, "forward-mode derivatives", by_backward)


def _refusal(layer: Layer, user: str, remedy: str) -> UsageError:
    """The error for a ``user`` of a layer that cannot take quantized operands."""
    return UsageError(
        f"{label_of(layer)} computes on quantized operands, which {user} cannot take",
        "a plain call, or high precision",
        remedy,
    )


def _check_export(layer: Layer) -> None:
    """Refuse to export a layer in training mode whose recipe has state."""
    if layer.training and layer._binding.state.stateful:
        torch_private.refuse_export(
            f"{label_of(layer)} is in training mode, and torch.export writes no steps for its "
            f"recipe's state",
            "a model in evaluation",
            "call model.eval() before torch.export",
        )


def main_grad_of(layer: Layer, grad_enabled: bool) -> torch.Tensor | None:
    """The tensor that the gradient of the layer's weight is added to.

    Returns:
        A matrix ``[out_features, in_features]``; None where nothing is added.

    Raises:
        UsageError: the weight has no ``main_grad``.
        ShapeError, DTypeError, DeviceError: it is not of the weight's kind.
    """
    weight = layer.weight
    if not layer.fuse_wgrad_accumulation or not grad_enabled or not weight.requires_grad:
        return None
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    label = f"main_grad of the weight of {label_of(layer)}"
    if main_grad is None:
        raise UsageError(
            f"there is no {label}",
            expected="a tensor to add to",
            remedy="set weight.main_grad = torch.zeros(weight.shape), or fuse_wgrad_accumulation "
            "to False",
        )
    check_fits(main_grad, tuple(weight.shape), weight.device, label)
    return main_grad.t() if layer.weight_is_transposed else main_grad
