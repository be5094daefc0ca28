"""See what FP8 does to a model."""

__version__ = "0.1.0"
