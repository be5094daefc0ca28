"""What the CUDA module is told of tensors: their devices and streams, and what every module is told."""

from __future__ import annotations

import torch

from ottava.kernels.addresses import DTYPE_CODES, matrix, pointer
from ottava.torch_private import raw_stream

__all__ = ["DTYPE_CODES", "matrix", "place", "pointer"]


def place(x: torch.Tensor) -> tuple[int, int]:
    """The number of the device of ``x`` and the address of its current stream."""
    device = x.get_device()
    return device, raw_stream(device)
