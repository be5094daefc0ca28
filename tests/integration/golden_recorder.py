"""What golden programs are made of: batches and nets whose sums are exact, and what writes down
what they do."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import ottava
from tests.ranks import Counted

FILE = Path(__file__).with_name("golden.json")
SIZE, ROWS = 8, 2


def batch(step: int, rank: int = 0) -> torch.Tensor:
    """Small integers, in each step of another magnitude, on each rank others."""
    steps = (
        torch.arange(ROWS * SIZE).mul_(29).add_(13 * step + 17 * rank + 5).remainder_(41).sub_(20)
    )
    return steps.view(ROWS, SIZE) * 2.0 ** ((2 * step + rank) % 3)


def layer(seed: int, *, single: bool = False) -> ottava.nn.Linear:
    """No bias, and a weight with two entries in each row and column, or a single one, halves of
    small integers."""
    made = ottava.nn.Linear(SIZE, SIZE, bias=False)
    places = torch.arange(SIZE)
    with torch.no_grad():
        made.weight.zero_()
        made.weight[places, places] = ((5 * places + 3 * seed) % 13 - 6.5) * 2.0 ** -(seed % 2)
        if not single:
            made.weight[places, (places + 1 + seed % 3) % SIZE] = (
                (7 * places + seed) % 9 - 4.5
            ) * 2.0 ** -(seed % 2)
    return made


class Net(torch.nn.Module):
    """Two layers, the first one recomputed in the backward pass if asked for, or used twice."""

    def __init__(
        self, seed: int = 0, *, reentrant: bool | None = None, twice: bool = False
    ) -> None:
        super().__init__()
        self.a, self.b = layer(seed), layer(seed + 1)
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        for _ in range(1 + self.twice):
            if self.reentrant is None:
                x = self.a(x, first)
            else:
                x = checkpoint(self.a, x, first, use_reentrant=self.reentrant)
        return self.b(torch.relu(x), first)


def numbers(values: torch.Tensor) -> Any:
    """A list, of the shortest numbers that give float32 values exactly."""
    if values.dim():
        return [numbers(value) for value in values]
    return float(str(values.numpy())) if values.is_floating_point() else values.item()


class Recorder:
    """Writes down after each event what it changed."""

    def __init__(self, rank: int) -> None:
        self.rank, self.counted = rank, Counted()
        self.events: list[dict[str, Any]] = []
        self.nets: dict[str, torch.nn.Module] = {}
        self.watched: list[weakref.ref[torch.nn.Module]] = []
        # Whether the forward pass of a step leaves it to the recomputation to record: its amaxes
        # are then not compared.
        self.recomputed = False
        self.before: dict[str, Any] = {}

    def watch(self, *, reentrant: bool | None = None, **nets: Any) -> None:
        """Reentrant checkpointing is free to see amaxes in the forward pass or in the
        recomputation."""
        self.nets, self.recomputed = nets, bool(reentrant)
        self.watched += [weakref.ref(module) for net in nets.values() for module in net.modules()]

    def event(self, name: str, *, whole: bool = True, **seen: Any) -> None:
        state = {
            f"{net}.{key.replace('.recipe_state', '')}": numbers(value)
            for net, module in self.nets.items()
            for key, value in module.state_dict().items()
            if "recipe_state" in key and (whole or key.endswith("scale"))
        }
        changed = {key: value for key, value in state.items() if self.before.get(key) != value}
        self.before |= state
        self.events.append(
            {"event": name, "reductions": self.counted.count, **seen, "changed": changed}
        )

    def forward(
        self, name: str, run: Callable[[torch.Tensor], torch.Tensor], step: int
    ) -> torch.Tensor:
        """A forward pass, and its loss."""
        return self.loss(
            name, run(batch(step, self.rank).requires_grad_(torch.is_grad_enabled())), step
        )

    def loss(self, name: str, y: torch.Tensor, step: int) -> torch.Tensor:
        targets = (
            torch.arange(ROWS * SIZE).mul_(11).add_(3 * step).remainder_(7).sub_(3).view(ROWS, SIZE)
        )
        loss = (y.double() * targets * 2.0 ** (step % 2)).sum()
        self.event(name, whole=not self.recomputed, loss=loss.item())
        return loss

    def backward(self, name: str, loss: torch.Tensor) -> None:
        """A backward pass, the largest gradients of the weights, and an update of these."""
        loss.backward()
        weights = [p for net in self.nets.values() for p in net.parameters()]
        self.event(
            name,
            gradients=[0.0 if p.grad is None else numbers(p.grad.abs().max()) for p in weights],
        )
        for number, p in enumerate(weights):
            p.grad = None
            with torch.no_grad():
                p.mul_(2.0 if number % 2 else 0.5)

    def step(self, step: int, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.backward(f"backward {step}", self.forward(f"forward {step}", run, step))


def wait_for_the_end_of(layers: list[Any]) -> None:
    """Ranks would reduce the amaxes of layers that still exist on one of them; a thread may be
    about to let go.

    Raises:
        RuntimeError: something holds a layer.
    """
    for _ in range(30):
        if all(layer() is None for layer in layers):
            return
        gc.collect()
        time.sleep(0.005)
    raise RuntimeError("the layers of a program do not go")


def as_text(found: dict[str, list[dict[str, Any]]]) -> str:
    """Records as a file has them: equal ones once, an event to a line."""
    together: dict[str, list[str]] = {}
    for name, events in found.items():
        lines = ",\n".join(f"  {json.dumps(event, separators=(',', ':'))}" for event in events)
        together.setdefault(lines, []).append(name)
    shown = [
        f'{{"runs": {json.dumps(names)}, "events": [\n{lines}\n]}}'
        for lines, names in together.items()
    ]
    return "[\n" + ",\n".join(shown) + "\n]\n"


def known() -> dict[str, list[dict[str, Any]]]:
    """The records of the file, by recipe and program."""
    return {
        name: entry["events"] for entry in json.loads(FILE.read_text()) for name in entry["runs"]
    }
