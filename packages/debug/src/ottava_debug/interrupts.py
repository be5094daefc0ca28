"""Cleanup that runs at any moment in which Ctrl-C interrupts the process."""

import signal
import threading
from collections.abc import Callable
from typing import Any

from ottava.filesystem import uninterrupted


class InterruptCleanup:
    """Calls ``cleanup`` when an interrupt is raised between :meth:`begin` and :meth:`end`.

    The ``__exit__`` of a block does not suffice, because an interrupt may come when ``__exit__`` is
    called, before its first statement. Only the main thread of a process is interrupted, so this
    does nothing in other threads.

    Args:
        cleanup: called without arguments, possibly more than once.

    Attributes:
        done: whether an interrupt came and ``cleanup`` was called for it.
    """

    def __init__(self, cleanup: Callable[[], None]) -> None:
        self.done = False
        self._cleanup = cleanup
        self._before: Any = None

    def begin(self) -> None:
        """Replace the handler of SIGINT by this object, which still calls that handler."""
        before = signal.getsignal(signal.SIGINT)
        # A handler that is not callable is not written in Python, and raises nothing.
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Restore the former handler of SIGINT, unless another one was set meanwhile."""
        handler: Any = signal.getsignal(signal.SIGINT)
        if handler is self:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, number: int, frame: Any) -> Any:
        """Call the former handler, and the cleanup if that handler raises."""
        try:
            return self._before(number, frame)
        except BaseException:
            with uninterrupted():
                self.done = True
                self._cleanup()
            self.end()
            raise
