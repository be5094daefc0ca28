"""What has to happen when Ctrl-C comes, in whatever moment."""

import signal
import threading
from collections.abc import Callable
from typing import Any

from ottava.filesystem import uninterrupted


class InterruptCleanup:
    """Calls ``cleanup`` before an interrupt is raised, from :meth:`begin` to :meth:`end`.

    The ``__exit__`` of a block is not enough for that: an interrupt may come as it is called,
    before its first statement. Only the main thread of a process is interrupted; elsewhere this
    does nothing.

    Args:
        cleanup: called without arguments, perhaps more than once.

    Attributes:
        done: whether an interrupt came, and ``cleanup`` was called for it.
    """

    def __init__(self, cleanup: Callable[[], None]) -> None:
        self.done = False
        self._cleanup = cleanup
        self._before: Any = None

    def begin(self) -> None:
        """Stand in the place of the handler of SIGINT, which is called as ever."""
        before = signal.getsignal(signal.SIGINT)
        # Others, which are not written in Python, raise nothing.
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Give SIGINT its handler again, unless another one was set meanwhile."""
        handler: Any = signal.getsignal(signal.SIGINT)
        if handler is self:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, number: int, frame: Any) -> Any:
        """The handler: what that of before does, and the cleanup where it raises."""
        try:
            return self._before(number, frame)
        except BaseException:
            with uninterrupted():
                self.done = True
                self._cleanup()
            self.end()
            raise
