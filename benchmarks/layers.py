"""Times linear layers: whole steps of large ones, and the host's part of steps of small ones."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import ottava
from benchmarks.installed import recipes
from benchmarks.timing import Row, Run, Timing, ready

CPU = torch.device("cpu")
Make = Callable[[int, torch.device], torch.nn.Module]


def _torch(dtype: torch.dtype) -> Make:
    return lambda n, device: torch.nn.Linear(n, n, bias=False, device=device, dtype=dtype)


def _ottava(recipe: str) -> Make:
    return lambda n, device: ottava.nn.Linear(
        n, n, bias=False, device=device, dtype=torch.bfloat16, recipe=recipe
    )


def _torchao(recipe: str) -> Make:
    """A layer of torchao, which is installed by hand for the measurement."""

    def make(n: int, device: torch.device) -> torch.nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = torch.nn.Sequential(_torch(torch.bfloat16)(n, device))
        config = Float8LinearConfig.from_recipe_name(recipe)
        float8_model: torch.nn.Module = convert_to_float8_training(model, config=config)
        return float8_model

    return make


def alternatives() -> dict[str, Make]:
    """The functions that make the layers, by name.

    A name followed by " compiled" stands for the same layer through torch.compile.
    """
    return {
        "bf16": _torch(torch.bfloat16),
        "float32": _torch(torch.float32),
        **{name: _ottava(name) for name in recipes()},
        "torchao tensorwise": _torchao("tensorwise"),
        "torchao rowwise": _torchao("rowwise"),
    }


def _runnable(name: str, n: int, device: torch.device, compiler: str) -> Run:
    module = alternatives()[name.removesuffix(" compiled")](n, device)
    call: Any = module
    if name.endswith(" compiled"):
        call = torch.compile(module, backend=compiler, fullgraph=True, dynamic=False)
    weight = next(module.parameters())
    x, dy = (torch.randn(n, n, device=device).to(weight.dtype) for _ in range(2))
    x.requires_grad_()

    def run() -> None:
        weight.grad = x.grad = None
        # The weight counts as written, as after an optimizer's step, so that no layer reuses an
        # earlier quantization of it.
        weight.detach().view(-1)[:0].zero_()
        call(x).backward(dy)

    return run


def timing(
    n: int, names: Iterable[str], device: torch.device = CPU, compiler: str = "inductor"
) -> Timing:
    """The timing of a forward and a backward pass of these layers at M = K = N = ``n``."""
    names = list(names)
    if any(name.endswith(" compiled") for name in names):
        # Each size and recipe compiles the same function again, and torch limits the number of
        # recompilations.
        torch.compiler.reset()
    runs = {name: partial(_runnable, name, n, device, compiler) for name in names}
    return Timing(str(n), runs)


def timings(sizes: Iterable[int]) -> list[Timing]:
    """A row for each size, with the bytes that eager layers save for the backward pass."""
    names = ["bf16", "float32", *recipes()]
    return [
        replace(timing(n, names), figures={name: partial(_saved_bytes, name, n) for name in names})
        for n in sizes
    ]


def saved_bytes(forward: Callable[[], torch.Tensor], device: torch.device = CPU) -> int:
    """The bytes that a forward pass keeps for the backward pass, besides its result.

    On a GPU they are the memory that stays allocated while the result lives. Elsewhere there is no
    such count, and they are the memory of the tensors that autograd saves.
    """
    if device.type == "cuda":
        # Cycles that an earlier run left must not be freed during this one.
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        result = forward()
        return torch.cuda.memory_allocated(device) - result.nbytes - before
    bytes_of: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        bytes_of[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(bytes_of.values())


def _saved_bytes(name: str, n: int) -> int:
    layer = alternatives()[name](n, CPU)
    x = torch.randn(n, n).to(next(layer.parameters()).dtype).requires_grad_()
    return saved_bytes(lambda: layer(x))


def table(rows: list[Row]) -> list[Row]:
    """For each size and layer: milliseconds, ratios to torch's layers, bytes saved for backward."""
    table_rows = []
    for row in rows:
        seconds, saved = row["seconds"], row["figures"]
        for name, value in seconds.items():
            table_rows.append(
                {
                    "M = K = N": int(row["name"]),
                    "layer": name,
                    "milliseconds": 1e3 * value,
                    "times bf16": value / seconds["bf16"],
                    "times float32": value / seconds["float32"],
                    "saved bytes, of bf16": saved[name] / saved["bf16"],
                }
            )
    return table_rows


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


def _steps(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Run]:
    """The calls of a layer that are timed, by name.

    ``forward, weight kept`` is a later microbatch of a step, if the layer has microbatches.
    """
    leaf = x.clone().requires_grad_()

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = layer(x)
        return result

    later: dict[str, bool] = {}
    if isinstance(layer, ottava.nn.Linear):
        layer(leaf, is_first_microbatch=True)
        later = {"is_first_microbatch": False}
    return {
        "forward, no_grad": without_gradients,
        "forward": lambda: layer(leaf),
        "forward, weight kept": lambda: layer(leaf, **later),
        "forward and backward": lambda: layer(leaf).backward(dy),
    }


def host_timings(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Timing]:
    """A row for each kind of step of a small layer, with the number of Python calls.

    Layers are so small that the time is spent in Python, in allocations and in launches. On a CPU
    the times include the kernels on both sides. A single layer begins a step of its own with each
    forward pass, so the times include the update of delayed scaling once for this layer instead of
    once for a model.

    Args:
        shape: rows of the input, features in, features out.
        device: the device of the layers.
        dtype: their dtype.
    """
    rows, features_in, features_out = shape
    x = torch.randn(rows, features_in, dtype=dtype, device=device)
    dy = torch.randn(rows, features_out, dtype=dtype, device=device)
    make: dict[str, Callable[..., torch.nn.Module]] = {
        "nn.Linear": torch.nn.Linear,
        **{name: partial(ottava.nn.Linear, recipe=name) for name in recipes()},
    }
    steps = {
        name: _steps(kind(features_in, features_out, dtype=dtype, device=device), x, dy)
        for name, kind in make.items()
    }
    return [
        Timing(
            step,
            {name: ready(own[step]) for name, own in steps.items()},
            figures={name: partial(python_calls, own[step]) for name, own in steps.items()},
        )
        for step in steps["nn.Linear"]
    ]


def host_table(rows: list[Row]) -> list[Row]:
    """For each kind of step and recipe: Python calls, microseconds, and their ratio to torch's."""
    return [
        {
            "step": row["name"],
            "recipe": name,
            "Python calls": row["figures"][name],
            "microseconds": 1e6 * value,
            "times nn.Linear": value / row["seconds"]["nn.Linear"],
        }
        for row in rows
        for name, value in row["seconds"].items()
    ]
