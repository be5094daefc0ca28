"""Models whose layers are independent of each other, and what goes into them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ottava
from tests.integration.step_programs import Use
from tests.integration.step_rule import Layer, Operand

SIZE = 4
PATTERN = torch.tensor([1.0, -0.625, 0.3, 0.1375])
MAGNITUDES = (1.0, 0.37, 12.5, 700.0, 3e-4, 0.0, 2.0**90, math.inf)


def values(index: int, rank: int = 0) -> torch.Tensor:
    magnitude = MAGNITUDES[(index + 3 * rank) % len(MAGNITUDES)]
    made = PATTERN.roll(index) * (1.0 if math.isinf(magnitude) else magnitude)
    if math.isinf(magnitude):
        made[0] = -math.inf
    return made.view(1, SIZE)


def amax(x: torch.Tensor) -> float:
    return float(np.abs(x.numpy()).max())


def diagonal() -> ottava.nn.Linear:
    made = ottava.nn.Linear(SIZE, SIZE, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.eye(SIZE))
    return made


class Bank(torch.nn.Module):
    """Layers; ``run`` says which of them are used."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(diagonal() for _ in range(count))

    def forward(
        self, run: Callable[[int, torch.Tensor], torch.Tensor], *inputs: torch.Tensor
    ) -> Any:
        return tuple(run(number, x) for number, x in enumerate(inputs))


@dataclass
class Run:
    """A use of a layer, with its operands; without, where they are not quantized by delayed
    scaling."""

    use: Use
    layer: Layer
    x: torch.Tensor
    quantized_x: Operand | None = None
    quantized_w: Operand | None = None
    y: Any = None
