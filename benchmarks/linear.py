"""The table of linear layers, forward and backward: torch's, every recipe's, and torchao's where it
is installed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

import ottava
from benchmarks.installed import recipes
from benchmarks.timing import Row, Run, Timing

Make = Callable[[int, torch.device], torch.nn.Module]


def _torch(dtype: torch.dtype) -> Make:
    return lambda n, device: torch.nn.Linear(n, n, bias=False, device=device, dtype=dtype)


def _ottava(recipe: str) -> Make:
    return lambda n, device: ottava.nn.Linear(
        n, n, bias=False, device=device, dtype=torch.bfloat16, recipe=recipe
    )


def _torchao(recipe: str) -> Make:
    """To be installed by hand, for the measurement."""

    def make(n: int, device: torch.device) -> torch.nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = torch.nn.Sequential(_torch(torch.bfloat16)(n, device))
        made: torch.nn.Module = convert_to_float8_training(
            model, config=Float8LinearConfig.from_recipe_name(recipe)
        )
        return made

    return make


def alternatives() -> dict[str, Make]:
    """Name -> what makes the layer. Each can be had compiled besides: its name with " compiled"."""
    return {
        "bf16": _torch(torch.bfloat16),
        "float32": _torch(torch.float32),
        **{name: _ottava(name) for name in recipes()},
        "torchao tensorwise": _torchao("tensorwise"),
        "torchao rowwise": _torchao("rowwise"),
    }


#: What is timed on a CPU, with every recipe that is installed, and the sizes M = K = N.
PEERS = ("torchao tensorwise", "torchao tensorwise compiled")
SIZES = (512, 1024, 2048)
# Up to this size: where FP8 products go to the reference loops of oneDNN, theirs take minutes at
# 2048.
_LARGEST_OF_PEERS = 1024


def _step(module: torch.nn.Module, call: Any, n: int, device: torch.device) -> Run:
    weight = next(module.parameters())
    x, dy = (torch.randn(n, n, device=device).to(weight.dtype) for _ in range(2))
    x.requires_grad_()

    def run() -> None:
        weight.grad = x.grad = None
        # As after an optimizer's step, so that nobody takes the weight for one that was quantized
        # before.
        weight.detach().view(-1)[:0].zero_()
        call(x).backward(dy)

    return run


def _made(name: str, n: int, device: torch.device, compiler: str) -> Run:
    module = alternatives()[name.removesuffix(" compiled")](n, device)
    if not name.endswith(" compiled"):
        return _step(module, module, n, device)
    return _step(
        module, torch.compile(module, backend=compiler, fullgraph=True, dynamic=False), n, device
    )


def timing(
    n: int,
    names: Iterable[str] = (),
    device: torch.device | None = None,
    *,
    compiler: str = "inductor",
) -> Timing:
    """All layers named, at M = K = N; by default those for a CPU."""
    place = device or torch.device("cpu")
    # Each size and recipe is a compilation of the same function: beyond a number of them torch
    # refuses.
    torch.compiler.reset()
    chosen = list(names) or [
        "bf16",
        "float32",
        *recipes(),
        *(PEERS if n <= _LARGEST_OF_PEERS else ()),
    ]
    return Timing(
        str(n),
        {name: lambda name=name: _made(name, n, place, compiler) for name in chosen},
        flops=6.0 * n**3,
    )


def saved_bytes(forward: Callable[[], torch.Tensor], device: torch.device | None = None) -> int:
    """What a forward pass keeps for the backward pass, beside its result.

    On a GPU what stays allocated while the result lives; elsewhere, where no allocator says, what
    autograd is given.
    """
    if device is not None and device.type == "cuda":
        gc.collect()  # what an earlier run left in cycles is not to be freed in this one
        before, result = torch.cuda.memory_allocated(device), forward()
        return torch.cuda.memory_allocated(device) - result.nbytes - before
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(held.values())


def _saved(name: str, n: int) -> int:
    layer = alternatives()[name](n, torch.device("cpu"))
    x = torch.randn(n, n).to(next(layer.parameters()).dtype).requires_grad_()
    return saved_bytes(lambda: layer(x))


def table(rows: list[Row]) -> list[Row]:
    """For each size and layer milliseconds, times torch's layers, and bytes saved for backward."""
    made = []
    for row in rows:
        n, seconds = int(row["name"]), row["seconds"]
        for name, value in seconds.items():
            eager = not name.startswith("torchao") and not name.endswith("compiled")
            made.append(
                {
                    "M = K = N": n,
                    "layer": name,
                    "milliseconds": 1e3 * value,
                    "times bf16": value / seconds["bf16"],
                    "times float32": value / seconds["float32"],
                    "saved bytes, of bf16": _saved(name, n) / _saved("bf16", n) if eager else None,
                }
            )
    return made
