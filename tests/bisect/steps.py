"""Models, and steps of them in files."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import ottava
from ottava.recipes import QuantizerRole
from ottava_bisect import Report, capture
from ottava_custom import CurrentScalingQuantizerRef, CustomRecipe, HybridQuantizer
from ottava_custom.factories import current_scaling_ref_quantizer_factory as reference_factory

WIDTH = 16


class Stack(torch.nn.Module):
    """Layers beside each other's residuals; ``used`` scales what each adds."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(layers))
        self.register_buffer("used", torch.full((layers, WIDTH), layers**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm, used in zip(self.layers, self.norms, self.used, strict=True):
            x = x + torch.tanh(layer(norm(x))) * used
        return x


class Model(torch.nn.Module):
    """Dropout, a layer that runs twice, a norm that keeps statistics, buffers of both kinds, and
    Python's random numbers."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, outputs)
        self.norm, self.dropout = torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.3)
        self.register_buffer("hidden", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.dropout(self.norm(self.first(x))) * random.gauss(1.0, 0.2) * scale
        return self.last(torch.relu(self.twice(torch.relu(self.twice(x)) * self.hidden)))


def outlier(model: Stack, layer: int = 2) -> Stack:
    """Put a weight that is much larger than the others where nothing enters or leaves: in high
    precision it changes nothing."""
    with torch.no_grad():
        norm, linear = model.norms[layer], model.layers[layer]
        norm.weight[3] = norm.bias[3] = 0
        linear.weight[:, 3] = 0
        model.used[layer, 5] = 0
        linear.weight[5, 3] = 2.0**20
    return model


def data(seed: int = 5, width: int = WIDTH, outputs: int = WIDTH) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(8, n, generator=generator) for n in (width, outputs))


def seed(number: int) -> None:
    """Start torch's and Python's random numbers."""
    random.seed(number)
    torch.manual_seed(number)


def converted(model: torch.nn.Module, recipe: Any, **options: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return ottava.convert(model, recipe, **options)


def step_of(model: torch.nn.Module, x: Any, y: Any, scale: float = 1.0) -> torch.Tensor:
    loss = F.mse_loss(model(x).float(), y)
    (loss * scale).backward()
    return loss


def captured(
    model: torch.nn.Module,
    path: Path | str,
    recipe: Any = "current",
    *,
    loss: str | None = "mse",
    scale: float = 1.0,
    autocast: bool = False,
    batch: tuple[torch.Tensor, ...] | None = None,
) -> Path | str:
    """Convert a model if there is a recipe, and write a step of it to a file."""
    x, y = batch or data()
    if recipe is not None:
        model = converted(model, recipe)
    model.zero_grad()
    with capture(model, path, targets=y, loss=loss) as step:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
        step.loss = F.mse_loss(output.float(), y)
        (step.loss * scale).backward()
    return path


def changing(change: Callable[[torch.Tensor], torch.Tensor]) -> type:
    """A quantizer of other values than it is given."""

    class Changing(CurrentScalingQuantizerRef):
        def quantize_impl(self, tensor: torch.Tensor, dtype: Any) -> Any:
            return super().quantize_impl(change(tensor), dtype)

    return Changing


Halved = changing(lambda tensor: tensor * 0.5)
Zeroed = changing(lambda tensor: tensor * 0)
NotANumber = changing(lambda tensor: tensor * float("nan"))


class Raising(CurrentScalingQuantizerRef):
    """Raises for values other than zeros."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: Any) -> Any:
        if tensor.any():
            raise ArithmeticError("this quantizer is broken")
        return super().quantize_impl(tensor, dtype)


def broken(*faults: tuple[type, str, str, str]) -> CustomRecipe:
    """Current scaling with other quantizers: each for a role, a layer (all if empty) and a side
    (both if empty)."""

    def factory(role: QuantizerRole) -> Any:
        good = reference_factory(role)
        for quantizer, tensor_type, layer, side in faults:
            if role.tensor_type == tensor_type and layer in ("", role.name):
                other = quantizer(good.dtype)
                sides = {"": other, "rowwise": (other, good), "columnwise": (good, other)}[side]
                return HybridQuantizer(*sides) if isinstance(sides, tuple) else sides
        return good

    return CustomRecipe(factory)


def blamed(report: Report) -> set[tuple[str, str, str]]:
    """The operands of the findings, as (layer, product, tensor)."""
    return {tuple(operand) for finding in report.findings for operand in finding.operands}
