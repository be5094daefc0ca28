"""What helps to find out what FP8 does to a model: ``fake_quantize``, what a tensor looks like
after FP8, and the hook that a package fills which looks at the products of layers
(``ottava-debug``).

Formats are names that recipes list in their specs (``fake_quant_formats``). The two per-tensor ones
are core's own.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from ottava.errors import OptionError, PluginError
from ottava.formats import E4M3, E5M2
from ottava.kernels.checks import check_fits, check_high_precision, check_tensor
from ottava.layout import Layout
from ottava.nn import Linear, function
from ottava.recipes.base import get_recipe
from ottava.recipes.registry import list_recipes
from ottava.tensors import GridQuantizer, QuantizedTensorStorage, Quantizer
from ottava.tensors.tensor import StraightThrough

__all__ = ["fake_quantize", "set_inspector"]

_PER_TENSOR = {
    f"FP8{f.name}": Layout(f.torch_dtype, (None, None), columnwise="same") for f in (E4M3, E5M2)
}


def fake_quantize(
    tensor: torch.Tensor, fp8_format: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize and dequantize; the gradient is that of the identity.

    Args:
        tensor: float32, bfloat16 or float16, any shape.
        fp8_format: ``"FP8E4M3"`` or ``"FP8E5M2"`` for one scale a tensor, from its amax; or a
            format of an installed recipe, which its spec lists (``fake_quant_formats``). Values
            next to the largest of ``tensor``'s dtype may become infinite: a format rounds them up.
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
    # A bare storage will do: there is less to make, and nothing to trace.
    quantizer = _quantizer(fp8_format)
    quantizer.internal = True
    if out is not None:
        check_tensor(out, "out", tensor.dtype)
        check_fits(out, tuple(tensor.shape), tensor.device, "out")
    made: Any = StraightThrough.apply
    result: torch.Tensor = made(
        tensor, lambda t, dtype: quantizer.quantize(t.detach()).dequantize(dtype), tensor.dtype
    )
    return result if out is None else out.copy_(result)


def set_inspector(inspector: Callable[[Linear], Callable[..., torch.Tensor] | None] | None) -> None:
    """Have every :class:`ottava.nn.Linear` ask at its forward passes what computes them; None asks
    nobody, at no cost.

    Args:
        inspector: ``inspector(layer)`` gives a function, or None to leave the layer as it is. The
            function is called with
            ``(input, weight, bias, call, dtype, kept, main_grad, observed)``: checked tensors, the
            weight ``[out, in]``, quantized if it lives so; the :class:`~ottava.nn.call.Call` of
            this pass, whose ``state`` is None in high precision, where nothing has been checked and
            torch.autocast is as it was; the dtype to compute in; the weight as an earlier
            microbatch quantized it, or None; what the gradient of the weight is added to, or None;
            and whether a compiler or a mode looks on. It gives ``[*, out]``.
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
            what = (
                f"recipe {spec.name!r} lists the format {fp8_format!r} and has no quantizer for it"
            )
            raise PluginError(what, expected="a quantizer from its fake_quantizer()")
        return quantizer.copy()
    known = sorted({*_PER_TENSOR, *(name for spec in specs for name in spec.fake_quant_formats)})
    # A recipe's package is named after it, and so are its formats.
    found = re.fullmatch(f"(.+)({E4M3.name}|{E5M2.name})", fp8_format)
    remedy = f"pip install ottava-recipes-{found[1].lower()}" if found else ""
    raise OptionError(
        f"no installed recipe serves the format {fp8_format!r}",
        expected=", ".join(known),
        remedy=remedy,
    )
