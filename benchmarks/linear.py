"""A linear layer, forward and backward, against ``torch.nn.Linear`` in bf16."""

from __future__ import annotations

import torch

import ottava
from benchmarks.timing import interleaved


def _saved_bytes(layer: torch.nn.Module, x: torch.Tensor) -> int:
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(held.values())


def measure(n: int, rounds: int) -> list[dict[str, object]]:
    """One row for each installed recipe: time and bytes saved for backward, relative to bf16."""
    x = torch.randn(n, n).bfloat16().requires_grad_()
    dy = torch.randn(n, n).bfloat16()
    plain = torch.nn.Linear(n, n, dtype=torch.bfloat16)
    layers: dict[str, torch.nn.Module] = {"bf16": plain}
    for spec in ottava.list_recipes():
        layers[spec.name] = ottava.nn.Linear(n, n, dtype=torch.bfloat16, recipe=spec.name)

    def step(layer: torch.nn.Module) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(dy)

    seconds = interleaved({name: lambda layer=layer: step(layer) for name, layer in layers.items()}, rounds=rounds)
    base = _saved_bytes(plain, x)
    return [
        {
            "recipe": name,
            "milliseconds": 1e3 * seconds[name],
            "times bf16": seconds[name] / seconds["bf16"],
            "saved bytes, of bf16": _saved_bytes(layer, x) / base,
        }
        for name, layer in layers.items()
    ]
