"""What the device of a tensor is capable of."""

from __future__ import annotations

import torch

_capabilities: dict[int, tuple[int, int]] = {}


def capability_of_index(index: int) -> tuple[int, int]:
    """The compute capability of the GPU with this index, a constant to compiled code."""
    found = _capabilities.get(index)
    if found is None:
        found = _capabilities[index] = torch.cuda.get_device_capability(index)
    return found


# What torch.compiler.assume_constant_result sets; calling that one would import the compiler. The compiler cannot
# trace a question to the driver.
capability_of_index._dynamo_marked_constant = True  # type: ignore[attr-defined]


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The compute capability of the NVIDIA GPU that ``tensor`` is on; ``(0, 0)`` for every other device."""
    if not tensor.is_cuda or torch.version.hip is not None:
        return 0, 0
    return capability_of_index(tensor.get_device())
