"""``bisect`` finds planted faults, and names layer, tensor and direction."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ottava
from ottava.errors import UsageError
from ottava_bisect.capturing import capture
from ottava_bisect.search.bisect import bisect
from ottava_custom import CurrentScalingQuantizerRef, CustomRecipe, HybridQuantizer
from ottava_custom.factories import current_scaling_ref_quantizer_factory as reference_factory
from ottava_demo.model import GPT, Size

SIZE = Size(layers=2, width=64, heads=2, length=16, batch=4)
BLOCK_LAYERS = [f"blocks.{n}.{name}" for n in range(2) for name in ("qkv", "proj", "up", "down")]

pytestmark = pytest.mark.usefixtures("one_thread")


def gpt():
    torch.manual_seed(0)
    return GPT(SIZE)


def mlp():
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
    """Two layers beside each other, the second one counting ``gain`` times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = (
            torch.nn.Linear(32, 32),
            torch.nn.Linear(32, 32),
            torch.nn.Linear(32, 8),
        )
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x):
        return self.out(torch.tanh(self.a(x) + self.gain * self.b(x)))


class Twice(torch.nn.Module):
    """One layer that runs twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = (torch.nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("outlier", torch.zeros(32))

    def forward(self, x):
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.shared(x + self.outlier)))


class Product(torch.nn.Module):
    """Two layers whose errors do harm only together."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (
            torch.nn.Linear(32, 16),
            torch.nn.Linear(32, 16),
            torch.nn.Linear(32, 16),
        )
        self.register_buffer("exact", torch.zeros(2, 8, 16))

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return self.c(x) + 1e4 * (a - self.exact[0]).abs() * (b - self.exact[1]).abs()


class Broken(CurrentScalingQuantizerRef):
    """Gives half of the values."""

    def quantize_impl(self, tensor, dtype):
        return super().quantize_impl(tensor * 0.5, dtype)


class NotANumber(CurrentScalingQuantizerRef):
    """Gives NaN."""

    def quantize_impl(self, tensor, dtype):
        return super().quantize_impl(tensor * float("nan"), dtype)


def replaced(quantizer, tensor_type, layer="", *, side=None):
    """A recipe of current scaling whose quantizer for a role is another one: for all layers, or
    one."""

    def factory(role):
        made = reference_factory(role)
        if role.tensor_type != tensor_type or (layer and role.name != layer):
            return made
        other = quantizer(made.dtype)
        return (
            other
            if side is None
            else HybridQuantizer(*([other, made] if side == "rowwise" else [made, other]))
        )

    return CustomRecipe(factory)


def hidden():
    """A recipe with a quantizer that gives NaN, which hides that another one is broken."""

    def factory(role):
        made = reference_factory(role)
        if (role.name, role.tensor_type) == ("3", "input"):
            return NotANumber(made.dtype)
        return Broken(made.dtype) if (role.name, role.tensor_type) == ("6", "weight") else made

    return CustomRecipe(factory)


def tokens():
    torch.manual_seed(5)
    return torch.randint(0, 256, (SIZE.batch, SIZE.length)), torch.randint(
        0, 256, (SIZE.batch, SIZE.length)
    )


def features(outputs=8):
    torch.manual_seed(5)
    return torch.randn(8, 32), torch.randn(8, outputs)


def run(model, data, loss):
    output = model(data[0])
    found = (
        F.cross_entropy(output.float().flatten(0, 1), data[1].flatten())
        if loss == "cross_entropy"
        else None
    )
    return F.mse_loss(output.float(), data[1]) if found is None else found


def trained(model, data, loss, steps=2):
    """A few steps, which a stateful recipe learns its scales from."""
    for _ in range(steps):
        run(model, data, loss).backward()
    model.zero_grad()


def captured(make, recipe, data, plant, path, *, loss="mse", warm=False):
    """A step of a model with a planted fault, in a file; ``plant(model)`` may give other data."""
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ottava.convert(model, recipe, exclude="head" if make is gpt else None)
    if warm:
        trained(model, data, loss)
    with torch.no_grad():
        data = plant(model) or data
    with capture(model, path, targets=data[1], loss=loss) as step:
        step.loss = run(model, data, loss)
        step.loss.backward()
    return path


def found(report):
    return {(layer, f.gemm, f.tensor) for f in report.findings for layer in f.layers}


def scaled_weight(model):
    model[3].weight.mul_(2.0**20)


def scaled_block_weight(model):
    model.blocks[0].down.weight.mul_(2.0**20)


def weight_outlier(model):
    # What enters there is always zero, and so is the gradient: in high precision nothing changes.
    block = model.blocks[1]
    block.norm2.weight[7] = block.norm2.bias[7] = 0
    block.down.weight[:, 3] = 0
    block.up.weight[3, 7] = 2.0**20


def activation_outlier(model, block=0, features=(5,)):
    block = model.blocks[block]
    for feature in features:
        block.norm2.weight[feature], block.norm2.bias[feature] = 0, 2.0**26
        block.up.weight[:, feature] = 0


def attention_outlier(model):
    block = model.blocks[1]
    block.norm1.weight[9], block.norm1.bias[9] = 0, 2.0**26
    block.qkv.weight[:, 9] = 0


def outlier_in_each_block(model):
    activation_outlier(model, 1, range(3, 64, 32))


def small_gradient(model):
    model.gain.fill_(2.0**-40)


def larger_input(model):
    x, y = features()
    return x * 2.0**10, y


def second_call_outlier(model):
    model.outlier[4] = 2.0**26
    model.shared.weight[:, 4] = 0


def both(model):
    activation_outlier(model, 0)
    weight_outlier(model)


def exact_values(model):
    x, _ = features()
    with ottava.autocast(enabled=False):
        model.exact.copy_(torch.stack([model.a(x), model.b(x)]))
    model.c.weight.mul_(30)
    for layer in (model.a, model.b):
        layer.weight[0, 0] = 100


def nothing(model):
    return None


ALL = ("fprop", "dgrad", "wgrad")
# name -> model, recipe, data, plant, loss, measure, expected, options
FAULTS = {
    "a weight scaled by 2^20 under the scale of earlier steps": (
        mlp, "delayed", features, scaled_weight, "mse", "loss",
        {("3", "fprop", "weight")}, {"warm": True},
    ),
    "a weight of the demo scaled by 2^20, by its gradients": (
        gpt, "delayed", tokens, scaled_block_weight, "cross_entropy", "grad-distance",
        {("blocks.0.down", gemm, "weight") for gemm in ("fprop", "dgrad")}
        | {("blocks.0.up", gemm, "gradient") for gemm in ("dgrad", "wgrad")}, {"warm": True},
    ),
    "a weight outlier that flushes the others": (
        gpt, "current", tokens, weight_outlier, "cross_entropy", "grad-distance",
        {("blocks.1.up", "fprop", "weight"), ("blocks.1.up", "dgrad", "weight")}, {},
    ),
    "an activation outlier": (
        gpt, "current", tokens, activation_outlier, "cross_entropy", "grad-distance",
        {("blocks.0.up", "fprop", "activation")}, {},
    ),
    "an activation outlier, by its gradients": (
        gpt, "rowwise", tokens, attention_outlier, "cross_entropy", "grad-distance",
        {("blocks.1.qkv", "fprop", "activation")}, {},
    ),
    "an outlier in each block of MXFP8": (
        gpt, "mxfp8", tokens, outlier_in_each_block, "cross_entropy", "grad-distance",
        {("blocks.1.up", "fprop", "activation")}, {},
    ),
    "a gradient that underflows under the scale of earlier steps": (
        Branches, "delayed", features, small_gradient, "mse", "grad-distance",
        {("b", "wgrad", "gradient")}, {"warm": True},
    ),
    "an input that saturates under the scale of earlier steps": (
        mlp, "delayed", features, larger_input, "mse", "grad-distance",
        {("0", "fprop", "activation"), ("0", "wgrad", "activation")}, {"warm": True},
    ),
    "a broken quantizer for the columns of one layer's weight": (
        gpt, replaced(Broken, "weight", "blocks.1.qkv", side="columnwise"), tokens, nothing,
        "cross_entropy", "grad-distance", {("blocks.1.qkv", "dgrad", "weight")}, {},
    ),
    "a broken quantizer for one role": (
        gpt, replaced(Broken, "grad_output", side="rowwise"), tokens, nothing,
        "cross_entropy", "grad-distance",
        {(layer, "dgrad", "gradient") for layer in BLOCK_LAYERS}, {},
    ),
    "a quantizer that gives NaN": (
        mlp, replaced(NotANumber, "input", "6"), features, nothing, "mse", "loss",
        {("6", "fprop", "activation")}, {},
    ),
    "one that hides another": (
        mlp, hidden(), features, nothing, "mse", "loss",
        {("3", "fprop", "activation"), ("6", "fprop", "weight")}, {},
    ),
    "two at once": (
        gpt, "current", tokens, both, "cross_entropy", "grad-distance",
        {("blocks.0.up", "fprop", "activation")}
        | {("blocks.1.up", gemm, "weight") for gemm in ("fprop", "dgrad")}, {},
    ),
    "a layer called twice": (
        Twice, "current", lambda: features(32), second_call_outlier, "mse", "grad-distance",
        {("shared", "fprop", "activation")}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    make, recipe, data, plant, loss, measure, expected, options = FAULTS[name]
    path = captured(
        make, recipe, data(), plant, tmp_path / "step.safetensors", loss=loss, **options
    )
    given = None if isinstance(recipe, str) else recipe
    report = bisect(path, make(), measure=measure, recipe=given)
    print(
        report.sentence(),
        report.replays,
        *report.reasons(),
        *report.notes,
        report.verified,
        report.recipe_file,
        sep="\n",
    )
    assert found(report) == expected
    assert report.solved
    assert report.before > report.tolerance
    if given is None:
        assert report.verified <= report.tolerance


def test_what_a_fault_entails_is_told_from_it(tmp_path: Path) -> None:
    """What comes back through a weight that has grown outgrows its own scale: in high precision it
    is clamped, too."""
    path = captured(
        gpt,
        "delayed",
        tokens(),
        scaled_block_weight,
        tmp_path / "step",
        loss="cross_entropy",
        warm=True,
    )
    report = bisect(path, gpt())
    follows = {(f.operands[0]): f.follows for f in report.findings}
    assert {str(o): names for o, names in follows.items()} == {
        "blocks.0.down: weight in fprop": (),
        "blocks.0.down: weight in dgrad": (),
        "blocks.0.up: gradient in dgrad": ("blocks.0.down: weight",),
        "blocks.0.up: gradient in wgrad": ("blocks.0.down: weight",),
    }
    # The numbers are of the step with all findings in high precision: with the weight clamped it is
    # a third of that.
    assert all(f.statistics.saturation > 40 for f in report.findings)
    assert all("clamped" in f.reason and "of earlier steps" in f.reason for f in report.findings)


def raising(tensor_type, layer, side=None):
    class Raising(CurrentScalingQuantizerRef):
        def quantize_impl(self, tensor, dtype):
            if tensor.any():
                raise ArithmeticError("this quantizer is broken")
            return super().quantize_impl(tensor, dtype)

    return replaced(Raising, tensor_type, layer, side=side)


@pytest.mark.parametrize(
    ("tensor_type", "side", "expected"),
    [
        ("input", None, {("fprop", "activation"), ("wgrad", "activation")}),
        ("weight", "columnwise", {("dgrad", "weight")}),
        ("grad_output", None, {("dgrad", "gradient"), ("wgrad", "gradient")}),
    ],
)
def test_a_quantizer_that_raises_is_a_finding(tensor_type, side, expected, tmp_path: Path) -> None:
    path, recipe = tmp_path / "step", raising(tensor_type, "3", side)
    model, (x, y) = ottava.convert(mlp(), recipe), features()
    with pytest.raises(ArithmeticError), capture(model, path, targets=y, loss="mse"):
        F.mse_loss(model(x), y).backward()
    report = bisect(path, mlp(), recipe=recipe)
    assert found(report) == {("3", *operand) for operand in expected}
    assert all(
        f.reason == "its quantizer raises ArithmeticError: this quantizer is broken"
        for f in report.findings
    )
    assert report.solved
    assert report.before == float("inf")
    assert json.dumps(report.as_json())


def test_a_quantizer_that_raises_without_the_model(tmp_path: Path) -> None:
    path = captured(mlp, "current", features(), nothing, tmp_path / "step")
    with pytest.raises(
        UsageError, match=r"layer '3' cannot be computed: ArithmeticError: this quantizer is broken"
    ):
        bisect(path, recipe=raising("weight", "3"))


def test_a_finding_that_the_recipe_file_does_not_fix_is_told(tmp_path: Path, monkeypatch) -> None:
    path = captured(
        gpt, "current", tokens(), weight_outlier, tmp_path / "step", loss="cross_entropy"
    )
    monkeypatch.setattr(
        "ottava_bisect.search.bisect.recipe_text", lambda *_, **__: "default: current\n"
    )
    report = bisect(path, gpt())
    assert report.after <= report.tolerance < report.verified
    assert "under the recipe file the step is still wrong" in report.notes
