"""Checkpoints and reports for the tests of ``ottava analyze``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

import ottava
from ottava.checkpoint import save_file
from ottava.cli.main import app
from ottava_debug.analysis.report import Noise, TensorReport
from ottava_debug.measures import Measures
from ottava_demo.model import GPT, SIZES


def command(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def demo_checkpoint(folder: Path) -> Path:
    """The demo's model, with an outlier in one weight and small rows in another."""
    torch.manual_seed(0)
    model = GPT(SIZES["small"])
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] = 3000.0
        model.blocks[2].down.weight.mul_(torch.logspace(-6, 0, 512))
    save_file(model.state_dict(), folder / "demo.safetensors")
    return folder / "demo.safetensors"


def decoded(recipe: str, role: str, x: torch.Tensor, *, columnwise: bool) -> torch.Tensor:
    """The values that a recipe makes of ``x``, with a scale of ``x`` itself."""
    quantizer = ottava.get_recipe(recipe).quantizer(ottava.QuantizerRole("linear", role))
    quantizer = quantizer.with_usage(not columnwise, columnwise).copy()
    quantizer.initialize(x)
    return quantizer.quantize(x).dequantize(torch.float32)


def noise_of(sqnr: float, underflow: float = 0.0, not_finite: int = 0) -> Noise:
    return Noise(Measures(100, not_finite, 1.0, underflow, 0.0, sqnr, 0.99))


def tensor_of(layer: str, role: str, count: int = 100, **noise: Noise) -> TensorReport:
    """A tensor with invented measures; the keywords are recipes."""
    not_finite = max(each.not_finite for each in noise.values())
    shape = (10, count // 10)
    exponents = {exponent: 5 + exponent % 7 for exponent in range(-30, 1)}
    return TensorReport(
        layer, role, shape, "float32", count, not_finite, 2.0, exponents, dict(noise)
    )


class Model(torch.nn.Module):
    """Two layers, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(64, 96)
        self.second = torch.nn.Linear(96, 32, bias=False)
        self.unused = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)))


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(4, 8, 64, generator=random)
        yield x, torch.randint(0, 32, (4, 8), generator=random)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
