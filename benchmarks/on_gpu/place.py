"""Where the checks run: a GPU with the CUDA backend, or, to rehearse, the CPU in its place."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.on_gpu.inputs import placed
from ottava.kernels import use_backend

Outputs = Sequence[torch.Tensor]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that torch allocates is filled: with NaN, with 255. What a kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Gpu:
    """A GPU and the backend ``cuda``."""

    rehearsal = False

    def __init__(self, index: int = 0) -> None:
        self.device, self.name = torch.device("cuda", index), f"GPU {index}"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy there, with the same strides and offset."""
        return placed(tensor, self.device)

    def serving(self) -> AbstractContextManager[Any]:
        """The backend that is checked; an error, not the reference, if it is not there."""
        return use_backend("cuda")

    def synchronize(self) -> None:
        """Waits; an error of a kernel comes up here at the latest."""
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """A stream of its own that begins busy, so that whatever is queued elsewhere runs before."""
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            torch.cuda._sleep(20_000_000)
            yield
        torch.cuda.synchronize(self.device)

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """A graph of what ``run`` queues: its result, which every replay writes anew, and the replay."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        return results, graph.replay

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """An operation of torch's that waits for the GPU is an error inside."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def memory(self) -> int:
        """Bytes that are allocated now."""
        gc.collect()
        return torch.cuda.memory_allocated(self.device)

    def peak_memory(self, run: Callable[[], Any]) -> int:
        """The most bytes that were allocated at a time in ``run``, beyond those before it."""
        gc.collect()  # what an earlier run left in cycles is not to be freed in this one
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


class Rehearsal(Gpu):
    """The CPU in a GPU's place, so that the checks themselves are run where there is none."""

    rehearsal = True

    def __init__(self, serving: Callable[[], AbstractContextManager[Any]], name: str) -> None:
        self.device, self._serving, self.name = torch.device("cpu"), serving, name

    def serving(self) -> AbstractContextManager[Any]:
        return self._serving()

    def synchronize(self) -> None:
        pass

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        run()
        results = run()

        def replay() -> None:
            for kept, made in zip(
                torch.utils._pytree.tree_leaves(results), torch.utils._pytree.tree_leaves(run()), strict=True
            ):
                if isinstance(kept, torch.Tensor):
                    kept.copy_(made)

        return results, replay

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        yield

    def memory(self) -> int:
        return 0

    def peak_memory(self, run: Callable[[], Any]) -> int:
        run()
        return 0
