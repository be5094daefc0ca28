"""Compares the host's time for an eager step of a linear layer with that of ``torch.nn.Linear``.

``python -m benchmarks.host`` prints the table. Shapes are small, so that the time is spent in
Python, in allocations and in launches. The alternatives run in turns, in short bursts of calls. The
fastest burst of each counts, because other work of the machine can only slow a burst.

On a GPU the host waits for the device only between bursts, so the device's own work is not in the
figures. On a CPU, with one thread, the figures include the kernels on both sides. In the rows
"no kernels" the compiled module's functions that quantize return earlier results, and a product is
only torch's; operations of a recipe in plain PyTorch remain.

A single layer begins a step of its own with each forward pass, so its figures include the update of
delayed scaling once for this layer instead of once for a model. The column "Python calls" counts
the calls in one step that ``sys.setprofile`` sees, including torch's own.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import ottava
from benchmarks.installed import recipes
from ottava.kernels.backends import backend_for, backend_module, changed

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Run = Callable[[], object]


def bursts(runs: Mapping[str, Run], wait: Run, *, rounds: int, calls: int) -> dict[str, float]:
    """Seconds of a call of each alternative, in the fastest of ``rounds`` bursts of ``calls``.

    One burst before them is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    generator = random.Random(0)
    for turn in range(1 + rounds):
        # The order changes, because an alternative finds the caches as its predecessor left them.
        generator.shuffle(order)
        for name, run in order:
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            elapsed = time.perf_counter() - start
            if turn:
                times[name].append(elapsed / calls)
    wait()
    return {name: min(values) for name, values in times.items()}


def python_calls(run: Run) -> int:
    """The number of Python functions that a call enters."""
    run()
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    # The call of run itself is not counted.
    return count - 1


class _Idle:
    """Replaces the compiled module; its functions for layers repeat their first results."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._native, name)
        if not name.endswith("_operand"):
            return function
        results: dict[Any, Any] = {}

        def once(x: torch.Tensor, *rest: Any) -> Any:
            # The first of these arguments is the format, the plan or the scale; the last two say
            # which directions are wanted.
            key = x.shape, id(rest[0]), rest[-2:]
            try:
                return results[key]
            except KeyError:
                return results.setdefault(key, function(x, *rest))

        self.__dict__[name] = once
        return once

    def ProductPlan(
        self, left: Any, right: Any, multiply: object, dtype: torch.dtype, finished: int
    ) -> Any:
        mm = partial(torch.mm, left[-1], right[-1])
        return mm if left[-1].dtype is dtype else lambda: mm().to(dtype)

    def planned_product(self, plan: Callable[[], torch.Tensor], *_: Any) -> torch.Tensor:
        return plan()

    def update_slots(self, *_: Any) -> bool:
        return True


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside a ``with`` block layers on a CPU compute only torch's products, of stale values."""
    backend = backend_module("cpu")
    backend.native = _Idle(backend.native)
    changed()
    try:
        yield
    finally:
        del backend.native
        changed()


def _steps(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Run]:
    """The calls of a layer that are timed, by name.

    ``forward, weight kept`` is a later microbatch of a step, if the layer has microbatches.
    """
    leaf = x.clone().requires_grad_()

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = layer(x)
        return result

    def backward() -> None:
        layer(leaf).backward(dy)

    later_microbatch: Run = lambda: layer(leaf)  # noqa: E731
    if isinstance(layer, ottava.nn.Linear):
        layer(leaf, is_first_microbatch=True)
        later_microbatch = lambda: layer(leaf, is_first_microbatch=False)  # noqa: E731
    return {
        "forward, no_grad": without_gradients,
        "forward": lambda: layer(leaf),
        "forward, weight kept": later_microbatch,
        "forward and backward": backward,
    }


def measure(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    rounds: int = 300,
    calls: int = 10,
) -> list[dict[str, object]]:
    """One row for each kind of step and each installed recipe.

    A row has the number of Python calls, the microseconds, and their ratio to ``nn.Linear``'s.

    Args:
        shape: rows of the input, features in, features out.
        dtype: the dtype of the layers.
        device: their device.
        rounds: the number of bursts of each alternative.
        calls: the number of calls in a burst.
    """
    rows, features_in, features_out = shape
    x = torch.randn(rows, features_in, dtype=dtype, device=device)
    dy = torch.randn(rows, features_out, dtype=dtype, device=device)
    layers: dict[str, torch.nn.Module] = {
        "nn.Linear": torch.nn.Linear(features_in, features_out, dtype=dtype, device=device)
    }
    for name in recipes():
        layers[name] = ottava.nn.Linear(
            features_in, features_out, dtype=dtype, device=device, recipe=name
        )
    steps = {name: _steps(layer, x, dy) for name, layer in layers.items()}

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    table: list[dict[str, object]] = []

    def add(step: str, title: str) -> None:
        runs = {name: own[step] for name, own in steps.items()}
        calls_of = {name: python_calls(run) for name, run in runs.items()}
        seconds = bursts(runs, wait, rounds=rounds, calls=calls)
        for name, value in seconds.items():
            row = {
                "step": title,
                "recipe": name,
                "Python calls": calls_of[name],
                "microseconds": 1e6 * value,
            }
            table.append(row | {"times nn.Linear": value / seconds["nn.Linear"]})

    for step in steps["nn.Linear"]:
        add(step, step)
    if backend_for(device.type) == "cpu":
        with without_kernels():
            for step in ("forward", "forward and backward"):
                add(step, f"{step}, no kernels")
    return table


def text_of(rows: list[dict[str, object]]) -> str:
    """The rows as a table of text."""
    cells = [list(rows[0])] + [
        [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32")
    parser.add_argument(
        "--shape", type=int, nargs=3, metavar=("ROWS", "IN", "OUT"), default=(16, 64, 64)
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device {options.device}: torch {torch.__version__} sees no GPU; expected cpu"
        )
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = tuple(options.shape)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread"
    print(
        f"Host time, {'x'.join(map(str, shape))}, {options.dtype}, {name}, torch "
        f"{torch.__version__}\n"
    )
    print(
        text_of(
            measure(
                shape, _DTYPES[options.dtype], device, rounds=options.rounds, calls=options.calls
            )
        )
    )


if __name__ == "__main__":
    main()
