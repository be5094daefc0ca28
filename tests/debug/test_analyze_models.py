"""``ottava analyze`` with a model and data: the inputs and gradients that hooks of torch see."""

from __future__ import annotations

import inspect
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ottava
import ottava_debug
from ottava.checkpoint import save_file
from ottava.cli.main import app
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError
from ottava.nn import TransposedLinear
from ottava_debug.analysis.measuring import Series
from tests.comparing import unchanged
from tests.debug import analyses
from tests.debug.analyses import Model, data, decoded, loss
from tests.debug.by_hand import ROLES, losses


def seen_by_hooks(model: Model, steps: int) -> dict[tuple[str, str], list[torch.Tensor]]:
    """(layer, role) -> the matrix of each step."""
    seen: dict[tuple[str, str], list[torch.Tensor]] = {}

    def note(name: str, role: str, values: torch.Tensor) -> None:
        seen.setdefault((name, role), []).append(values.detach().flatten(0, -2).clone())

    for name, layer in (("first", model.first), ("second", model.second)):
        layer.register_forward_pre_hook(lambda _, x, name=name: note(name, "input", x[0]))
        layer.register_full_backward_hook(
            lambda _, dx, dy, name=name: note(name, "grad_output", dy[0])
        )
    for (x, y), _ in zip(data(), range(steps), strict=False):
        loss(model(x), y).backward()
    return seen


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_inputs_and_gradients_are_those_of_the_model(recipe: str) -> None:
    model = Model()
    expected = seen_by_hooks(deepcopy(model), 3)
    with unchanged(model):
        report = ottava_debug.analyze(model=model, data=data(), loss=loss, recipes=[recipe])
    # The model is not changed.
    assert type(model.first) is torch.nn.Linear
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (report.steps, report.source) == (3, "Model")
    tensors = [(name, role) for name in ("first", "second") for role in ROLES.values()]
    assert {(tensor.layer, tensor.role) for tensor in report.tensors} == {
        *tensors,
        ("unused", "weight"),
    }
    assert [skip.name for skip in report.skipped] == ["unused"]
    for tensor in report.tensors:
        if tensor.role == "weight":
            continue
        steps = expected[tensor.layer, tensor.role]
        x = torch.cat(steps)
        assert (tensor.count, tensor.shape) == (x.numel(), tuple(steps[0].shape))
        assert tensor.amax == pytest.approx(x.abs().max().item(), rel=1e-5)
        sides = [
            torch.cat([decoded(recipe, tensor.role, step, columnwise=side) for step in steps])
            for side in (False, True)
        ]
        sqnr = min(losses(x, side)["sqnr"] for side in sides)
        assert tensor.noise[recipe].sqnr == pytest.approx(sqnr, abs=0.02)


def test_a_recipe_with_state_takes_its_scales_from_the_steps_before() -> None:
    series = Series("a", "input", {"delayed": ottava.get_recipe("delayed")})
    steps = [torch.randn(64, 64) * size for size in (0.01, 0.04, 0.005)]
    amaxes = [step.abs().max().item() for step in steps]
    # The first step's scale is that of a step before it that saw the same.
    scales = [448.0 / amax for amax in (amaxes[0], amaxes[0], max(amaxes))]
    values, beyond = [], 0
    for number, (step, scale) in enumerate(zip(steps, scales, strict=True), 1):
        scaled = (step * scale).clamp(-448, 448)
        values.append(scaled.to(torch.float8_e4m3fn).float() / scale)
        beyond += int((step.abs() * scale > 464.0).sum())
        series.add(step)
        noise = series.report().noise["delayed"]
        x = torch.cat(steps[:number])
        assert noise.sqnr == pytest.approx(losses(x, torch.cat(values))["sqnr"], abs=1e-3)
        assert noise.saturation == pytest.approx(100 * beyond / x.numel())
    assert beyond > 10


class Transposed(torch.nn.Module):
    """A layer as in GPT-2: ``x · weight + bias``."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.nx, self.nf = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous())
        bias = linear.bias
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + (0 if self.bias is None else self.bias)


ottava.register_converter(Transposed, TransposedLinear.from_linear)


def test_models_with_the_same_values_have_the_same_report() -> None:
    model = Model()
    expected = ottava_debug.analyze(model=model, data=data(), loss=loss, recipes=["rowwise"])
    twin = Model()
    twin.first, twin.second = Transposed(twin.first), Transposed(twin.second)
    found = ottava_debug.analyze(model=twin, data=data(), loss=loss, recipes=["rowwise"])
    for a, b in zip(found.tensors, expected.tensors, strict=True):
        assert (a.layer, a.role, a.shape) == (b.layer, b.role, b.shape)
        assert a.noise["rowwise"].sqnr == pytest.approx(b.noise["rowwise"].sqnr, abs=0.02)
    # A converted model is analyzed in high precision, and stays converted.
    ottava.convert(model, "delayed")
    found = ottava_debug.analyze(model=model, data=data(), loss=loss, recipes=["rowwise"])
    assert found.tensors == expected.tensors
    assert model.first.recipe.name == "delayed"


def test_forms_of_batches_and_of_losses() -> None:
    x, y = next(data())

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, inputs: torch.Tensor, labels: Any = None) -> Any:
            logits = self.inner(inputs)
            return {"loss": loss(logits, labels), "logits": logits}

    current = {"recipes": ["current"]}
    pair = ottava_debug.analyze(model=Model(), data=[(x, y)], loss="cross_entropy", **current)
    for batch in ({"inputs": x, "labels": y}, (x, y)):
        named = ottava_debug.analyze(model=Whole(), data=[batch], **current)
        assert [t.noise for t in named.tensors] == [t.noise for t in pair.tensors]
        assert [t.layer for t in named.tensors] == [f"inner.{t.layer}" for t in pair.tensors]
    forward = ottava_debug.analyze(model=Model(), data=[x], **current)
    assert {tensor.role for tensor in forward.tensors} == {"weight", "input"}
    assert any("no loss function" in skip.reason for skip in forward.skipped)
    narrow = ottava_debug.analyze(
        model=Model().bfloat16(), data=[(x.bfloat16(), y)], loss="cross_entropy", **current
    )
    assert {tensor.dtype for tensor in narrow.tensors} == {"bfloat16"}


def test_a_checkpoint_is_loaded_into_the_model(tmp_path: Path) -> None:
    model, other = Model(), Model()
    with torch.no_grad():
        other.first.weight.mul_(torch.logspace(-8, 0, 64))
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    found = ottava_debug.analyze(tmp_path / "other.safetensors", model=model, recipes=["current"])
    assert found.tensors == ottava_debug.analyze(model=other, recipes=["current"]).tensors
    assert found.tensors != ottava_debug.analyze(model=model, recipes=["current"]).tensors
    # Quantized weights are loaded by their values.
    quantizer = ottava.get_recipe("mxfp8").quantizer("weight")
    state = other.state_dict() | {"first.weight": quantizer.quantize(other.first.weight.detach())}
    with torch.no_grad():
        other.first.weight.copy_(state["first.weight"].dequantize())
    found = ottava_debug.analyze(state, model=model, recipes=["current"])
    assert found.tensors == ottava_debug.analyze(model=other, recipes=["current"]).tensors
    for wrong, words in (
        ({"first.weight": other.first.weight}, r"nothing for .*second\.weight"),
        (other.state_dict() | {"first.bias": torch.zeros(3)}, "does not fit"),
    ):
        with pytest.raises(CheckpointError, match=words):
            ottava_debug.analyze(wrong, model=Model())


def ends(*anything: Any) -> None:
    raise SystemExit(4)


def ending() -> Any:
    yield torch.randn(2, 64)
    raise SystemExit(4)


X = torch.zeros(2, 64)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data": []}, UsageError, "no batch"),
        ({"data": [torch.zeros(3, 3)]}, UsageError, "a step fails"),
        ({"data": [(X, "text")], "loss": "mse"}, UsageError, "a step fails: AttributeError"),
        ({"data": 3}, UsageError, "the data fail: TypeError"),
        ({"data": ending()}, UsageError, "the data fail: SystemExit: 4"),
        ({"data": [X], "loss": ends}, UsageError, "a step fails: SystemExit: 4"),
        ({"data": data(), "loss": "x"}, OptionError, "loss is 'x'"),
        ({"model": 3}, DTypeError, "the model is a int"),
        ({"model": torch.nn.Embedding(3, 4)}, UsageError, "no linear layer"),
    ],
)
def test_failures_of_models_and_data(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ottava_debug.analyze(**({"model": Model(), "recipes": ["current"]} | options))


def test_the_command_takes_a_model_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_analyzed_model.py").write_text(inspect.getsource(analyses))
    torch.save({"x": torch.randn(4, 64), "targets": torch.zeros(4, 32)}, tmp_path / "batch.pt")
    model = ["analyze", "--model", "my_analyzed_model:Model", "--recipe", "current"]
    named = "my_analyzed_model:{}".format
    options = ["--data", named("data"), "--loss", named("loss"), "--json", "report.json"]
    done = CliRunner().invoke(app, [*model, *options])
    assert done.exit_code == 0, done.output
    expected = ottava_debug.analyze(model=Model(), data=data(), loss=loss, recipes=["current"])
    ottava_debug.write_json(expected, "expected.json")
    assert (tmp_path / "report.json").read_text() == (tmp_path / "expected.json").read_text()
    assert "grad_output" in done.output
    done = CliRunner().invoke(app, [*model, "--data", "batch.pt", "--loss", "mse"])
    assert done.exit_code == 0, done.output
    assert "grad_output" in done.output


@pytest.mark.parametrize("word", ["high_precision", "dequantized"])
def test_only_what_products_read_quantized_is_measured(word: str) -> None:
    recipes = {
        "rows": ottava.get_recipe("mxfp8", backward=word),
        "both": ottava.get_recipe("mxfp8"),
    }
    # A column of large values, in which blocks along columns lose less.
    values = torch.randn(64, 64) * torch.logspace(-8, 8, 64)
    for role in ("input", "weight", "grad_output"):
        series = Series("a", role, recipes)
        series.add(values)
        noise = series.report().noise
        if role == "grad_output":
            assert noise["rows"].sqnr == math.inf
        else:
            rows = losses(values, decoded("mxfp8", role, values, columnwise=False))["sqnr"]
            assert noise["rows"].sqnr == pytest.approx(rows, abs=0.02)
        assert noise["rows"].columnwise is None
        assert noise["both"].sqnr < math.inf
