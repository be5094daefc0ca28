"""Modules that compute on quantized operands."""

from ottava.nn.conversion import HEADS as HEADS
from ottava.nn.conversion import convert as convert
from ottava.nn.converters import TransposedLinear as TransposedLinear
from ottava.nn.converters import register_converter as register_converter
from ottava.nn.linear import Linear as Linear
from ottava.nn.model_init import quantized_model_init as quantized_model_init
from ottava.nn.report import ConversionReport as ConversionReport
from ottava.nn.report import conversion_report as conversion_report
