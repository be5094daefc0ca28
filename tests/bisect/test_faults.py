"""``bisect`` finds planted faults, and names layer, product and tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ottava.errors import UsageError
from ottava_bisect import Bundle, bisect, capture
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
Operands = set[tuple[str, str, str]]


def operands(layer: str, tensor: str, *gemms: str) -> Operands:
    return {(layer, gemm, tensor) for gemm in gemms}


# -- faults of a stack --


def tied() -> Stack:
    """A layer runs twice."""
    model = Stack()
    model.layers[3] = model.layers[1]
    return model


def activation_outlier(model: Stack, layer: int = 2) -> None:
    # It meets zeros, so that in high precision nothing changes.
    norm = model.norms[layer]
    norm.weight[4], norm.bias[4] = 0, 2.0**26
    model.layers[layer].weight[:, 4] = 0


def two_outliers(model: Stack) -> None:
    outlier(model)
    activation_outlier(model, 1)


def large_weight(model: Stack) -> None:
    model.layers[2].weight.mul_(2.0**12)


def large_input(model: Stack) -> None:
    model.norms[2].weight.mul_(2.0**5)
    model.layers[2].weight.mul_(2.0**-5)


def small_gradient(model: Stack) -> None:
    model.used[2].fill_(2.0**-40)


def sound(model: Stack) -> None:
    """Only quantizers are broken."""


OF_AN_ACTIVATION = operands("layers.2", "activation", "fprop")
#: The model, its recipe, the fault, and the operands that are blamed. Scales of delayed scaling
#: come from steps without the fault.
FAULTS: dict[str, tuple[Callable[[], Stack], Any, Callable[[Stack], Any], Operands]] = {
    "an activation outlier": (Stack, "current", activation_outlier, OF_AN_ACTIVATION),
    "one in a block of MXFP8": (Stack, "mxfp8", activation_outlier, OF_AN_ACTIVATION),
    "outliers of a weight and of an activation": (
        Stack,
        "current",
        two_outliers,
        operands("layers.2", "weight", "fprop", "dgrad")
        | operands("layers.1", "activation", "fprop"),
    ),
    "the second of two calls": (
        tied,
        "current",
        partial(activation_outlier, layer=3),
        operands("layers.1", "activation", "fprop"),
    ),
    "a weight above the scale of earlier steps": (
        Stack,
        "delayed",
        large_weight,
        operands("layers.2", "weight", "fprop"),
    ),
    "an input above the scale of earlier steps": (
        Stack,
        "delayed",
        large_input,
        operands("layers.2", "activation", "fprop", "wgrad"),
    ),
    "a gradient below the scale of earlier steps": (
        Stack,
        "delayed",
        small_gradient,
        operands("layers.2", "gradient", "dgrad", "wgrad"),
    ),
    "a quantizer that gives zeros for columns in one of many layers": (
        partial(Stack, 8),
        broken((Zeroed, "input", "layers.7", "columnwise")),
        sound,
        operands("layers.7", "activation", "wgrad"),
    ),
    "a quantizer that gives NaN, and one that it hides": (
        Stack,
        broken(
            (NotANumber, "input", "layers.1", "rowwise"),
            (Zeroed, "weight", "layers.3", "columnwise"),
        ),
        sound,
        operands("layers.1", "activation", "fprop") | operands("layers.3", "weight", "dgrad"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    make, recipe, plant, expected = FAULTS[name]
    model = converted(make(), recipe)
    for _ in range(2 if recipe == "delayed" else 0):
        step_of(model, *data())
    with torch.no_grad():
        plant(model)
    path = captured(model, tmp_path / "step", None)
    given = None if isinstance(recipe, str) else recipe
    report = bisect(path, make, recipe=given)
    assert blamed(report) == expected, report.reasons()
    assert report.solved
    assert report.after <= report.tolerance < report.before
    assert report.operands["other_bytes"] == []
    if given is None:
        assert report.verified <= report.tolerance
    else:
        # Functions cannot be written to a recipe file.
        assert report.recipe_file == ""
        assert any("holds functions" in note for note in report.notes)
    if make is tied:
        # Without the model, the worst of several calls counts.
        (finding,) = (each for each in bisect(path).findings if each.gemm == "fprop")
        assert finding.operands == (("layers.1", "fprop", "activation"),)
        assert finding.alone > 0.9
        assert finding.statistics.amax > 2.0**25


def test_a_quantizer_that_breaks_all_layers_is_one_finding(tmp_path: Path) -> None:
    recipe, make = broken((Halved, "weight", "", "columnwise")), partial(Stack, 12)
    report = bisect(captured(make(), tmp_path / "step", recipe), make, recipe=recipe)
    (finding,) = report.findings
    # In the order of the backward pass.
    assert finding.layers == tuple(f"layers.{n}" for n in reversed(range(12)))
    assert (finding.gemm, finding.tensor) == ("dgrad", "weight")
    assert finding.layer == "12 layers, layers.11 ..."
    assert "the quantizer gives the values times 0.5" in finding.reason


# -- faults of other models --


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(Size(layers=2, width=64, heads=2, length=16, batch=4))


def test_a_consequence_of_a_fault_is_told_from_it(tmp_path: Path) -> None:
    """The gradient that comes back through a weight that has grown outgrows its own scale."""
    model, (x, y) = converted(gpt(), "delayed", exclude="head"), torch.randint(0, 256, (2, 4, 16))

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    for _ in range(2):
        loss().backward()
    model.zero_grad()
    with torch.no_grad():
        model.blocks[0].down.weight.mul_(2.0**8)
    with capture(model, tmp_path / "step", targets=y, loss="cross_entropy") as step:
        step.loss = loss()
        step.loss.backward()
    report = bisect(tmp_path / "step", gpt())
    weight = operands("blocks.0.down", "weight", "fprop", "dgrad")
    gradient = operands("blocks.0.up", "gradient", "dgrad", "wgrad")
    assert {operand: f.follows for f in report.findings for operand in f.operands} == {
        **dict.fromkeys(weight, ()),
        **dict.fromkeys(gradient, ("blocks.0.down: weight",)),
    }
    assert report.verified <= report.tolerance
    # The numbers are of the step with all findings in high precision.
    assert all(f.statistics.saturation > 40 for f in report.findings)
    assert all("clamped" in f.reason and "of earlier steps" in f.reason for f in report.findings)


class Both(torch.nn.Module):
    """Two layers whose errors do harm only together, because they are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("exact", torch.zeros(2, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(x) + (self.a(x) - self.exact[0]) * (self.b(x) - self.exact[1])


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
    path, recipe = tmp_path / "step", broken((Raising, tensor_type, "layers.1", side))
    model, (x, y) = converted(Stack(), recipe), data()
    with pytest.raises(ArithmeticError), capture(model, path, targets=y, loss="mse"):
        step_of(model, x, y)
    report = bisect(path, Stack, recipe=recipe)
    assert blamed(report) == {("layers.1", *operand) for operand in expected}
    words = "its quantizer raises ArithmeticError: this quantizer is broken"
    assert all(f.reason == words for f in report.findings)
    assert report.solved
    assert report.before == math.inf
    # What was compared before a quantizer raised is not counted again.
    assert report.operands["quantized"] == sum(len(c.digests) for c in Bundle.read(path).calls)
    assert json.dumps(report.as_json())
    with pytest.raises(
        UsageError, match=r"'layers\.1' cannot be computed: ArithmeticError: this q"
    ):
        bisect(captured(Stack(), path), recipe=broken((Raising, "weight", "layers.1", "")))


def test_a_recipe_file_that_does_not_fix_the_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = captured(outlier(Stack()), tmp_path / "step")
    useless = "ottava_bisect.search.bisect.recipe_text"
    monkeypatch.setattr(useless, lambda *_, **__: "default: current\n")
    report = bisect(path, Stack)
    assert report.after <= report.tolerance < report.verified
    assert "under the recipe file the step is still wrong" in report.notes
