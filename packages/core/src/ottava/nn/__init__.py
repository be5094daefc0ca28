"""Modules that compute on quantized operands."""

from ottava.nn.conversion import ConversionReport, conversion_report, convert
from ottava.nn.linear import Linear
from ottava.nn.model_init import quantized_model_init

__all__ = ["ConversionReport", "Linear", "conversion_report", "convert", "quantized_model_init"]
