"""What helps to find out what FP8 does to a model."""

from ottava.debug.fake_quant import fake_quantize

__all__ = ["fake_quantize"]
