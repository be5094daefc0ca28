"""Memory that decoded operands take turns in: fresh memory for each costs page faults, a third of
the time of a small layer."""

from __future__ import annotations

import threading
from typing import Any

import torch

Tensor = torch.Tensor


class Scratch(threading.local):
    """Two buffers of a thread, one for each side of its current product, and the plans that have
    views of them."""

    #: Bytes. A larger operand gets memory of its own, since its product takes much longer than the
    #: page faults.
    LARGEST = 32 << 20
    #: Sizes that never repeat, as those of texts, would otherwise make more and more plans.
    PLANS = 1024

    def __init__(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self.plans: dict[Any, Any] = {}

    def empty(self, place: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the shape of ``like`` for side ``place`` (0 or 1) of a product, until the next
        product of this thread."""
        size = like.numel() * dtype.itemsize
        if like.device.type != "cpu" or size > self.LARGEST:
            return like.new_empty(like.shape, dtype=dtype)
        if self.buffers[place].numel() < size:
            # Plans have views of the buffer that is replaced.
            self.plans.clear()
            with torch.inference_mode(False):
                self.buffers[place] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.buffers[place][:size].view(dtype).view(like.shape)


scratch = Scratch()
