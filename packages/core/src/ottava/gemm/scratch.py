"""Memory that decoded operands take turns in: fresh memory for each costs page faults, a third of
the time of a small layer."""

from __future__ import annotations

import threading

import torch

Tensor = torch.Tensor


class Scratch(threading.local):
    """Two buffers of a thread, one for each side of its current product."""

    #: Bytes. A larger operand gets memory of its own, since its product takes much longer than the
    #: page faults.
    LARGEST = 32 << 20

    def __init__(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

    def empty(self, place: int, data: Tensor, per_byte: int, dtype: torch.dtype) -> Tensor:
        """Memory for the values of ``data`` of side ``place`` (0 or 1) of a product, until the next
        product of this thread.

        Args:
            per_byte: how many values a byte of the last dimension has.
        """
        shape = (*data.shape[:-1], data.shape[-1] * per_byte)
        size = data.numel() * per_byte * dtype.itemsize
        if data.device.type != "cpu" or size > self.LARGEST:
            return data.new_empty(shape, dtype=dtype)
        if self.buffers[place].numel() < size:
            self._grow(place, size)
        return self.buffers[place][:size].view(dtype).view(shape)

    def _grow(self, place: int, size: int) -> None:
        # Products that were planned before keep the buffers of their time alive. The powers of two
        # up to the largest add up to twice that.
        power = 1 << (size - 1).bit_length()
        with torch.inference_mode(False):
            self.buffers[place] = torch.empty(power, dtype=torch.uint8, device="cpu")


scratch = Scratch()
