"""Tools to find out how FP8 changes a model.

``fake_quantize`` gives the values of a tensor after quantizing and dequantizing. ``set_inspector``
is a hook for a package that inspects the products of layers (``ottava-debug``).

Formats are names that recipes list in their specs (``fake_quant_formats``). The two per-tensor
formats belong to core.
"""

import re
from collections.abc import Callable

import torch

from ottava.errors import OptionError, PluginError
from ottava.formats import E4M3, E5M2
from ottava.kernels.checks import check_fits, check_high_precision, check_tensor
from ottava.layout import Layout
from ottava.nn import Linear, function
from ottava.recipes.base import get_recipe
from ottava.recipes.registry import list_recipes
from ottava.tensors import GridQuantizer, QuantizedTensorStorage, Quantizer
from ottava.tensors.tensor import straight_through

__all__ = ["fake_quantize", "set_inspector"]

_PER_TENSOR = {
    f"FP8{f.name}": Layout(f.torch_dtype, (None, None), columnwise="same") for f in (E4M3, E5M2)
}


def fake_quantize(
    tensor: torch.Tensor, fp8_format: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize and dequantize a tensor; the gradient is that of the identity.

    Values near the largest of ``tensor``'s dtype may become infinite, because a format may round
    them up.

    Args:
        tensor: float32, bfloat16 or float16, any shape.
        fp8_format: ``"FP8E4M3"`` or ``"FP8E5M2"`` for one scale for the tensor, from its amax; or a
            format that the spec of an installed recipe lists (``fake_quant_formats``).
        out: where to write the result, of the same shape, dtype and device.

    Raises:
        DTypeError: the tensor is not of a high-precision dtype, or ``out`` has another one.
        ShapeError, DeviceError: ``out`` does not fit.
        OptionError: no installed recipe serves the format; the message says which package to
            install.
    """
    if isinstance(tensor, QuantizedTensorStorage):
        tensor = tensor.dequantize()
    check_high_precision(tensor)
    # A bare storage suffices. It is cheaper to make than a tensor, and is not traced.
    quantizer = _quantizer(fp8_format)
    quantizer.internal = True
    if out is not None:
        check_tensor(out, "out", tensor.dtype)
        check_fits(out, tuple(tensor.shape), tensor.device, "out")

    def roundtrip(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result: torch.Tensor = quantizer.quantize(values.detach()).dequantize(dtype)
        return result

    result = straight_through(tensor, roundtrip, tensor.dtype)
    if out is None:
        return result
    return out.copy_(result)


def set_inspector(inspector: Callable[[Linear], Callable[..., torch.Tensor] | None] | None) -> None:
    """Set a hook that may replace the computation of every :class:`ottava.nn.Linear`.

    Each layer calls it in each forward pass. None removes the hook, which then costs nothing.

    Args:
        inspector: ``inspector(layer)`` returns a function, or None to leave the layer as it is. The
            function returns the output ``[*, out]`` of the layer; its arguments are:

            - ``input``, ``weight`` ``[out, in]`` and ``bias``: checked tensors; the weight is
              quantized if the parameter is;
            - ``call``: the :class:`~ottava.nn.call.Call` of this pass. In high precision its
              ``state`` is None, the tensors have not been checked, and torch.autocast is as the
              caller set it;
            - ``dtype``: the dtype to compute in;
            - ``microbatch_weight``: the weight as an earlier microbatch of the step quantized it,
              or None;
            - ``main_grad``: the tensor that the gradient of the weight is added to, or None;
            - ``observed``: whether a compiler or a mode observes the computation.
    """
    function.inspector = inspector


def _quantizer(fp8_format: str) -> Quantizer:
    """The quantizer of a per-tensor format, or of the recipe that serves the format."""
    if not isinstance(fp8_format, str):
        raise OptionError(
            f"fp8_format is {fp8_format!r}", expected="the name of a format, for example 'FP8E4M3'"
        )
    if fp8_format in _PER_TENSOR:
        return GridQuantizer(_PER_TENSOR[fp8_format], columnwise=False)
    specs = list_recipes()
    for spec in (spec for spec in specs if fp8_format in spec.fake_quant_formats):
        quantizer = get_recipe(spec.name).fake_quantizer(fp8_format)
        if quantizer is None:
            raise PluginError(
                f"recipe {spec.name!r} lists the format {fp8_format!r} and has no quantizer for it",
                expected="a quantizer from its fake_quantizer()",
            )
        return quantizer.copy()
    formats = sorted({*_PER_TENSOR, *(name for spec in specs for name in spec.fake_quant_formats)})
    # The package of a recipe and its formats are named after the recipe.
    match = re.fullmatch(f"(.+)({E4M3.name}|{E5M2.name})", fp8_format)
    remedy = f"pip install ottava-recipes-{match[1].lower()}" if match else ""
    raise OptionError(
        f"no installed recipe serves the format {fp8_format!r}",
        expected=", ".join(formats),
        remedy=remedy,
    )
