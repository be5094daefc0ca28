"""What the device of a tensor is capable of."""

from __future__ import annotations

import torch

from ottava.torch_private import constant_to_compiler

_capabilities: dict[int, int] = {}


@constant_to_compiler
def capability_of_index(index: int) -> int:
    """The compute capability of the GPU with this index, a constant to compiled code: 89 for 8.9.

    The compiler cannot trace a question to the driver. A number, because that of torch 2.11 cannot order such
    constants that are tuples.
    """
    found = _capabilities.get(index)
    if found is None:
        major, minor = torch.cuda.get_device_capability(index)
        found = _capabilities[index] = 10 * major + minor
    return found


def capability(tensor: torch.Tensor) -> int:
    """The compute capability of the NVIDIA GPU that ``tensor`` is on, 89 for 8.9; 0 for every other device."""
    if not tensor.is_cuda or torch.version.hip is not None:
        return 0
    return capability_of_index(tensor.get_device())
