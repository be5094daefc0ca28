"""What files of tensors hold, compared by bytes."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch


def same_tensors(a: Path, b: Path) -> None:
    one, two = (safetensors.torch.load_file(path) for path in (a, b))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), two[name].reshape(-1).view(torch.uint8)
        )
