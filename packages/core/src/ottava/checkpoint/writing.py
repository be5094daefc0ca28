"""New values for live tensors, all of them or none: what torch would refuse is found first, the writes are one call."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ottava.checkpoint.files import as_bytes
from ottava.checkpoint.flatten import held_tensors
from ottava.errors import UsageError
from ottava.torch_private import foreach_copy_


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; only the main thread of a process is interrupted."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def check_writable(name: str, value: Any) -> None:
    """Write one element of what a tensor holds, as it is: what torch refuses is known before any value changes."""
    for tensor in held_tensors(value):
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UsageError(f"{name!r} is an expanded view: several of its elements are one", remedy="clone it")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise UsageError(f"{name!r} was made in inference mode", remedy="load it in torch.inference_mode()")
        if tensor.numel():
            if not tensor.untyped_storage().nbytes():
                raise UsageError(f"{name!r} has no memory: its storage was resized to nothing", expected="memory")
            # Of an alias with a count of writes of its own: what autograd has saved of the tensor is still right.
            first = as_bytes(tensor.data)[(0,) * tensor.dim()]
            first.copy_(first.clone())


def write_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy into each tensor its new value, by one call into torch: no code of Python's runs in it, and no interrupt."""
    if pairs:
        targets, values = zip(*[(as_bytes(target), as_bytes(value)) for target, value in pairs], strict=True)
        with uninterrupted(), torch.no_grad():
            foreach_copy_(targets, values)
