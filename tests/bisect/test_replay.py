"""A replay is the captured step, bit for bit, and on other machines in its quantized bytes."""

from __future__ import annotations

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.installed import recipes
from ottava.errors import CheckpointError, UsageError
from ottava_bisect import Bundle, bisect, capture
from ottava_bisect.search.operands import CapturedOperands
from ottava_bisect.search.replay import Replay
from tests.bisect.steps import Model, broken, captured, converted, data, seed, step_of

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPES = [name for name in recipes() if name != "custom"]


class Recomputing(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class InPlace(Model):
    """Changes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2.0))


class WithLoss(Model):
    """Returns its loss, as models of Transformers do."""

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        logits = super().forward(x)
        if labels is None:
            return logits
        return {"loss": F.mse_loss(logits.float(), labels), "logits": logits}


def captured_step(model: Any, path: Path, **options: Any) -> tuple[Bundle, dict[str, torch.Tensor]]:
    """A step after another one, and the gradients that it leaves."""
    seed(0)
    step_of(model, *data(0))
    step = Bundle.read(captured(model, path, None, **options))
    named = model.named_parameters()
    return step, {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.safetensors"


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A step under current scaling, which tests must not change."""
    path = tmp_path_factory.mktemp("replay") / "step.safetensors"
    return captured_step(converted(Model(), "current"), path)[0]


def assert_replayed(step: Bundle, gradients: dict[str, torch.Tensor], replay: Replay) -> None:
    """The step comes again, in each replay."""
    found = replay.comparison
    assert found.equal == found.operands == 2 * len(step.calls)
    assert found.products == sum(len(call.digests) for call in step.calls)
    assert not found.other_bytes
    calls = [(call.layer, *key.split(".")) for call in step.calls for key in call.digests]
    assert set(replay.operands) == set(calls)
    for outcome in (replay.first, replay.run(replay.operands), replay.run(replay.operands)):
        assert outcome.loss == step.loss
        assert outcome.gradients.keys() >= gradients.keys()
        for name, value in gradients.items():
            assert torch.equal(outcome.gradients[name], value), name
    assert all(p.grad is None for p in replay.model.parameters())


INPUT, LABELS = data()
# Recipe, model, options of convert, and options of the captured step.
STEPS: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    **{recipe: (recipe, Model, {}, {}) for recipe in RECIPES},
    "autocast": ("current", Model, {}, {"autocast": True}),
    "recomputed": ("current", Recomputing, {}, {}),
    "changed input": ("current", InPlace, {}, {}),
    "gradient of the input": ("current", Model, {}, {"batch": (INPUT.requires_grad_(), LABELS)}),
    "quantized weights": ("current", Model, {"primary": True}, {}),
    "scaled loss": ("delayed", Model, {}, {"scale": 1024.0}),
    "loss of a third": ("delayed", Model, {}, {"scale": 1 / 3}),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_replay_is_the_step(case: str, path: Path) -> None:
    recipe, make, options, of_step = STEPS[case]
    step, gradients = captured_step(converted(make(), recipe, **options), path, **of_step)
    model = converted(make(), recipe, **options) if options else make()
    seed(7)
    before, torch_before = random.getstate(), torch.get_rng_state()
    assert_replayed(step, gradients, Replay(step, model))
    bisect(step)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


def test_a_model_that_returns_its_loss(path: Path) -> None:
    model, (x, y) = converted(WithLoss(), "current"), data()
    with capture(model, path) as step:
        model(x, labels=y)["loss"].backward()
    read = Bundle.read(path)
    assert read.loss == step.loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    # The captured model itself, with its gradients, is a model for the replays, too.
    for other in (WithLoss(), model):
        assert_replayed(read, gradients, Replay(read, other))


class Outputs(NamedTuple):
    first: torch.Tensor
    rest: dict[str, torch.Tensor | None]


class Chained(torch.nn.Module):
    """An output is computed from another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        first = self.a(x)
        return Outputs(first, {"b": self.b(torch.relu(first)), "none": None})


def of_both(outputs: Any, targets: Any = None) -> torch.Tensor:
    return outputs[0].sum() + outputs[1]["b"].square().sum()


@pytest.mark.parametrize("loss", [None, of_both])
def test_outputs_that_were_computed_from_each_other(loss: Any, path: Path) -> None:
    model = converted(Chained(), "current")
    with capture(model, path):
        (of_both(model(data()[0])) * 2**20).backward()
    replay = Replay(Bundle.read(path), Chained(), loss=loss)
    assert replay.comparison.equal == replay.comparison.operands == 4
    for name, p in model.named_parameters():
        assert torch.equal(replay.first.gradients[name], p.grad)


def test_microbatches(path: Path) -> None:
    model = converted(Model(), "delayed")
    with capture(model, path, targets=[data(n)[1] for n in range(3)], loss="mse"):
        for n in range(3):
            step_of(model, *data(n), scale=1 / 3)
        # A call without gradients is no part of the step.
        with torch.no_grad():
            model(data()[0])
    step = Bundle.read(path)
    replay = Replay(step, Model())
    assert replay.comparison.equal == replay.comparison.operands == 2 * len(step.calls)
    assert not replay.comparison.other_bytes
    for name, p in model.named_parameters():
        assert torch.equal(replay.first.gradients[name], p.grad)


def test_modes_buffers_frozen_parameters_fused_accumulation_and_no_loss(path: Path) -> None:
    model = converted(Model(), "current")
    model.norm.eval()
    model.hidden.fill_(3.0)
    model.twice.weight.requires_grad_(False)
    step, gradients = captured_step(model, path, loss=None)
    replay = Replay(step, Model())
    assert "twice.weight" not in replay.first.gradients
    assert replay.first.loss != replay.first.loss
    for name, value in gradients.items():
        assert torch.equal(replay.first.gradients[name], value)
    model.last.fuse_wgrad_accumulation = True
    model.last.weight.main_grad = torch.zeros_like(model.last.weight)
    replay = Replay(captured_step(model, path)[0], copy.deepcopy(model))
    assert float(replay.first.gradients["last.weight"].norm()) > 0


def test_high_precision_is_that_of_torch(step: Bundle) -> None:
    replay = Replay(step, Model())
    exact = replay.run(())
    model = Model()
    model.load_state_dict(step.state)
    (next_normal,) = step.tensors["random.python.next"].tolist()
    random.setstate((3, tuple(step.tensors["random.python"].tolist()), next_normal))
    torch.set_rng_state(step.tensors["random.cpu"])
    loss = F.mse_loss(model(data()[0]), data()[1])
    assert exact.loss == pytest.approx(loss.item(), rel=1e-6)
    assert exact.loss != replay.first.loss
    # The loss alone needs no backward pass.
    assert replay.run((), backward=False).gradients == {}


def test_one_operand_matters_where_its_product_goes(step: Bundle) -> None:
    replay = Replay(step, Model())
    exact = replay.run(())

    def moved(outcome: Any, reference: Any) -> set[str]:
        gradients = outcome.gradients.items()
        return {n for n, v in gradients if not torch.equal(v, reference.gradients[n])}

    for operand in replay.operands:
        outcome = replay.run([operand])
        names = moved(outcome, exact)
        if operand.gemm == "fprop":
            assert len(names) > 1
        elif operand.gemm == "wgrad":
            assert names == {f"{operand.layer}.weight"}
            assert outcome.loss == exact.loss
        else:
            assert names
            assert f"{operand.layer}.bias" not in names or operand.layer == "twice"
        assert moved(replay.run([o for o in replay.operands if o != operand]), replay.first)


# -- on another machine --


class Summing(Model):
    """Sums in another order, if ``backwards`` is set."""

    backwards = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.first(x.bfloat16()) * 3).unbind(-1)
        total = sum(reversed(parts) if self.backwards else parts)
        x = torch.relu(self.twice(torch.stack(parts, -1) * total[:, None]))
        return self.last(torch.relu(self.twice(x)))


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_quantized_bytes_are_the_same_where_sums_have_another_order(
    recipe: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, gradients = captured_step(converted(Summing().bfloat16(), recipe), path)
    monkeypatch.setattr(Summing, "backwards", True)
    replay = Replay(step, Summing().bfloat16())
    found = replay.comparison
    assert 0 < found.equal < found.operands
    assert 0 < found.difference < 0.1
    assert found.products == sum(len(call.digests) for call in step.calls)
    assert not found.other_bytes
    again = replay.run(replay.operands)
    assert again.loss == replay.first.loss
    for name, value in gradients.items():
        assert torch.equal(again.gradients[name], replay.first.gradients[name])
        limit = 0.02 * float(value.abs().max())
        torch.testing.assert_close(again.gradients[name], value, rtol=0.02, atol=limit)


def test_a_change_moves_the_captured_operand(step: Bundle) -> None:
    operands, key = CapturedOperands(step, fed=True), ("first", 0)
    captured = step.operands["0.activation"]
    arrived = captured + 0.25
    arrived[:, 0] = captured[:, 0]
    assert torch.equal(operands.meet(key, "activation", arrived), captured)
    changed = arrived.clone()
    changed[0] += 1
    moved = operands.moved(key, "activation", changed)
    assert torch.equal(moved[1:], captured[1:])
    torch.testing.assert_close(moved[0], captured[0] + 1)
    assert torch.equal(moved[:, 0], changed[:, 0])
    # What arrived as captured is not replaced.
    assert operands.moved(("last", 0), "activation", changed) is changed


# -- what is refused --


class Lazy(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


def fails(output: Any, targets: Any) -> torch.Tensor:
    raise KeyError("labels")


ALL_FROZEN = [name for name, _ in Model().named_parameters()]
NO_ARGUMENTS = [{"args": {"tuple": []}, "kwargs": {"dict": {}}}]
INTEGERS = {"random.python": torch.zeros(3, dtype=torch.int64)}
# Changes of the step, the model, the loss function, and the error.
REFUSED: list[tuple[dict[str, Any], Any, Any, type[Exception], str]] = [
    ({}, lambda: torch.nn.Linear(16, 16), None, CheckpointError, "no module 'first'"),
    ({}, lambda: Model(outputs=32), None, CheckpointError, "does not fit"),
    ({}, Lazy, None, CheckpointError, "call 0 of layer 'first'"),
    ({}, Model, lambda output, targets: output.sum(), UsageError, "other gradients"),
    ({}, Model, fails, UsageError, "cannot be replayed: KeyError: 'labels'"),
    ({"targets": None}, Model, None, UsageError, "cannot be replayed: AttributeError"),
    ({"targets": {"tensor": "x"}}, Model, None, UsageError, "an argument is described"),
    ({"arguments": NO_ARGUMENTS}, Model, None, UsageError, "cannot be replayed: TypeError"),
    ({"layers": {"norm": 0}, "calls": []}, Model, None, UsageError, "'norm' .* is a BatchNorm1d"),
    ({"frozen": ALL_FROZEN}, Model, None, UsageError, "no output of the model needs a gradient"),
    ({"tensors": INTEGERS}, Model, None, CheckpointError, "random generators"),
]


@pytest.mark.parametrize(("changes", "make", "loss", "error", "words"), REFUSED)
def test_what_does_not_fit_the_step(
    changes: dict[str, Any], make: Any, loss: Any, error: Any, words: str, step: Bundle
) -> None:
    changes = {k: step.tensors | v if k == "tensors" else v for k, v in changes.items()}
    with pytest.raises(error, match=words) as caught:
        Replay(dataclasses.replace(step, **changes), make(), loss=loss)
    if loss is fails:
        assert isinstance(caught.value.__cause__, KeyError)


def test_weights_that_do_not_fit_the_operands(step: Bundle) -> None:
    for weight in (torch.ones(16), torch.ones(16, 8), torch.ones(16, 16, dtype=torch.int64)):
        state = step.state | {"first.weight": weight}
        with pytest.raises(CheckpointError, match="the weight of layer 'first' is"):
            bisect(dataclasses.replace(step, state=state))


def test_what_the_file_cannot_hold_has_to_be_given(path: Path) -> None:
    recipe = broken()
    step, gradients = captured_step(converted(Model(), recipe), path)
    with pytest.raises(UsageError, match="recipe to use"):
        Replay(step, Model())
    assert_replayed(step, gradients, Replay(step, converted(Model(), recipe)))
    assert Replay(step, Model(), recipe=recipe).run(()).loss > 0
    model = converted(Model(), "current")
    with capture(model, path):
        (model(data()[0]) * float("nan")).sum().backward()
    with pytest.raises(UsageError, match="loss function"):
        Replay(Bundle.read(path), Model())
