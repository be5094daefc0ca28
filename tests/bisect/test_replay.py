"""A replay is the captured step, bit for bit, and on other machines in its quantized bytes."""

import copy
import dataclasses
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ottava
from benchmarks.installed import recipes
from ottava.errors import CheckpointError, UsageError
from ottava_bisect.bundle import Bundle, digest
from ottava_bisect.capturing import capture
from ottava_bisect.recorder import values_of
from ottava_bisect.search.bisect import bisect
from ottava_bisect.search.replay import Replay
from ottava_custom import CustomRecipe


class Model(torch.nn.Module):
    """Dropout, a layer that runs twice, a norm that keeps statistics, and Python's random
    numbers."""

    def __init__(self, outputs=16):
        super().__init__()
        self.first, self.twice, self.last = (torch.nn.Linear(16, n) for n in (16, 16, outputs))
        self.norm, self.dropout = torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)

    def forward(self, x):
        x = self.dropout(self.norm(self.first(x))) * random.random()
        return self.last(torch.relu(self.twice(torch.relu(self.twice(x)))))


class Recomputing(Model):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class WithLoss(Model):
    """Gives its loss, as models of Transformers do."""

    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": F.mse_loss(logits.float(), labels), "logits": logits}


def data(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def converted(make, recipe, **options):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ottava.convert(make(), recipe, **options)


def captured(model, path, *, loss="mse", scale=1.0, autocast=False):
    """A step after two others, and the gradients that it left."""
    for seed in range(2):
        F.mse_loss(model(data(seed)[0]), data(seed)[1]).backward()
    model.zero_grad()
    x, y = data()
    with capture(model, path, targets=y, loss=loss) as step:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
        step.loss = F.mse_loss(output.float(), y)
        (step.loss * scale).backward()
    return Bundle.read(path), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.safetensors"


def check(step, gradients, replay):
    """Everything came again, and comes again and again."""
    found = replay.comparison
    assert found.equal == found.operands == 2 * len(step.calls)
    assert found.products == sum(len(call.digests) for call in step.calls)
    assert not found.other_bytes
    assert set(replay.operands) == {
        (c.layer, *key.split(".")) for c in step.calls for key in c.digests
    }
    for outcome in (replay.first, replay.run(replay.operands), replay.run(replay.operands)):
        assert outcome.loss == step.loss
        assert outcome.gradients.keys() >= gradients.keys()
        assert all(torch.equal(outcome.gradients[name], value) for name, value in gradients.items())


@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "custom"])
def test_a_replay_is_the_step(recipe, path) -> None:
    step, gradients = captured(converted(Model, recipe), path)
    check(step, gradients, Replay(step, Model()))


def test_under_autocast(path) -> None:
    step, gradients = captured(converted(Model, "current"), path, autocast=True)
    check(step, gradients, Replay(step, Model()))


def test_recomputed_activations(path) -> None:
    step, gradients = captured(converted(Recomputing, "current"), path)
    check(step, gradients, Replay(step, Recomputing()))


def test_weights_that_are_kept_quantized(path) -> None:
    step, gradients = captured(converted(Model, "current", primary=True), path)
    check(step, gradients, Replay(step, converted(Model, "current", primary=True)))


def test_the_state_of_python_and_of_the_model_is_left(path) -> None:
    step, _ = captured(converted(Model, "current"), path)
    model = Model()
    before, torch_before = random.getstate(), torch.get_rng_state()
    Replay(step, model)
    bisect(step)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


@pytest.mark.parametrize("scale", [1024.0, 1 / 3])
def test_a_loss_that_was_scaled(scale, path) -> None:
    step, gradients = captured(converted(Model, "delayed"), path, scale=scale)
    check(step, gradients, Replay(step, Model()))


def test_without_a_loss_the_captured_gradients_of_the_output_serve(path) -> None:
    step, gradients = captured(converted(Model, "current"), path, loss=None)
    replay = Replay(step, Model())
    assert all(
        torch.equal(replay.first.gradients[name], value) for name, value in gradients.items()
    )
    assert replay.first.loss != replay.first.loss


def test_a_model_that_gives_its_loss(path) -> None:
    model = converted(WithLoss, "current")
    x, y = data()
    with capture(model, path) as step:
        model(x, labels=y)["loss"].backward()
    read = Bundle.read(path)
    assert read.loss == step.loss.item()
    check(read, {name: p.grad for name, p in model.named_parameters()}, Replay(read, WithLoss()))


@pytest.mark.parametrize(
    "loss", [None, lambda outputs, targets: outputs[0].sum() + outputs[1]["b"].square().sum()]
)
def test_outputs_that_were_computed_from_each_other(loss, path) -> None:
    class Chained(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x):
            first = self.a(x)
            return first, {"b": self.b(torch.relu(first)), "none": None}

    model = converted(Chained, "current")
    with capture(model, path):
        a, others = model(data()[0])
        ((a.sum() + others["b"].square().sum()) * 2**20).backward()
    step = Bundle.read(path)
    replay = Replay(step, Chained(), loss=loss)
    assert replay.comparison.equal == replay.comparison.operands == 4
    assert all(
        torch.equal(replay.first.gradients[name], p.grad) for name, p in model.named_parameters()
    )


def test_microbatches(path) -> None:
    model = converted(Model, "delayed")
    with capture(model, path, targets=[data(n)[1] for n in range(3)], loss="mse"):
        for n in range(3):
            (F.mse_loss(model(data(n)[0]), data(n)[1]) / 3).backward()
    step = Bundle.read(path)
    replay = Replay(step, Model())
    assert replay.comparison.equal == replay.comparison.operands == 2 * len(step.calls)
    assert not replay.comparison.other_bytes
    for name, p in model.named_parameters():
        assert torch.equal(replay.first.gradients[name], p.grad)


def test_frozen_parameters_and_modules_in_evaluation(path) -> None:
    model = converted(Model, "current")
    model.norm.eval()
    model.twice.weight.requires_grad_(False)
    step, gradients = captured(model, path)
    replay = Replay(step, Model())
    assert "twice.weight" not in replay.first.gradients
    assert all(
        torch.equal(replay.first.gradients[name], value) for name, value in gradients.items()
    )


def test_a_fused_accumulation_of_gradients_is_left_out(path) -> None:
    model = converted(Model, "current")
    for layer in (model.first, model.twice, model.last):
        layer.fuse_wgrad_accumulation = True
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    step, _ = captured(model, path)
    replay = Replay(step, copy.deepcopy(model))
    assert float(replay.first.gradients["twice.weight"].norm()) > 0


def test_high_precision_is_that_of_torch(path) -> None:
    step, _ = captured(converted(Model, "current"), path)
    replay = Replay(step, Model())
    exact = replay.run(())
    model = Model()
    model.load_state_dict(step.state)
    random.setstate((3, tuple(step.tensors["random.python"].tolist()), None))
    torch.set_rng_state(step.tensors["random.cpu"])
    loss = F.mse_loss(model(data()[0]), data()[1])
    assert exact.loss == pytest.approx(loss.item(), rel=1e-6)
    assert exact.loss != replay.first.loss


def test_one_operand_alone(path) -> None:
    """A replay with one operand quantized differs from high precision, and so does one with it
    alone left out."""
    step, _ = captured(converted(Model, "current"), path)
    replay = Replay(step, Model())
    exact = replay.run(())
    for operand in replay.operands:
        outcome = replay.run([operand])
        moved = {
            name
            for name, value in outcome.gradients.items()
            if not torch.equal(value, exact.gradients[name])
        }
        if operand.gemm == "fprop":
            # The loss, one float32 number, may be the same by chance.
            assert len(moved) > 1
        elif operand.gemm == "wgrad":
            assert moved == {f"{operand.layer}.weight"}
            assert outcome.loss == exact.loss
        else:
            assert moved
            assert f"{operand.layer}.bias" not in moved or operand.layer == "twice"
        rest = replay.run([o for o in replay.operands if o != operand])
        assert any(
            not torch.equal(value, replay.first.gradients[name])
            for name, value in rest.gradients.items()
        )


# -- on another machine --


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_where_sums_have_another_order_quantized_bytes_are_the_same(
    recipe, path, monkeypatch
) -> None:
    class Summing(Model):
        backwards = False

        def forward(self, x):
            parts = (self.first(x.bfloat16()) * 3).unbind(-1)
            total = sum(reversed(parts) if self.backwards else parts)
            return self.last(
                torch.relu(
                    self.twice(torch.relu(self.twice(torch.stack(parts, -1) * total[:, None])))
                )
            )

    def make():
        return Summing().bfloat16()

    step, gradients = captured(converted(make, recipe), path)
    monkeypatch.setattr(Summing, "backwards", True)
    replay = Replay(step, make())
    found = replay.comparison
    assert 0 < found.equal < found.operands
    assert 0 < found.difference < 0.1
    assert found.products == sum(len(call.digests) for call in step.calls)
    assert not found.other_bytes
    full = replay.run(replay.operands)
    # The same bytes go into the products in each replay.
    assert full.loss == replay.first.loss
    assert all(
        torch.equal(full.gradients[name], value) for name, value in replay.first.gradients.items()
    )
    for name, value in gradients.items():
        assert torch.allclose(
            full.gradients[name].float(),
            value.float(),
            rtol=0.02,
            atol=0.02 * float(value.abs().max()),
        )


def test_other_bytes_are_told(path) -> None:
    step, _ = captured(converted(Model, "current"), path)
    step.calls[0].digests["fprop.weight"] = "0" * 32
    assert [str(operand) for operand in Replay(step, Model()).comparison.other_bytes] == [
        "first: weight in fprop"
    ]


def test_digests_are_of_the_direction_that_a_product_takes() -> None:
    quantizer = ottava.get_recipe("mxfp8").quantizer("weight").with_usage(True, True)
    values = torch.randn(64, 64) * torch.logspace(-8, 8, 64)
    both = quantizer.quantize(values)
    rows, columns = (
        quantizer.with_usage(side == "rows", side == "columns").quantize(values)
        for side in ("rows", "columns")
    )
    assert digest(values_of(both, "fprop", "weight")) == digest(values_of(rows, "fprop", "weight"))
    assert digest(values_of(both, "dgrad", "weight")) == digest(
        values_of(columns, "dgrad", "weight")
    )
    assert digest(values_of(both, "fprop", "weight")) != digest(values_of(both, "dgrad", "weight"))


# -- what is refused --


def test_another_model_is_refused(path) -> None:
    step, _ = captured(converted(Model, "current"), path)
    with pytest.raises(CheckpointError, match="no module 'first'"):
        Replay(step, torch.nn.Linear(16, 16))
    with pytest.raises(CheckpointError, match="does not fit"):
        Replay(step, Model(outputs=32))

    class Lazy(Model):
        def forward(self, x):
            return self.last(x)

    with pytest.raises(CheckpointError, match="call 0 of layer 'first'"):
        Replay(step, Lazy())


def test_damaged_random_states_are_refused(path) -> None:
    step, _ = captured(converted(Model, "current"), path)
    step.tensors["random.python"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(CheckpointError, match="random generators"):
        Replay(step, Model())


def test_another_loss_is_refused(path) -> None:
    step, _ = captured(converted(Model, "current"), path)
    with pytest.raises(UsageError, match="other gradients"):
        Replay(step, Model(), loss=lambda output, targets: output.sum())


def test_a_recipe_of_functions_has_to_be_given(path) -> None:
    from ottava_custom.factories import current_scaling_ref_quantizer_factory

    recipe = CustomRecipe(lambda role: current_scaling_ref_quantizer_factory(role))
    step, gradients = captured(converted(Model, recipe), path)
    with pytest.raises(UsageError, match="recipe to use"):
        Replay(step, Model())
    check(step, gradients, Replay(step, converted(Model, recipe)))
    assert Replay(step, Model(), recipe=recipe).run(()).loss > 0


def test_a_loss_that_is_not_finite_needs_a_function(path) -> None:
    model = converted(Model, "current")
    with capture(model, path):
        (model(data()[0]) * float("nan")).sum().backward()
    with pytest.raises(UsageError, match="loss function"):
        Replay(Bundle.read(path), Model())


def test_what_was_changed_in_a_step_is_refused(path) -> None:
    """Shapes that only the model tells, or the layer."""
    step, _ = captured(converted(Model, "current"), path)
    for changed, told in (
        ({"targets": None}, "cannot be replayed: AttributeError"),
        ({"targets": {"tensor": "nowhere"}}, "an argument is described"),
        (
            {"arguments": [{"args": {"tuple": []}, "kwargs": {"dict": {}}}]},
            "cannot be replayed: TypeError",
        ),
        ({"layers": {"norm": 0}, "calls": []}, "'norm' of the model is a BatchNorm1d"),
        (
            {"frozen": [name for name, _ in Model().named_parameters()]},
            "no output of the model needs a gradient",
        ),
    ):
        with pytest.raises(UsageError, match=told):
            Replay(dataclasses.replace(step, **changed), Model())
    for weight in (torch.ones(16), torch.ones(16, 8), torch.ones(16, 16, dtype=torch.int64)):
        with pytest.raises(CheckpointError, match="the weight of layer 'first' is"):
            bisect(dataclasses.replace(step, state=step.state | {"first.weight": weight}))


def test_the_cause_of_what_a_loss_raises_is_kept(path) -> None:
    step, _ = captured(converted(Model, "current"), path)

    def fails(output, targets):
        raise KeyError("labels")

    with pytest.raises(UsageError, match="cannot be replayed: KeyError: 'labels'") as caught:
        Replay(step, Model(), loss=fails)
    assert isinstance(caught.value.__cause__, KeyError)
