"""Features that change products: fake quantization, and switches for high precision."""

from typing import Any, ClassVar

import torch
from nvdlfw_inspect.registry import api_method  # type: ignore[import-untyped]

from ottava.debug import fake_quantize
from ottava.errors import OptionError
from ottava_debug.features.base import Feature, Modifying
from ottava_debug.located import Check, kind_of


def _format(value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"is {kind_of(value)}", expected="the name of a format, as FP8E4M3")
    try:
        fake_quantize(torch.zeros(1), value)
    except OptionError as error:
        raise OptionError(
            f"is {value!r}: {error.what}", expected=error.expected, remedy=error.remedy
        ) from error
    return value


class _HighPrecision(Feature):
    """Computes the products that the configuration names in high precision."""

    @api_method  # type: ignore[untyped-decorator]
    def fp8_gemm_enabled(self, config: Any, layer_name: str, gemm: str, iteration: int = 0) -> bool:
        """False: the product is computed in high precision."""
        return False


class FakeQuant(_HighPrecision, Modifying):
    """Computes products in high precision, with tensors that were quantized and dequantized before.

    Options: ``gemms`` or ``gemms_struct``, ``tensors`` or ``tensors_struct``, and ``quant_format``,
    the name of a format of :func:`ottava.debug.fake_quantize`. The named products take no quantized
    operands.
    """

    options: ClassVar[dict[str, Check]] = {"quant_format": _format}
    required = ("quant_format",)

    @api_method  # type: ignore[untyped-decorator]
    def modify_tensor(
        self,
        config: Any,
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensor, quantized and dequantized in the format ``config["quant_format"]``."""
        return fake_quantize(tensor, config["quant_format"], out)


class DisableFP8GEMM(_HighPrecision):
    """Computes the products ``gemms``, a list of fprop, dgrad and wgrad, in high precision."""

    by_gemm = True


class DisableFP8Layer(_HighPrecision):
    """Computes all products of a layer in high precision."""


class DisableQuantizationGEMM(DisableFP8GEMM):
    """The newer name of :class:`DisableFP8GEMM`."""


class DisableQuantizationLayer(DisableFP8Layer):
    """The newer name of :class:`DisableFP8Layer`."""
