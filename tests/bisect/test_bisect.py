"""What ``bisect`` finds: faults that need each other, a hundred layers, and what it cannot find."""

import pytest
import torch
import torch.nn.functional as F
from bisect_steps import Stack, data, of, outlier, stored

import ottava
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError
from ottava_bisect import bisect, capture
from ottava_bisect.search.loading import fitting_state
from ottava_custom import CurrentScalingQuantizerRef, CustomRecipe, HybridQuantizer
from ottava_custom.factories import current_scaling_ref_quantizer_factory as reference_factory

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("layer", [57, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 99))])
def test_a_hundred_layers_take_tens_of_replays(layer, path) -> None:
    seen = []
    stored(outlier(Stack(), layer), path)
    report = bisect(path, Stack, progress=lambda done, expected: seen.append((done, expected)))
    # What goes forward through one of a hundred layers matters less than what comes back to its
    # norm.
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
    report = bisect(
        path, lambda: Stack(24), measure="loss", tolerance=0.01, recipe=CustomRecipe(factory)
    )
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
    report = bisect(
        stored(outlier(Stack(6), 2), path), lambda: Stack(6), measure=measure, tolerance=1e-3
    )
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
    """Under delayed scaling a role that is kept takes its slot with it; the others keep their
    scales."""
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
        return torch.nn.Sequential(
            ottava.nn.Linear(16, 16), torch.nn.LayerNorm(16), ottava.nn.Linear(16, 16)
        )

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
    (tmp_path / "kept.yaml").write_text(
        "default: delayed\nlayers:\n  - match: layers.1\n    weight: identity\n"
    )
    kept = ottava.convert(Stack(2), str(tmp_path / "kept.yaml"))
    state = fitting_state(kept, captured)
    kept.load_state_dict(state)
    scales, history = (
        captured[f"layers.1.recipe_state.{name}"] for name in ("scale", "amax_history")
    )
    assert len(set(scales.tolist())) == 3
    assert torch.equal(state["layers.1.recipe_state.delayed.scale"], scales[[0, 2]])
    assert torch.equal(state["layers.1.recipe_state.delayed.amax_history"], history[:, [0, 2]])
    assert torch.equal(
        state["layers.0.recipe_state.delayed.scale"], captured["layers.0.recipe_state.scale"]
    )
