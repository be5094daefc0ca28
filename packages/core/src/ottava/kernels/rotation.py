"""The Hadamard transform of groups, in plain PyTorch."""

import math

import torch

from ottava.kernels.checks import Tensor
from ottava.layout import Rotation


def _sums(groups: Tensor) -> Tensor:
    """Each group times Sylvester's matrix, in float32, by the butterfly: strides 1, 2, 4 and so
    on."""
    size = groups.shape[2]
    stride = 1
    while stride < size:
        first, second = groups.unflatten(2, (size // (2 * stride), 2, stride)).unbind(3)
        groups = torch.stack([first + second, first - second], 3).flatten(2)
        stride *= 2
    return groups


def _signs(rotation: Rotation, device: torch.device) -> Tensor:
    bits = [-1.0 if rotation.signs >> i & 1 else 1.0 for i in range(rotation.size)]
    return torch.tensor(bits, dtype=torch.float32, device=device)


def _factor(rotation: Rotation) -> float:
    """``float32(1 / sqrt(size))``."""
    return float(torch.tensor(1.0 / math.sqrt(rotation.size), dtype=torch.float32))


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
    sums = _sums(groups * _signs(rotation, matrix.device)) * _factor(rotation)
    result: Tensor = sums.to(dtype).to(torch.float32).flatten(1)
    return result


def unrotated(matrix: Tensor, rotation: Rotation) -> Tensor:
    """The inverse of :func:`rotated` in float32: ``x · H / sqrt(size) · diag(signs)``.

    Args:
        matrix: float32, with whole groups.
    """
    groups = matrix.unflatten(1, (matrix.shape[1] // rotation.size, rotation.size))
    values = _sums(groups) * _factor(rotation) * _signs(rotation, matrix.device)
    result: Tensor = values.flatten(1)
    return result
