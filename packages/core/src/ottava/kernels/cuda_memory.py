"""What the compiled module of the CUDA backend is told of tensors: devices and streams, addresses, dtypes, sizes."""

from __future__ import annotations

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def place(x: torch.Tensor) -> tuple[int, int]:
    """The number of the device of ``x`` and the address of its current stream."""
    device = x.get_device()
    return device, torch._C._cuda_getCurrentRawStream(device)


def pointer(tensor: torch.Tensor | None) -> int:
    """The address of the elements, 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def matrix(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of ``[*leading, K]``."""
    columns = x.shape[-1] if x.dim() else 1
    return (x.numel() // columns if columns else 0), columns
