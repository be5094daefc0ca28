"""``bisect`` finds planted faults, and names layer, product and tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ottava
from ottava.errors import UsageError
from ottava_bisect import bisect, capture
from ottava_demo.model import GPT, Size
from tests.bisect.steps import (
    Halved,
    NotANumber,
    Raising,
    Stack,
    Zeroed,
    blamed,
    broken,
    captured,
    converted,
    data,
    outlier,
    step_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OF_MLP = data(width=32, outputs=8)
SIZE = Size(layers=2, width=64, heads=2, length=16, batch=4)
Operands = set[tuple[str, str, str]]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SIZE)


def mlp() -> torch.nn.Sequential:
    """Three layers, the middle one normalized."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64),
        torch.nn.LayerNorm(64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 64),
        torch.nn.LayerNorm(64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 8),
    )


class Branches(torch.nn.Module):
    """Two layers beside each other; the second one counts ``gain`` times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = (torch.nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.a(x) + self.gain * self.b(x)))


class Twice(torch.nn.Module):
    """A layer that runs twice, the second time with ``outlier`` in its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = (torch.nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("outlier", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.shared(x + self.outlier)))


class Both(torch.nn.Module):
    """Two layers whose errors do harm only together, because they are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("exact", torch.zeros(2, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(x) + (self.a(x) - self.exact[0]) * (self.b(x) - self.exact[1])


# -- faults; each changes the model, and may return another input --


def large_block_weight(model: Any) -> None:
    model.blocks[0].down.weight.mul_(2.0**20)


def weight_outlier(model: Any) -> None:
    # What enters there is always zero, and so is the gradient: in high precision nothing changes.
    block = model.blocks[1]
    block.norm2.weight[7] = block.norm2.bias[7] = 0
    block.down.weight[:, 3] = 0
    block.up.weight[3, 7] = 2.0**20


def activation_outlier(model: Any, block: int = 0, features: Any = (5,)) -> None:
    for feature in features:
        norm = model.blocks[block].norm2
        norm.weight[feature], norm.bias[feature] = 0, 2.0**26
        model.blocks[block].up.weight[:, feature] = 0


def outlier_in_each_block(model: Any) -> None:
    activation_outlier(model, 1, range(3, 64, 32))


def attention_outlier(model: Any) -> None:
    block = model.blocks[1]
    block.norm1.weight[9], block.norm1.bias[9] = 0, 2.0**26
    block.qkv.weight[:, 9] = 0


def two_outliers(model: Any) -> None:
    activation_outlier(model)
    weight_outlier(model)


def small_gradient(model: Any) -> None:
    model.gain.fill_(2.0**-40)


def larger_input(model: Any) -> torch.Tensor:
    return data(width=32)[0] * 2.0**10


def second_call_outlier(model: Any) -> None:
    model.outlier[4] = 2.0**26
    model.shared.weight[:, 4] = 0


def sound(model: Any) -> None:
    """No fault of the model."""


@dataclass(frozen=True)
class Fault:
    """A fault, and the operands that are blamed.

    Attributes:
        make: returns the model; a GPT has tokens and cross entropy, others features and MSE.
        recipe: the recipe, whose quantizers may be broken.
        plant: changes the model.
        expected: the operands.
        measure: the measure of :func:`bisect`.
        warm: whether steps without the fault precede, from which scales of a state come.
    """

    make: Callable[[], torch.nn.Module]
    recipe: Any
    plant: Callable[[Any], Any]
    expected: Operands
    measure: str = "grad-distance"
    warm: bool = False

    def capture(self, path: Path) -> Path:
        """Write the step to a file."""
        model = self.make()
        model = converted(model, self.recipe, exclude="head" if self.make is gpt else None)
        loss = "mse"
        x, y = OF_MLP if self.make is mlp else data()
        if self.make is gpt:
            loss = "cross_entropy"
            x, y = torch.randint(0, 256, (2, SIZE.batch, SIZE.length))
        for _ in range(2 if self.warm else 0):
            self._loss(model, x, y).backward()
        model.zero_grad()
        with torch.no_grad():
            other = self.plant(model)
        with capture(model, path, targets=y, loss=loss) as step:
            step.loss = self._loss(model, x if other is None else other, y)
            step.loss.backward()
        return path

    def _loss(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x).float()
        if self.make is gpt:
            return F.cross_entropy(output.flatten(0, 1), y.flatten())
        return F.mse_loss(output, y)


def weights(layer: str) -> Operands:
    return {(layer, gemm, "weight") for gemm in ("fprop", "dgrad")}


FAULTS = {
    # The gradient that comes back through such a weight outgrows its own scale.
    "a weight outgrows the scale of earlier steps": Fault(
        gpt,
        "delayed",
        large_block_weight,
        weights("blocks.0.down")
        | {("blocks.0.up", gemm, "gradient") for gemm in ("dgrad", "wgrad")},
        warm=True,
    ),
    "an activation outlier by rows": Fault(
        gpt, "rowwise", attention_outlier, {("blocks.1.qkv", "fprop", "activation")}
    ),
    "an outlier in each block of MXFP8": Fault(
        gpt, "mxfp8", outlier_in_each_block, {("blocks.1.up", "fprop", "activation")}
    ),
    "two outliers": Fault(
        gpt,
        "current",
        two_outliers,
        weights("blocks.1.up") | {("blocks.0.up", "fprop", "activation")},
    ),
    "a gradient below the scale of earlier steps": Fault(
        Branches, "delayed", small_gradient, {("b", "wgrad", "gradient")}, warm=True
    ),
    "an input above the scale of earlier steps": Fault(
        mlp,
        "delayed",
        larger_input,
        {("0", gemm, "activation") for gemm in ("fprop", "wgrad")},
        warm=True,
    ),
    "the second of two calls": Fault(
        Twice, "current", second_call_outlier, {("shared", "fprop", "activation")}
    ),
    "a quantizer that gives zeros in one of many layers": Fault(
        lambda: Stack(12),
        broken((Zeroed, "input", "layers.7", "columnwise")),
        sound,
        {("layers.7", "wgrad", "activation")},
    ),
    "a quantizer that gives NaN, and one that it hides": Fault(
        mlp,
        broken((NotANumber, "input", "3", ""), (Halved, "weight", "6", "")),
        sound,
        {("3", "fprop", "activation"), ("6", "fprop", "weight")},
        "loss",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    path = fault.capture(tmp_path / "step")
    recipe = None if isinstance(fault.recipe, str) else fault.recipe
    report = bisect(path, fault.make(), measure=fault.measure, recipe=recipe)
    assert blamed(report) == fault.expected, report.reasons()
    assert report.solved
    assert report.after <= report.tolerance < report.before
    assert report.operands["other_bytes"] == []
    if recipe is None:
        assert report.verified <= report.tolerance
    else:
        # Functions cannot be written to a recipe file.
        assert report.recipe_file == ""
        assert any("holds functions" in note for note in report.notes)
    if fault.plant is large_block_weight:
        follows = {operand: f.follows for f in report.findings for operand in f.operands}
        consequence = {("blocks.0.up", gemm, "gradient") for gemm in ("dgrad", "wgrad")}
        for operand in fault.expected:
            told = ("blocks.0.down: weight",) if operand in consequence else ()
            assert follows[operand] == told
        # The numbers are of the step with all findings in high precision.
        assert all(f.statistics.saturation > 40 for f in report.findings)
        assert all("clamped" in f.reason for f in report.findings)
        assert all("of earlier steps" in f.reason for f in report.findings)


def test_of_several_calls_the_worst_counts(tmp_path: Path) -> None:
    report = bisect(FAULTS["the second of two calls"].capture(tmp_path / "step"))
    (finding,) = (finding for finding in report.findings if finding.gemm == "fprop")
    assert finding.operands == (("shared", "fprop", "activation"),)
    assert finding.alone > 0.9
    assert finding.statistics.amax > 2.0**25


def test_operands_that_do_harm_only_together(tmp_path: Path) -> None:
    model, (x, _) = Both(), data()
    with torch.no_grad():
        for layer in (model.a, model.b):
            # Nothing enters at the outlier.
            layer.weight[:, 0] = 0
            layer.weight[2, 0] = 2.0**26
        x[:, 0] = 0
        model.exact.copy_(torch.stack([model.a(x), model.b(x)]))
    path = captured(model, tmp_path / "step", batch=(x, torch.zeros(8, 16)))
    report = bisect(path, Both, measure="loss")
    (finding,) = report.findings
    pair = {str(finding.operands[0]), *finding.partners}
    assert pair == {"a: weight in fprop", "b: weight in fprop"}
    assert finding.alone < report.tolerance < report.before
    assert finding.without < report.tolerance
    assert report.solved
    assert "only together with" in finding.reason


def test_a_quantizer_that_breaks_all_layers_is_one_finding(tmp_path: Path) -> None:
    recipe = broken((Halved, "weight", "", ""))
    path = captured(Stack(12), tmp_path / "step", recipe)
    report = bisect(path, lambda: Stack(12), measure="loss", tolerance=0.01, recipe=recipe)
    (finding,) = report.findings
    assert finding.layers == tuple(f"layers.{n}" for n in range(12))
    assert (finding.gemm, finding.tensor) == ("fprop", "weight")
    assert finding.layer == "12 layers, layers.0 ..."
    assert "the quantizer gives the values times 0.5" in finding.reason


@pytest.mark.parametrize(
    ("tensor_type", "side", "expected"),
    [
        ("input", "", {("fprop", "activation"), ("wgrad", "activation")}),
        ("weight", "columnwise", {("dgrad", "weight")}),
        ("grad_output", "", {("dgrad", "gradient"), ("wgrad", "gradient")}),
    ],
)
def test_a_quantizer_that_raises_is_a_finding(
    tensor_type: str, side: str, expected: set[tuple[str, str]], tmp_path: Path
) -> None:
    path, recipe = tmp_path / "step", broken((Raising, tensor_type, "3", side))
    model, (x, y) = ottava.convert(mlp(), recipe), OF_MLP
    with pytest.raises(ArithmeticError), capture(model, path, targets=y, loss="mse"):
        step_of(model, x, y)
    report = bisect(path, mlp(), recipe=recipe)
    assert blamed(report) == {("3", *operand) for operand in expected}
    words = "its quantizer raises ArithmeticError: this quantizer is broken"
    assert all(f.reason == words for f in report.findings)
    assert report.solved
    assert report.before == math.inf
    assert json.dumps(report.as_json())
    with pytest.raises(UsageError, match="'3' cannot be computed: ArithmeticError: this quant"):
        bisect(captured(mlp(), path, batch=OF_MLP), recipe=broken((Raising, "weight", "3", "")))


def test_a_recipe_file_that_does_not_fix_the_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = captured(outlier(Stack()), tmp_path / "step")
    useless = "ottava_bisect.search.bisect.recipe_text"
    monkeypatch.setattr(useless, lambda *_, **__: "default: current\n")
    report = bisect(path, Stack)
    assert report.after <= report.tolerance < report.verified
    assert "under the recipe file the step is still wrong" in report.notes


@pytest.mark.slow
def test_a_hundred_layers_take_tens_of_replays(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    path = captured(outlier(Stack(100), 57), tmp_path / "step")
    report = bisect(path, lambda: Stack(100), progress=lambda *about: progress.append(about))
    # What goes forward through one of a hundred layers matters less than what comes back.
    expected = weights("layers.57")
    assert expected - {("layers.57", "fprop", "weight")} <= blamed(report) <= expected
    assert report.solved
    assert report.operands["quantized"] == 600
    assert report.replays <= 40
    assert 10 <= progress[0][1] <= 40
