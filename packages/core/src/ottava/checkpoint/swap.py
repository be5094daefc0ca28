"""New values for live tensors, which take all of them or none, whatever interrupts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import torch

from ottava.checkpoint.files import as_bytes
from ottava.errors import UsageError


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; only the main thread of a process is interrupted, and can say so."""
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


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor that torch does not write to: an expanded view, or one made in inference mode."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        what = f"{name!r} is an expanded view: several of its elements are one"
        raise UsageError(what, expected="a tensor with memory of its own")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(f"{name!r} was made in inference mode", remedy="load it in torch.inference_mode()")


class Swap:
    """Writes new values into tensors, and can put the old ones back.

    An old value is kept before its tensor is written, and a new one is let go once it is written: beyond the new values
    one tensor at a time takes memory.

    Args:
        pairs: each tensor and its new value, of one shape and dtype; the list is emptied.
        written: called after writes, to tell what derives from the tensors.
    """

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], written: Callable[[], None]) -> None:
        self._pairs, self._written = pairs[::-1], written
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        pairs.clear()

    def apply(self) -> None:
        """Write all values; after an error or an interrupt, none."""
        try:
            with uninterrupted(), torch.no_grad():
                while self._pairs:
                    tensor, value = (as_bytes(each) for each in self._pairs.pop())
                    # Kept before the write, so that an undo at any moment finds it.
                    self._before.append((tensor, tensor.to(value.device, copy=True)))
                    tensor.copy_(value)
                self._written()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put the old values back, however far :meth:`apply` has come; once more changes nothing."""
        with uninterrupted(), torch.no_grad():
            # Backwards: two names may be one tensor, whose first value is the old one.
            for tensor, value in reversed(self._before):
                tensor.copy_(value)
            self._written()
