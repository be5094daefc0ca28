"""Modules that compute on quantized operands."""

from ottava.nn.conversion import HEADS, convert
from ottava.nn.converters import TransposedLinear, register_converter
from ottava.nn.linear import Linear
from ottava.nn.report import ConversionReport, conversion_report
from ottava.nn.reverting import revert
from ottava.nn.weight import microbatch, quantized_model_init

__all__ = [
    "HEADS",
    "ConversionReport",
    "Linear",
    "TransposedLinear",
    "conversion_report",
    "convert",
    "microbatch",
    "quantized_model_init",
    "register_converter",
    "revert",
]
