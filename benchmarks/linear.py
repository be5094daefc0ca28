"""Times linear layers forward and backward: torch's, every recipe's, torchao's if installed.

``python -m benchmarks.linear`` prints the table; ``--sizes`` and ``--layers`` choose its rows.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

import ottava
from benchmarks.installed import recipes
from benchmarks.markdown import markdown
from benchmarks.timing import Row, Run, Timing, interleaved, measure

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
        float8_model: torch.nn.Module = convert_to_float8_training(
            model, config=Float8LinearConfig.from_recipe_name(recipe)
        )
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


#: The layers that are timed on a CPU besides torch's and those of installed recipes.
PEERS = ("torchao tensorwise", "torchao tensorwise compiled")
#: The sizes M = K = N.
SIZES = (512, 1024, 2048)
# The largest size at which peers are timed. On machines where oneDNN computes FP8 products with its
# reference loops, theirs take minutes at 2048.
_LARGEST_OF_PEERS = 1024


def _step(module: torch.nn.Module, call: Any, n: int, device: torch.device) -> Run:
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


def _runnable(name: str, n: int, device: torch.device, compiler: str) -> Run:
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
    """The timing of the layers ``names`` at M = K = N = ``n``; by default those for a CPU."""
    place = device or torch.device("cpu")
    # Each size and recipe compiles the same function again, and torch limits the number of
    # recompilations.
    torch.compiler.reset()
    selection = list(names) or [
        "bf16",
        "float32",
        *recipes(),
        *(PEERS if n <= _LARGEST_OF_PEERS else ()),
    ]
    return Timing(
        str(n),
        {name: lambda name=name: _runnable(name, n, place, compiler) for name in selection},
        flops=6.0 * n**3,
    )


def saved_bytes(forward: Callable[[], torch.Tensor], device: torch.device | None = None) -> int:
    """The bytes that a forward pass keeps for the backward pass, besides its result.

    On a GPU they are the memory that stays allocated while the result lives. Elsewhere there is no
    such count, and they are the memory of the tensors that autograd saves.
    """
    if device is not None and device.type == "cuda":
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
    layer = alternatives()[name](n, torch.device("cpu"))
    x = torch.randn(n, n).to(next(layer.parameters()).dtype).requires_grad_()
    return saved_bytes(lambda: layer(x))


def table(rows: list[Row]) -> list[Row]:
    """For each size and layer: milliseconds, ratios to torch's layers, bytes saved for backward."""
    table_rows = []
    for row in rows:
        n, seconds = int(row["name"]), row["seconds"]
        for name, value in seconds.items():
            eager = not name.startswith("torchao") and not name.endswith("compiled")
            table_rows.append(
                {
                    "M = K = N": n,
                    "layer": name,
                    "milliseconds": 1e3 * value,
                    "times bf16": value / seconds["bf16"],
                    "times float32": value / seconds["float32"],
                    "saved bytes, of bf16": _saved_bytes(name, n) / _saved_bytes("bf16", n)
                    if eager
                    else None,
                }
            )
    return table_rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument(
        "--layers", nargs="+", default=[], help="names of layers; bf16 and float32 always run"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = list(dict.fromkeys(["bf16", "float32", *options.layers])) if options.layers else []
    seconds = partial(interleaved, rounds=options.rounds)
    rows = [measure(timing(n, names), seconds) for n in options.sizes]
    print(f"Forward and backward, {options.threads} threads, torch {torch.__version__}\n")
    print(markdown(table(rows)))
    for row in rows:
        for name, error in row["errors"].items():
            print(f"\n{row['name']}, {name}: {error}")


if __name__ == "__main__":
    main()
