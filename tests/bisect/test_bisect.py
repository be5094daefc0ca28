"""What ``bisect`` says of a step: measures, reasons, limits, the recipe file, and refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ottava
import ottava_bisect
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError
from ottava.nn.call import Call
from ottava_bisect import Bundle, bisect, capture
from ottava_bisect.search.loading import fitting_state
from ottava_bisect.search.operands import Comparison, Operand
from ottava_bisect.search.report import reason
from tests.bisect.steps import (
    WIDTH,
    Halved,
    Stack,
    blamed,
    broken,
    captured,
    converted,
    data,
    outlier,
    step_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS = {("layers.2", gemm, "weight") for gemm in ("fprop", "dgrad")}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with an outlier in the third layer."""
    path = tmp_path_factory.mktemp("bisect") / "step.safetensors"
    return captured(outlier(Stack()), path, scale=1024.0)


def test_the_recipe_file_fixes_the_step(path: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    report = bisect(path, Stack, progress=lambda *about: progress.append(about))
    assert blamed(report) == WEIGHTS
    assert report.verified < report.tolerance < report.before
    assert report.operands["quantized"] == 24
    # The number of replays is never estimated below those that were made.
    assert all(done <= expected for done, expected in progress)
    assert [done for done, _ in progress] == list(range(2, 2 + len(progress)))
    (tmp_path / "fixed.yaml").write_text(report.recipe_file)
    again = bisect(path, Stack, recipe=str(tmp_path / "fixed.yaml"))
    assert not again.findings
    assert again.before == report.verified
    assert again.replays <= 4
    assert "Nothing to find" in again.sentence()
    # The file has the layers' own names, where these were given inside another model.
    inner = converted(outlier(Stack()), "current")
    outer = captured(torch.nn.Sequential(inner), tmp_path / "outer", None)
    assert "match: layers.2\n" in bisect(outer, torch.nn.Sequential(inner)).recipe_file
    # Another recipe loses one row of the weight.
    other = bisect(path, Stack, recipe="rowwise")
    assert other.before < 0.5 * report.before
    assert other.operands["quantized"] == 0


@pytest.mark.parametrize("measure", ["loss", "grad-norm"])
def test_measures(measure: str, path: Path) -> None:
    report = bisect(path, Stack, measure=measure, tolerance=5e-3)
    assert ("layers.2", "fprop", "weight") in blamed(report)
    assert report.value == report.captured != report.reference
    assert f"The {measure} is" in report.sentence()
    if measure == "loss":
        assert {finding.gemm for finding in report.findings} == {"fprop"}


def test_a_norm_of_half_is_as_far_as_one_of_twice(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    model = converted(model, broken((Halved, "grad_output", "", "")))
    path = captured(model, tmp_path / "step", None)
    report = bisect(path, model, measure="grad-norm")
    assert report.before == pytest.approx(1.0, abs=0.05)


def test_without_the_model(path: Path) -> None:
    report = bisect(path)
    assert blamed(report) == WEIGHTS
    assert report.measure == "products"
    assert report.operands == {
        "operands": 8,
        "arrived_equal": 8,
        "largest_difference": 0.0,
        "quantized": 24,
        "other_bytes": [],
    }
    assert "weight: identity" in report.recipe_file
    assert report.sentence().startswith("2 operands move the result of their product")
    assert not any("start afresh" in note for note in report.notes)
    assert any("start afresh" in note for note in bisect(path, recipe="delayed").notes)


def test_the_search_stops(path: Path, tmp_path: Path) -> None:
    stopped = bisect(path, Stack, max_replays=10)
    # The recipe file of the findings is tried once more.
    assert stopped.replays == 10 + 1
    assert not stopped.solved
    assert any("stopped after 10" in note for note in stopped.notes)
    larger = captured(outlier(Stack(6)), tmp_path / "larger")
    options = {"measure": "loss", "tolerance": 1e-6, "max_replays": 60}
    stopped = bisect(larger, lambda: Stack(6), **options)
    assert stopped.replays == 60 + 1
    assert not stopped.solved
    coarse = bisect(captured(Stack(), tmp_path / "sound"), Stack, tolerance=0.02)
    assert not coarse.solved
    assert not coarse.findings
    assert any("the recipe is too coarse" in note for note in coarse.notes)


def test_steps_in_which_no_operand_is_to_blame(tmp_path: Path) -> None:
    report = bisect(captured(Stack(), tmp_path / "step"), Stack)
    assert report.solved
    assert not report.findings
    assert report.replays <= 4
    model = Stack()
    with torch.no_grad():
        model.norms[2].bias[0] = float("nan")
    report = bisect(captured(model, tmp_path / "step"), Stack)
    assert not report.solved
    assert not report.findings
    assert any("high precision either" in note for note in report.notes)


class Attention(torch.nn.Module):
    """The gradients of the biases of keys are sums that cancel to rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(1, 8, 16)
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))[0]


def test_gradients_that_are_noise_do_not_count(tmp_path: Path) -> None:
    report = bisect(captured(Attention(), tmp_path / "step"), Attention)
    assert report.noisy == ("key.bias",)
    assert report.solved
    assert not report.findings
    assert any("key.bias" in note for note in report.notes)


def test_other_bytes_are_told(path: Path) -> None:
    step = Bundle.read(path)
    step.calls[0].digests["fprop.weight"] = "0" * 32
    for model in (Stack, None):
        report = bisect(step, model)
        assert report.operands["other_bytes"] == ["layers.0: weight in fprop"]
        assert any("bytes" in note and "captured" in note for note in report.notes)


def test_the_state_of_a_recipe_is_carried_to_the_fix(tmp_path: Path) -> None:
    """A role that is kept takes its slot with it; the others keep their scales."""
    model = ottava.convert(outlier(Stack(), 1), "delayed")
    for _ in range(3):
        step_of(model, *data())
    report = bisect(captured(model, tmp_path / "step", None), Stack)
    assert ("layers.1", "fprop", "weight") in blamed(report)
    assert report.verified == pytest.approx(report.after, rel=0.5)
    assert report.verified < report.tolerance
    before = model.state_dict()
    text = "default: delayed\nlayers:\n  - match: layers.1\n    weight: identity\n"
    (tmp_path / "kept.yaml").write_text(text)
    kept = ottava.convert(Stack(), str(tmp_path / "kept.yaml"))
    state = fitting_state(kept, before)
    kept.load_state_dict(state)
    scale, history = (before[f"layers.1.recipe_state.{n}"] for n in ("scale", "amax_history"))
    assert len(set(scale.tolist())) == 3
    own = "layers.1.recipe_state.delayed"
    assert torch.equal(state[f"{own}.scale"], scale[[0, 2]])
    assert torch.equal(state[f"{own}.amax_history"], history[:, [0, 2]])


def test_layers_without_names_get_a_note(tmp_path: Path) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [ottava.nn.Linear(16, 16), torch.nn.LayerNorm(16), ottava.nn.Linear(16, 16)]
        return torch.nn.Sequential(*layers)

    model, (x, y) = make(), data()
    for scale in (1, 1, 2**10):
        model.zero_grad()
        with capture(model, tmp_path / "step", targets=y, loss="mse"):
            with ottava.autocast("delayed"):
                loss = F.mse_loss(model(x * scale), y)
            loss.backward()
    report = bisect(tmp_path / "step", make)
    assert blamed(report) == {("0", gemm, "activation") for gemm in ("fprop", "wgrad")}
    assert report.verified < report.tolerance
    assert any("made without a name" in note for note in report.notes)


# -- reasons --


def reason_of(values: torch.Tensor, quantizer: Any, call: Any) -> str:
    operand, comparison = Operand("a", "fprop", "weight"), Comparison()
    comparison.note(call, operand, values, quantizer.quantize(values), None)
    return reason([operand], comparison)


def gaussian(seventh: float | None = None) -> torch.Tensor:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    if seventh is not None:
        values.view(-1)[7] = seventh
    return values


@pytest.mark.parametrize(
    ("values", "scale", "words"),
    [
        # One value is nearly all of the signal, so the cosine is nearly 1.
        (gaussian(2.0**20), 1.0, "0.0244 % of the values are clamped"),
        (gaussian() * 2.0**9, 1.0, "of the values are clamped"),
        (gaussian() * 2.0**-12, 1.0, "the scale is too small"),
        (gaussian(2.0**40), 448 * 2.0**-40, "an outlier, 1.1e+12, takes the range"),
        (gaussian(float("nan")), 1.0, "1 of its 4096 values are NaN"),
        (gaussian(), 16.0, "it loses little by itself"),
    ],
)
def test_the_reason_of_a_loss(values: torch.Tensor, scale: float, words: str) -> None:
    quantizer = ottava.get_recipe("delayed").quantizer("weight")
    quantizer.scale.fill_(scale)
    for stateful in (False, True):
        own = SimpleNamespace(stateful=stateful)
        state = SimpleNamespace(quantizer=lambda *_, own=own, **__: own)
        call = SimpleNamespace(state=state, recipe=SimpleNamespace(stateful=False))
        found = reason_of(values, quantizer, call)
        assert words in found.replace("of earlier steps, and ", "")
        assert ("of earlier steps" in found) is (stateful and "the scale is" in found)


INITIAL = "the scale is the initial one, which no step has set yet, and"


@pytest.mark.parametrize(
    ("values", "steps", "words"),
    [
        (gaussian(2.0**9) * 2.0**-9, 0, f"{INITIAL} too small"),
        (gaussian() * 2.0**-20, 0, f"{INITIAL} too small"),
        (gaussian() * 2.0**9, 0, f"{INITIAL} too large"),
        # Their own scale would not be another one.
        (gaussian(400 * 2.0**12) * 2.0**-12, 0, "an outlier, 400, takes the range"),
        (gaussian(2.0**20), 2, "an outlier, 1.05e+06, takes the range"),
    ],
)
def test_the_initial_scale_is_told_from_an_outlier(
    values: torch.Tensor, steps: int, words: str
) -> None:
    layer = ottava.nn.Linear(64, 64, recipe="delayed")
    with torch.no_grad():
        layer.weight.copy_(values)
    for _ in range(steps):
        layer(torch.ones(1, 64)).sum().backward()
    state = layer.recipe_state
    before = {name: value.clone() for name, value in state.state_dict().items()}
    quantizer = state.quantizer("weight", rowwise=True, columnwise=False, recording=False)
    assert words in reason_of(values, quantizer, Call(layer.recipe, state))
    assert all(torch.equal(value, before[name]) for name, value in state.state_dict().items())


# -- what is refused --


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    path = captured(Stack(2), tmp_path / "step", loss=None)

    def make() -> Stack:
        return Stack(2)

    for model, options, error, words in (
        (make, {"measure": "accuracy"}, OptionError, "one of loss, grad-norm, grad-distance"),
        (make, {"tolerance": -1.0}, OptionError, "tolerance is -1"),
        (make, {"max_replays": 9}, OptionError, "max_replays is 9. Expected: at least 10"),
        (make, {"loss": "hinge"}, OptionError, "cross_entropy"),
        (lambda: 5, {}, DTypeError, "model is a int"),
        (make, {"measure": "loss"}, UsageError, "loss of the step is not known"),
        (make, {"loss": lambda y, _: y.square().mean()}, UsageError, "other gradients"),
        (torch.nn.Linear(16, 16), {}, CheckpointError, "has no module 'layers.0'"),
    ):
        with pytest.raises(error, match=words):
            bisect(path, model, **options)
    with pytest.raises(CheckpointError):
        bisect(tmp_path / "nowhere", make)
    assert {"Bundle", "Finding", "Report", "bisect", "capture"} <= set(dir(ottava_bisect))
    assert not hasattr(ottava_bisect, "something")
