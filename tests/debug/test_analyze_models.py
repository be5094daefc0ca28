"""``ottava analyze`` with a model and data: real inputs and gradients, as hooks of torch see
them."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ottava
import ottava_debug
from ottava.checkpoint import save_file
from ottava.cli.main import app
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError
from ottava.nn import TransposedLinear
from ottava_debug.analysis.measuring import Candidate, Series

MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(64, 96), torch.nn.Linear(96, 32, bias=False)
        self.unused = torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x)))

def data():
    torch.manual_seed(1)
    for _ in range(5):
        yield torch.randn(4, 8, 64), torch.randint(0, 32, (4, 8))

def loss(output, targets):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
"""
NAMESPACE: dict = {}
exec(MODULE, NAMESPACE)
Model, data, loss = (NAMESPACE[name] for name in ("Model", "data", "loss"))


def seen_by_hooks(model, batches):
    """(layer, role) -> the tensor of each step, as matrices."""
    seen, handles = {}, []

    def keep(name, role):
        def hook(module, given, *rest):
            values = given[0] if role == "input" else rest[0][0]
            seen.setdefault((name, role), []).append(
                values.detach().reshape(-1, values.shape[-1]).clone()
            )

        return hook

    for name, layer in (("first", model.first), ("second", model.second)):
        handles.append(layer.register_forward_pre_hook(keep(name, "input")))
        handles.append(layer.register_full_backward_hook(keep(name, "grad_output")))
    for x, y in batches:
        loss(model(x), y).backward()
    return seen


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "rowwise"])
def test_inputs_and_gradients_are_those_of_the_model(recipe):
    model = Model()
    expected = seen_by_hooks(deepcopy(model), list(data())[:3])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = ottava_debug.analyze(model=model, data=data(), loss=loss, recipes=[recipe])
    # Nothing of the model is changed.
    assert type(model.first) is torch.nn.Linear
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert report.steps == 3
    found = {(tensor.layer, tensor.role): tensor for tensor in report.tensors}
    weights = {(layer, "weight") for layer in ("first", "second", "unused")}
    assert found.keys() == weights | expected.keys()
    assert [skip.name for skip in report.skipped] == ["unused"]
    for (layer, role), steps in expected.items():
        tensor = found[layer, role]
        x = torch.cat(steps)
        assert tensor.count == x.numel()
        assert tensor.shape == tuple(steps[0].shape)
        assert tensor.amax == pytest.approx(x.abs().max().item(), rel=1e-5)
        ratios = []
        for columnwise in (False, True):
            quantizer = ottava.get_recipe(recipe).quantizer(
                ottava.QuantizerRole("linear", role, layer)
            )
            quantizer = quantizer.with_usage(not columnwise, columnwise)
            made = np.concatenate(
                [quantizer.quantize(step).dequantize().double().numpy() for step in steps]
            )
            exact = x.double().numpy()
            ratios.append(10 * np.log10((exact**2).sum() / ((exact - made) ** 2).sum()))
        assert tensor.noise[recipe].sqnr == pytest.approx(min(ratios), abs=0.02)


def test_a_recipe_with_state_takes_its_scales_from_the_steps_before():
    series = Series("a", "input", [Candidate("delayed", ottava.get_recipe("delayed"))])
    torch.manual_seed(0)
    steps = [torch.randn(64, 64) * size for size in (1.0, 4.0, 0.5)]
    for step in steps:
        series.add(step)
    noise = series.report().noise["delayed"]
    amaxes = [step.abs().max().item() for step in steps]
    # The first step's scale is that of a step before that saw the same.
    before = [amaxes[0], amaxes[0], max(amaxes)]
    made = []
    for step, amax in zip(steps, before, strict=True):
        scaled = (step * (448.0 / amax)).clamp(-448, 448)
        made.append(scaled.to(torch.float8_e4m3fn).double() * (amax / 448.0))
    exact, made = torch.cat(steps).double(), torch.cat(made)
    assert noise.sqnr == pytest.approx(
        float(10 * torch.log10(exact.square().sum() / (exact - made).square().sum())), abs=1e-3
    )
    beyond = sum(
        int((step.abs() * (448.0 / amax) > 464.0).sum())
        for step, amax in zip(steps, before, strict=True)
    )
    assert noise.saturation == pytest.approx(100 * beyond / exact.numel())
    assert beyond > 10


def test_a_model_that_is_converted_already_is_seen_in_high_precision():
    model = Model()
    expected = ottava_debug.analyze(model=model, data=data(), loss=loss, recipes=["current"])
    ottava.convert(model, "delayed")
    found = ottava_debug.analyze(model=model, data=data(), loss=loss, recipes=["current"])
    assert found.tensors == expected.tensors
    assert model.first.recipe.name == "delayed"


def test_batches_and_losses_of_several_forms():
    model = Model()
    x, y = next(data())

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, inputs, labels=None):
            logits = self.inner(inputs)
            return (
                {"loss": loss(logits, labels), "logits": logits} if labels is not None else logits
            )

    pair = ottava_debug.analyze(
        model=model, data=[(x, y)], loss="cross_entropy", recipes=["current"]
    )
    named = ottava_debug.analyze(
        model=Whole(), data=[{"inputs": x, "labels": y}], recipes=["current"]
    )
    assert [t.noise for t in named.tensors] == [t.noise for t in pair.tensors]
    assert [t.layer for t in named.tensors] == [f"inner.{t.layer}" for t in pair.tensors]
    forward = ottava_debug.analyze(model=model, data=[x], recipes=["current"])
    assert {tensor.role for tensor in forward.tensors} == {"weight", "input"}
    assert any("no loss function" in skip.reason for skip in forward.skipped)


def test_the_checkpoint_is_loaded_into_the_model(tmp_path):
    model, other = Model(), Model()
    with torch.no_grad():
        other.first.weight.mul_(torch.logspace(-8, 0, 64))
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    found = ottava_debug.analyze(tmp_path / "other.safetensors", model=model, recipes=["current"])
    assert found.tensors == ottava_debug.analyze(model=other, recipes=["current"]).tensors
    assert found.tensors != ottava_debug.analyze(model=model, recipes=["current"]).tensors
    with pytest.raises(CheckpointError, match=r"nothing for .*second\.weight"):
        ottava_debug.analyze(
            {"first.weight": other.first.weight}, model=torch.nn.ModuleDict(model.named_children())
        )
    with pytest.raises(CheckpointError, match="does not fit"):
        ottava_debug.analyze(other.state_dict() | {"first.bias": torch.zeros(3)}, model=model)


def test_bfloat16():
    model = Model().bfloat16()
    batches = [(x.bfloat16(), y) for x, y in data()]
    report = ottava_debug.analyze(
        model=model, data=batches, loss="cross_entropy", recipes=["current"]
    )
    assert {tensor.dtype for tensor in report.tensors} == {"bfloat16"}


class Transposed(torch.nn.Module):
    """As in GPT-2: ``x · weight + bias``."""

    def __init__(self, linear):
        super().__init__()
        self.nx, self.nf = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = (
            None if linear.bias is None else torch.nn.Parameter(linear.bias.detach().clone())
        )

    def forward(self, x):
        return x @ self.weight + (0 if self.bias is None else self.bias)


ottava.register_converter(Transposed, TransposedLinear.from_linear)


def test_transposed_layers_are_those_of_their_twins():
    model = Model()
    with torch.no_grad():
        model.first.weight.mul_(torch.logspace(-8, 0, 64))
    stored = deepcopy(model)
    stored.first, stored.second = Transposed(model.first), Transposed(model.second)
    both = [
        ottava_debug.analyze(
            model=m, data=data(), loss=loss, recipes=["current", "rowwise"], steps=2
        )
        for m in (model, stored)
    ]
    for usual, found in zip(*(report.tensors for report in both), strict=True):
        assert (found.layer, found.role, found.shape) == (usual.layer, usual.role, usual.shape)
        for recipe in found.noise:
            assert found.noise[recipe].sqnr == pytest.approx(usual.noise[recipe].sqnr, abs=0.02)


def ends(*anything):
    raise SystemExit(4)


def ending():
    yield torch.randn(2, 64)
    raise SystemExit(4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data": []}, UsageError, "no batch"),
        ({"data": [torch.randn(3, 3)]}, UsageError, "a step fails"),
        (
            {"data": [(torch.randn(2, 64), torch.zeros(3))], "loss": "mse"},
            UsageError,
            "a step fails",
        ),
        ({"data": 3}, UsageError, "the data fail: TypeError"),
        ({"data": ending()}, UsageError, "the data fail: SystemExit: 4"),
        ({"data": [torch.randn(2, 64)], "loss": ends}, UsageError, "a step fails: SystemExit: 4"),
        ({"data": data(), "loss": "x"}, OptionError, "loss is 'x'"),
        ({"model": 3}, DTypeError, "the model is a int"),
        ({"model": torch.nn.Embedding(3, 4)}, UsageError, "no linear layer"),
    ],
)
def test_what_fails_is_told(options, error, words):
    with pytest.raises(error, match=words):
        ottava_debug.analyze(**({"model": Model(), "recipes": ["current"]} | options))


def test_the_command_takes_a_model_and_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_analyzed_model.py").write_text(MODULE)
    torch.save({"x": torch.randn(4, 64), "targets": torch.zeros(4, 32)}, tmp_path / "batch.pt")
    model = ["analyze", "--model", "my_analyzed_model:Model", "--recipe", "current"]
    named = "my_analyzed_model:{}".format
    done = CliRunner().invoke(
        app, [*model, "--data", named("data"), "--loss", named("loss"), "--json", "report.json"]
    )
    assert done.exit_code == 0, done.output
    expected = ottava_debug.analyze(model=Model(), data=data(), loss=loss, recipes=["current"])
    ottava_debug.write_json(expected, "expected.json")
    assert (tmp_path / "report.json").read_text() == (tmp_path / "expected.json").read_text()
    assert "grad_output" in done.output
    done = CliRunner().invoke(app, [*model, "--data", "batch.pt", "--loss", "mse"])
    assert done.exit_code == 0, done.output
    assert "grad_output" in done.output


@pytest.mark.parametrize("reference", ["ends:model", "ends_at_once:model"])
def test_a_module_that_ends_the_process_is_an_error(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text("def model():\n    raise SystemExit(3)\n")
    (tmp_path / "ends_at_once.py").write_text("raise SystemExit(3)\n")
    done = CliRunner().invoke(app, ["analyze", "--model", reference])
    assert done.exit_code == 2
    assert f"--model '{reference}'" in done.output
    assert "SystemExit: 3" in done.output
