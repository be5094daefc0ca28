"""The Hadamard transform of groups, in plain PyTorch."""

import math

import torch

from ottava.kernels.checks import Tensor
from ottava.layout import Rotation


def rotated(matrix: Tensor, rotation: Rotation, dtype: torch.dtype) -> Tensor:
    """Each row in groups of ``rotation.size``: ``x · diag(signs) · H / sqrt(size)``, as float32.

    Sums are float32, by the butterfly: strides 1, 2, 4 and so on. They are multiplied by
    ``float32(1 / sqrt(size))``, and rounded to ``dtype`` once.

    Args:
        matrix: float32. A ragged last group is padded with zeros, which the result includes.
        dtype: that of the values that are quantized.
    """
    size = rotation.size
    missing = -matrix.shape[1] % size
    padded = torch.nn.functional.pad(matrix, [0, missing])
    groups = padded.unflatten(1, (padded.shape[1] // size, size))
    bits = [-1.0 if rotation.signs >> i & 1 else 1.0 for i in range(size)]
    sums = groups * torch.tensor(bits, dtype=torch.float32, device=matrix.device)
    stride = 1
    while stride < size:
        first, second = sums.unflatten(2, (size // (2 * stride), 2, stride)).unbind(3)
        sums = torch.stack([first + second, first - second], 3).flatten(2)
        stride *= 2
    factor = torch.tensor(1.0 / math.sqrt(size), dtype=torch.float32, device=matrix.device)
    result: Tensor = (sums * factor).to(dtype).to(torch.float32).flatten(1)
    return result
