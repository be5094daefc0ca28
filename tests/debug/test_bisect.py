"""What ``bisect`` tells: faults that need each other, a hundred layers, what it cannot find; its command and page."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import ottava
import ottava_debug
from ottava.cli.main import app
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError
from ottava_custom import CurrentScalingQuantizerRef, CustomRecipe, HybridQuantizer
from ottava_custom.factories import current_scaling_ref_quantizer_factory as reference_factory
from ottava_debug import Bundle, bisect, capture
from ottava_debug.search.loading import fitting_state


class Stack(torch.nn.Module):
    """Many layers beside each other's residuals."""

    def __init__(self, layers=100, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(layers))
        self.register_buffer("used", torch.full((layers, width), layers**-0.5))

    def forward(self, x):
        for layer, norm, used in zip(self.layers, self.norms, self.used, strict=True):
            x = x + torch.tanh(layer(norm(x))) * used
        return x


class Both(torch.nn.Module):
    """Two layers whose errors do harm only together: they are multiplied."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(32, 16) for _ in range(3))
        self.register_buffer("exact", torch.zeros(2, 8, 16))

    def forward(self, x):
        wrong = (self.a(x) - self.exact[0]) * (self.b(x) - self.exact[1])
        return self.c(x) + wrong


def data(width=16, outputs=None):
    torch.manual_seed(5)
    return torch.randn(8, width), torch.randn(8, outputs or width)


def stored(model, path, recipe="current", width=16, outputs=None, loss="mse"):
    x, y = data(width, outputs)
    ottava.convert(model, recipe)
    with capture(model, path, targets=y, loss=loss) as step:
        step.loss = F.mse_loss(model(x), y)
        step.loss.backward()
    return path


def outlier(model, layer):
    """A weight that is much larger than the others, where nothing enters and nothing comes out."""
    with torch.no_grad():
        norm, linear = model.norms[layer], model.layers[layer]
        norm.weight[3] = norm.bias[3] = 0
        linear.weight[:, 3] = 0
        model.used[layer, 5] = 0
        linear.weight[5, 3] = 2.0**20
    return model


def of(report):
    return {(layer, f.gemm, f.tensor) for f in report.findings for layer in f.layers}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost these small tensors more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.safetensors"


@pytest.mark.parametrize("layer", [57, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 99))])
def test_a_hundred_layers_take_tens_of_replays(layer, path) -> None:
    seen = []
    stored(outlier(Stack(), layer), path)
    report = bisect(path, Stack, progress=lambda done, expected: seen.append((done, expected)))
    # What goes forward through one of a hundred layers matters less than what comes back to its norm.
    expected = {(f"layers.{layer}", gemm, "weight") for gemm in ("dgrad", "fprop")}
    assert {(f"layers.{layer}", "dgrad", "weight")} <= of(report) <= expected
    assert report.solved
    assert report.operands["quantized"] == 600
    assert report.replays <= 40
    # The estimate is never less than what was done, and of the right size from the beginning.
    assert all(done <= expected for done, expected in seen)
    assert 10 <= seen[0][1] <= 40


def test_one_gradient_among_hundreds_of_parameters(path) -> None:
    class Broken(CurrentScalingQuantizerRef):
        def quantize_impl(self, tensor, dtype):
            return super().quantize_impl(tensor * 0, dtype)

    def factory(role):
        made = reference_factory(role)
        wrong = role.tensor_type == "input" and role.name == "layers.41"
        return HybridQuantizer(made, Broken(made.dtype)) if wrong else made

    stored(Stack(48), path, CustomRecipe(factory))
    report = bisect(path, lambda: Stack(48), recipe=CustomRecipe(factory))
    assert of(report) == {("layers.41", "wgrad", "activation")}
    assert report.operands["quantized"] == 288
    assert report.replays <= 30
    assert report.operands["other_bytes"] == []
    assert report.recipe_file == ""
    assert any("holds functions" in note for note in report.notes)


def test_faults_that_do_harm_only_together(path) -> None:
    model, (x, _) = Both(), data(32, 16)
    with torch.no_grad():
        for layer in (model.a, model.b):
            # Nothing enters at the outlier.
            layer.weight[:, 0] = 0
            layer.weight[2, 0] = 2.0**26
        x[:, 0] = 0
        model.exact.copy_(torch.stack([model.a(x), model.b(x)]))
    ottava.convert(model, "current")
    y = torch.zeros(8, 16)
    with capture(model, path, targets=y, loss="mse") as step:
        step.loss = F.mse_loss(model(x), y)
        step.loss.backward()
    report = bisect(path, Both, measure="loss")
    (finding,) = report.findings
    pair = {f"{finding.layers[0]}: {finding.tensor} in {finding.gemm}", *finding.partners}
    assert pair == {"a: weight in fprop", "b: weight in fprop"}
    assert finding.alone < report.tolerance < report.before
    assert finding.without < report.tolerance
    assert report.solved
    assert "only together with" in finding.reason


def test_a_quantizer_that_breaks_all_layers_is_one_finding(path) -> None:
    class Halved(CurrentScalingQuantizerRef):
        def quantize_impl(self, tensor, dtype):
            return super().quantize_impl(tensor * 0.5, dtype)

    def factory(role):
        made = reference_factory(role)
        return Halved(made.dtype) if role.tensor_type == "weight" else made

    stored(Stack(24), path, CustomRecipe(factory))
    report = bisect(path, lambda: Stack(24), measure="loss", tolerance=0.01, recipe=CustomRecipe(factory))
    (finding,) = report.findings
    assert finding.layers == tuple(f"layers.{n}" for n in range(24))
    assert (finding.gemm, finding.tensor) == ("fprop", "weight")
    assert finding.layer.startswith("24 layers, ")
    assert "the quantizer gives the values times 0.5" in finding.reason


def test_a_recipe_that_is_too_coarse_is_told(path) -> None:
    report = bisect(stored(Stack(6), path), lambda: Stack(6), tolerance=1e-4)
    assert not report.solved
    assert any("too coarse" in note or "stopped" in note for note in report.notes)
    assert report.replays <= 200


def test_a_healthy_step_has_nothing_to_find(path) -> None:
    report = bisect(stored(Stack(8), path), lambda: Stack(8))
    assert report.solved
    assert not report.findings
    assert report.replays <= 4
    assert "Nothing to find" in report.sentence()


def test_a_step_that_is_wrong_in_high_precision_too(path) -> None:
    model = Stack(4)
    with torch.no_grad():
        model.norms[2].bias[0] = float("nan")
    report = bisect(stored(model, path), lambda: Stack(4))
    assert not report.solved
    assert not report.findings
    assert any("high precision either" in note for note in report.notes)


def test_the_replays_that_are_allowed(path) -> None:
    report = bisect(stored(outlier(Stack(24), 17), path), lambda: Stack(24), max_replays=12)
    assert report.replays == 12
    assert not report.solved
    assert any("stopped after 12" in note for note in report.notes)


@pytest.mark.parametrize("measure", ["loss", "grad-norm", "grad-distance"])
def test_measures(measure, path) -> None:
    report = bisect(stored(outlier(Stack(6), 2), path), lambda: Stack(6), measure=measure, tolerance=1e-3)
    assert ("layers.2", "fprop", "weight") in of(report)
    if measure != "grad-distance":
        assert report.value == report.captured
        assert report.reference != report.value
    if measure == "loss":
        assert {f.gemm for f in report.findings} == {"fprop"}


def test_the_recipe_file_fixes_the_step(path, tmp_path) -> None:
    report = bisect(stored(outlier(Stack(6), 2), path), lambda: Stack(6))
    (tmp_path / "fixed.yaml").write_text(report.recipe_file)
    assert report.verified < report.tolerance < report.before
    again = bisect(path, lambda: Stack(6), recipe=str(tmp_path / "fixed.yaml"))
    assert not again.findings
    assert again.before == report.verified


def test_another_recipe_is_another_step(path) -> None:
    report = bisect(stored(outlier(Stack(6), 2), path), lambda: Stack(6), recipe="rowwise")
    # One row of the weight is lost, and the others are not.
    assert report.before < 0.5 * bisect(path, lambda: Stack(6)).before
    assert report.operands["quantized"] == 0


def test_without_the_model(path) -> None:
    report = bisect(stored(outlier(Stack(6), 2), path))
    assert of(report) == {("layers.2", gemm, "weight") for gemm in ("fprop", "dgrad")}
    assert report.measure == "products"
    assert report.operands["quantized"] == 36
    assert report.operands["other_bytes"] == []
    assert "weight: identity" in report.recipe_file


def test_gradients_that_are_noise_do_not_count(path) -> None:
    """Those of the biases of keys are sums that cancel to rounding errors."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.query, self.key, self.value = (torch.nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            x = x.reshape(1, 8, 32)
            return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))[0]

    report = bisect(stored(Attention(), path, width=32), Attention)
    assert report.noisy == ("key.bias",)
    assert report.solved
    assert not report.findings


def test_what_is_refused(path) -> None:
    stored(Stack(2), path, loss=None)
    with pytest.raises(OptionError, match="grad-distance"):
        bisect(path, Stack, measure="accuracy")
    with pytest.raises(OptionError, match="tolerance"):
        bisect(path, Stack, tolerance=-1.0)
    with pytest.raises(OptionError, match="max_replays"):
        bisect(path, Stack, max_replays=3)
    with pytest.raises(OptionError, match="cross_entropy"):
        bisect(path, Stack, loss="hinge")
    with pytest.raises(DTypeError, match="model is a int"):
        bisect(path, lambda: 5)
    with pytest.raises(UsageError, match="loss of the step is not known"):
        bisect(path, lambda: Stack(2), measure="loss")
    with pytest.raises(UsageError, match="other gradients"):
        bisect(path, lambda: Stack(2), loss=lambda output, _: output.square().mean())
    with pytest.raises(CheckpointError):
        bisect(path.with_name("nowhere"), Stack)


def test_a_state_that_moves_with_the_step_is_carried_to_the_fix(path) -> None:
    """Under delayed scaling a role that is kept takes its slot with it; the others keep their scales."""
    model, (x, y) = ottava.convert(outlier(Stack(4), 1), "delayed"), data()
    for _ in range(3):
        F.mse_loss(model(x), y).backward()
    model.zero_grad()
    with capture(model, path, targets=y, loss="mse"):
        F.mse_loss(model(x), y).backward()
    report = bisect(path, lambda: Stack(4))
    assert ("layers.1", "fprop", "weight") in of(report)
    assert report.verified == pytest.approx(report.after, rel=0.5)
    assert report.verified < report.tolerance


def test_layers_without_names_get_a_note(path) -> None:
    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(ottava.nn.Linear(16, 16), torch.nn.LayerNorm(16), ottava.nn.Linear(16, 16))

    model, (x, y) = make(), data()
    for scale in (1, 1, 2**10):
        model.zero_grad()
        with capture(model, path, targets=y, loss="mse") as step:
            with ottava.autocast("delayed"):
                step.loss = F.mse_loss(model(x * scale), y)
            step.loss.backward()
    report = bisect(path, make)
    assert of(report) == {("0", gemm, "activation") for gemm in ("fprop", "wgrad")}
    assert report.verified < report.tolerance
    assert any("made without a name" in note for note in report.notes)


def test_the_slots_of_a_state_are_carried(tmp_path) -> None:
    model, (x, y) = ottava.convert(Stack(2), "delayed"), data()
    for _ in range(3):
        F.mse_loss(model(x), y).backward()
    captured = model.state_dict()
    (tmp_path / "kept.yaml").write_text("default: delayed\nlayers:\n  - match: layers.1\n    weight: identity\n")
    kept = ottava.convert(Stack(2), str(tmp_path / "kept.yaml"))
    state = fitting_state(kept, captured)
    kept.load_state_dict(state)
    scales, history = (captured[f"layers.1.recipe_state.{name}"] for name in ("scale", "amax_history"))
    assert len(set(scales.tolist())) == 3
    assert torch.equal(state["layers.1.recipe_state.delayed.scale"], scales[[0, 2]])
    assert torch.equal(state["layers.1.recipe_state.delayed.amax_history"], history[:, [0, 2]])
    assert torch.equal(state["layers.0.recipe_state.delayed.scale"], captured["layers.0.recipe_state.scale"])


# -- the command --

MODULE = """
import torch
torch.manual_seed(0)
def make():
    from tests.debug.test_bisect import Stack
    return Stack(6)
def loss(output, targets):
    return torch.nn.functional.mse_loss(output, targets)
def words(output, targets):
    return output + "text"
def fails():
    raise ValueError("no model today")
"""


@pytest.fixture
def run(path, tmp_path, monkeypatch):
    stored(outlier(Stack(6), 2), path, loss=None)
    (tmp_path / "of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["bisect", str(path), *arguments])


def test_the_command(run, tmp_path) -> None:
    done = run("--model", "of_a_user:make", "--recipe-file", "fixed.yaml", "--html", "page.html")
    assert done.exit_code == 0, done.output
    assert "layers.2" in done.output
    assert "weight in fprop" in done.output
    text = (tmp_path / "fixed.yaml").read_text()
    assert "match: layers.2" in text
    fixed = run("--model", "of_a_user:make", "--recipe", "fixed.yaml")
    assert fixed.exit_code == 0
    assert "Nothing to find" in fixed.output
    page = (tmp_path / "page.html").read_text()
    assert "layers.2" in page
    assert not re.search(r"<script|<link|src=|https?:|@import|url\(", page)


def test_the_command_in_json(run) -> None:
    done = run(
        "--model", "of_a_user:make", "--loss", "of_a_user:loss", "--measure", "loss", "--tolerance", "1e-3", "--json"
    )
    told = json.loads(done.stdout)
    assert told["solved"] is True
    assert told["findings"][0]["layers"] == ["layers.2"]
    assert told["findings"][0]["statistics"]["underflow"] > 90
    assert run("--json").exit_code == 0


def test_the_command_with_what_is_wrong(run, path) -> None:
    for arguments, told in (
        (["--model", "nowhere:make"], "--model 'nowhere:make' cannot be had"),
        (["--model", "of_a_user:fails"], "no model today"),
        (["--measure", "beauty", "--model", "of_a_user:make"], "measure is 'beauty'"),
        (["--recipe-file", "fixed.txt"], "ends in .yaml"),
        (["--html", "nowhere/page.html"], "cannot be written"),
        (["--recipe", "nonesuch"], "nonesuch"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert told in done.output
    path.write_bytes(b"nothing")
    done = run()
    assert done.exit_code == 2
    assert "safetensors" in done.output


def test_a_step_that_is_not_explained_is_an_exit_code(run) -> None:
    assert run("--model", "of_a_user:make", "--tolerance", "1e-5").exit_code == 1


def test_names_are_escaped_in_the_page(path) -> None:
    from ottava_debug.search.page import page

    report = bisect(stored(outlier(Stack(2), 1), path))
    finding = report.findings[0]
    report.findings = [type(finding)(("<script>alert(1)</script>",), *list(vars(finding).values())[1:])]
    report.notes.append("<img src=x>")
    text = page(report, "<b>")
    assert "<script>" not in text
    assert "<img" not in text
    assert "<b>" not in text


def test_public_names() -> None:
    assert ottava_debug.capture is capture
    assert ottava_debug.bisect is bisect
    assert ottava_debug.Bundle is Bundle


# -- reasons, and what the numbers are of --


def lost(values, quantizer, *, stateful=False):
    from ottava_debug.search.operands import Comparison, Operand
    from ottava_debug.search.report import reason

    operand, found = Operand("a", "fprop", "weight"), Comparison()
    state = SimpleNamespace(quantizer=lambda *_, **__: SimpleNamespace(stateful=stateful))
    call = SimpleNamespace(state=state, recipe=SimpleNamespace(stateful=False))
    found.note(call, operand, values, quantizer.quantize(values), None)
    return reason([operand], found)


def delayed(scale):
    made = ottava.get_recipe("delayed").quantizer("weight")
    made.scale.fill_(scale)
    return made


def gaussian(**changed):
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for place, value in changed.items():
        values.view(-1)[int(place[1:])] = value
    return values


@pytest.mark.parametrize(
    ("values", "scale", "expected"),
    [
        # One value is nearly all of the signal, so that the cosine is nearly 1.
        (gaussian(_7=2.0**20), 1.0, "0.0244 % of the values are clamped"),
        (gaussian() * 2.0**9, 1.0, "of the values are clamped"),
        (gaussian() * 2.0**-12, 1.0, "the scale is too small"),
        (gaussian(_7=2.0**40), 448 * 2.0**-40, "an outlier, 1.1e+12, takes the range"),
        (gaussian(_7=float("nan")), 1.0, "1 of its 4096 values are NaN"),
        (gaussian(), 16.0, "it loses little by itself"),
    ],
)
def test_reasons(values, scale, expected) -> None:
    assert expected in lost(values, delayed(scale))


def test_scales_are_of_earlier_steps_where_the_quantizer_says_so() -> None:
    assert "the scale is of earlier steps, and too large" in lost(gaussian() * 2.0**9, delayed(1.0), stateful=True)
    assert "earlier" not in lost(gaussian() * 2.0**9, delayed(1.0))


class Again(torch.nn.Module):
    """A layer that runs twice, the first time with an outlier in what it takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(16, 16)

    def forward(self, x):
        outlier = torch.zeros(16)
        outlier[3] = 2.0**20
        return self.a(x + outlier) * 0 + self.a(x)


def test_of_several_calls_the_worst_counts(path) -> None:
    model = Again()
    with torch.no_grad():
        model.a.weight[:, 3] = 0
    report = bisect(stored(model, path))
    assert of(report) >= {("a", "fprop", "activation")}
    (finding,) = (f for f in report.findings if f.gemm == "fprop")
    assert finding.alone > 0.9
    assert finding.statistics.amax > 2.0**19


@pytest.mark.parametrize("with_model", [True, False])
def test_bytes_that_are_not_the_captured_ones_are_told(with_model, path) -> None:
    step = Bundle.read(stored(Stack(2), path))
    step.calls[0].digests["fprop.weight"] = "0" * 32
    report = bisect(step, (lambda: Stack(2)) if with_model else None)
    assert report.operands["other_bytes"] == ["layers.0: weight in fprop"]
    assert any("bytes" in note and "captured" in note for note in report.notes)


def test_a_gradient_that_is_zero_in_high_precision_does_not_count() -> None:
    from ottava_debug.search.measure import Outcome, relative_distances

    right = Outcome(0.0, {"a": torch.zeros(2), "b": torch.ones(2)})
    assert relative_distances(Outcome(0.0, {"a": torch.ones(2), "b": torch.ones(2)}), right) == {"b": 0.0}


def test_without_the_model_scales_of_another_recipe_start_afresh(path) -> None:
    stored(outlier(Stack(2), 1), path)
    assert any("start afresh" in note for note in bisect(path, recipe="delayed").notes)
    report = bisect(path)
    assert not any("start afresh" in note for note in report.notes)
    report.findings = report.findings[:1]
    assert report.sentence().startswith("1 operand moves the result of its product")


@pytest.mark.parametrize(
    "arguments", [("--loss", "cross_entropy"), ("--loss", "of_a_user:fails"), ("--loss", "of_a_user:words")]
)
def test_the_command_with_a_loss_that_fails(arguments, run, path) -> None:
    done = run("--model", "of_a_user:make", *arguments)
    assert done.exit_code == 2
    assert "the step cannot be replayed" in done.output
    assert "Traceback" not in done.output
