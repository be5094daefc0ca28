"""Where cases run: a GPU with the CUDA backend, or, to rehearse, the CPU in its place."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.benchmark import Timer

from benchmarks.on_gpu.inputs import Args, Tensor, placed
from ottava.kernels import use_backend

Run = Callable[[], Any]


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that torch allocates is filled: with NaN, with 255. What a kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Gpu:
    """A GPU and the backend ``cuda``: an error, not the reference, if that is not there."""

    rehearsal, backend, compiler, rounds = False, "cuda", "inductor", 9

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)

    def serving(self) -> AbstractContextManager[None]:
        """The backend that is checked serves."""
        return use_backend(self.backend)

    def put(self, arguments: Args) -> Args:
        """Copies there, with the same strides and offsets."""
        made: Args = tree_map_only(Tensor, lambda x: placed(x, self.device), arguments)
        return made

    def synchronize(self) -> None:
        """Waits; an error of a kernel comes up here at the latest."""
        torch.cuda.synchronize(self.device)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """A stream of its own that begins busy, so that whatever is queued elsewhere runs before."""
        self.synchronize()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            torch.cuda._sleep(20_000_000)
            yield
        self.synchronize()

    def capture(self, run: Run) -> tuple[Any, Run]:
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

    def memory(self, run: Run) -> tuple[int, int]:
        """Bytes more than before ``run``: the most at a time; and those left beside its result while that lives."""
        gc.collect()  # what an earlier run left in cycles is not to be freed in this one
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before, result = torch.cuda.memory_allocated(self.device), run()
        self.synchronize()
        own = result.nbytes if isinstance(result, Tensor) else 0
        after = torch.cuda.memory_allocated(self.device) - own
        return torch.cuda.max_memory_allocated(self.device) - before, after - before

    def medians(self, runs: Mapping[str, Run], least: float = 10e-3) -> dict[str, float]:
        """Median seconds of a call of each, in turns, each of which repeats a run for about ``least`` seconds."""
        # It waits for the GPU before and after so many calls, and once warms up.
        timers = {name: Timer("run()", globals={"run": run}) for name, run in runs.items()}
        once = {name: 1.0 if self.rehearsal else timer.timeit(3).mean for name, timer in timers.items()}
        repeats = {name: min(200, max(1, round(least / seconds))) for name, seconds in once.items()}
        turns = [{name: t.timeit(repeats[name]).mean for name, t in timers.items()} for _ in range(self.rounds)]
        return {name: statistics.median(turn[name] for turn in turns) for name in runs}


class Rehearsal(Gpu):
    """The CPU in a GPU's place, so that the checks themselves are run where there is none; no figure means anything."""

    rehearsal, compiler, rounds = True, "aot_eager", 1
    side_stream = nullcontext  # type: ignore[assignment]

    def __init__(self, backend: str = "reference") -> None:
        self.device, self.backend = torch.device("cpu"), backend

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def capture(self, run: Run) -> tuple[Any, Run]:
        results = run()

        def replay() -> None:
            for kept, made in zip(tree_leaves(results), tree_leaves(run()), strict=True):
                if isinstance(kept, Tensor):
                    kept.copy_(made)

        return results, replay

    def memory(self, run: Run) -> tuple[int, int]:
        """What autograd is given: a CPU's allocator does not say what is allocated."""
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
        return 0, sum(held.values())
