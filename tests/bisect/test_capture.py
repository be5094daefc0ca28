"""``capture`` keeps a step as data, and changes nothing about it."""

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch.utils.checkpoint import checkpoint

import ottava
import ottava_debug
from benchmarks.installed import recipes
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError
from ottava.nn import function
from ottava_bisect.bundle import METADATA_KEY, Bundle
from ottava_bisect.capturing import capture
from ottava_bisect.trees import unflatten
from ottava_custom import CustomRecipe


class Model(torch.nn.Module):
    """Three layers, one of which runs twice; buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = (torch.nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("kept", torch.ones(16))
        self.register_buffer("hidden", torch.full((16,), 2.0), persistent=False)

    def forward(self, x, scale=1.0):
        x = torch.relu(self.first(x)) * self.kept
        return self.last(torch.relu(self.twice(torch.relu(self.twice(x)) * scale) * self.hidden))


def model_of(recipe="delayed"):
    torch.manual_seed(0)
    return ottava.convert(Model(), recipe)


def data(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def step_of(model, x, y, **arguments):
    loss = F.mse_loss(model(x, **arguments), y)
    loss.backward()
    return loss


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.safetensors"


def written(path, **options):
    model, (x, y) = model_of(), data()
    with capture(model, path, targets=y, loss="mse", **options) as step:
        step.loss = step_of(model, x, y)
    return model, step


@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "custom"])
def test_a_captured_step_is_the_same_step(recipe, path) -> None:
    model, watched = model_of(recipe), model_of(recipe)
    for seed in range(3):
        x, y = data(seed)
        expected = step_of(model, x, y)
        with capture(watched, path) as step:
            step.loss = step_of(watched, x, y)
        assert torch.equal(step.loss, expected)
    for a, b in zip(model.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(model.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_file_holds_the_step(path) -> None:
    model, (x, y) = model_of(), data()
    step_of(model, *data(2))
    model.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = {}
    model.twice.register_forward_pre_hook(
        lambda layer, args: seen.setdefault("inputs", []).append(args[0].detach())
    )
    model.twice.register_full_backward_hook(
        lambda layer, i, outputs: seen.setdefault("gradients", []).append(outputs[0])
    )
    torch.manual_seed(7)
    random_before = torch.get_rng_state()
    with capture(model, path, targets={"y": y}, loss="mse") as step:
        step.loss = step_of(model, x, y, scale=0.5)
    assert step.written
    read = Bundle.read(path)
    assert read.state.keys() == before.keys()
    assert all(torch.equal(read.state[name], value) for name, value in before.items())
    # The step itself has moved the state on.
    assert not torch.equal(
        before["twice.recipe_state.scale"], model.state_dict()["twice.recipe_state.scale"]
    )
    assert torch.equal(read.buffers["hidden"], model.hidden)
    assert torch.equal(read.tensors["random.cpu"], random_before)
    said = read.arguments[0]
    assert torch.equal(unflatten(said["args"], read.tensors, "cpu")[0], x)
    assert unflatten(said["kwargs"], read.tensors, "cpu") == {"scale": 0.5}
    assert torch.equal(unflatten(read.targets, read.tensors, "cpu")["y"], y)
    assert read.events == ["forward 0", "backward 0"]
    assert read.loss == step.loss.item()
    gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    assert read.grad_norm == pytest.approx(float(gradients.norm()), rel=1e-12)
    assert [call.layer for call in read.calls] == ["first", "twice", "twice", "last"]
    for number, (found, gradient) in enumerate(
        zip(seen["inputs"], reversed(seen["gradients"]), strict=True), 1
    ):
        assert torch.equal(read.operands[f"{number}.activation"], found)
        assert torch.equal(read.operands[f"{number}.gradient"], gradient)
    assert not any(name.endswith("weight") for name in read.operands)
    assert {len(call.digests) for call in read.calls[1:]} == {6}
    assert (
        "dgrad.gradient" not in read.calls[0].digests
    )  # nothing needs the gradient of the model's input
    assert read.recipes[0]["name"] == "delayed"
    assert read.versions["torch"] == str(torch.__version__)


def test_the_file_holds_data_alone(path) -> None:
    written(path)
    assert path.read_bytes()[8:9] == b"{"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    told = json.loads(metadata[METADATA_KEY])
    assert set(told) >= {"recipes", "layers", "calls", "arguments", "targets"}
    # No class and no function of anybody is named in it.
    assert "ottava_delayed" not in metadata[METADATA_KEY]


def test_a_recipe_of_functions_is_not_kept(path) -> None:
    from ottava_custom.factories import current_scaling_ref_quantizer_factory

    model, (x, y) = (
        model_of(CustomRecipe(lambda role: current_scaling_ref_quantizer_factory(role))),
        data(),
    )
    with capture(model, path):
        step_of(model, x, y)
    assert set(Bundle.read(path).recipes[0]) == {"words"}


def test_a_recipe_of_a_file_is_kept_as_its_text(path, tmp_path) -> None:
    text = "default: current\nlayers:\n  - match: first\n    all: identity\n"
    (tmp_path / "mixed.yaml").write_text(text)
    model, (x, y) = model_of(str(tmp_path / "mixed.yaml")), data()
    with capture(model, path):
        step_of(model, x, y)
    read = Bundle.read(path)
    assert read.recipes[0]["text"] == text
    assert all("fprop.weight" in call.digests for call in read.calls if call.layer == "last")


def test_layers_that_run_under_autocast(path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(ottava.nn.Linear(16, 16), ottava.nn.Linear(16, 16))
    x, y = data()
    with capture(model, path):
        with ottava.autocast("mxfp8"), torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
    read = Bundle.read(path)
    assert read.recipes[0]["name"] == "mxfp8"
    assert read.autocast == "bfloat16"


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_recomputed(reentrant, path, tmp_path) -> None:
    class Recomputing(Model):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    def captured(make, to):
        torch.manual_seed(0)
        model = ottava.convert(make(), "current")
        x, y = data()
        with capture(model, to):
            step_of(model, x.requires_grad_(), y)
        return Bundle.read(to)

    plain, recomputed = captured(Model, path), captured(Recomputing, tmp_path / "other.safetensors")
    assert recomputed.calls == plain.calls
    assert recomputed.operands.keys() == plain.operands.keys()
    assert all(
        torch.equal(recomputed.operands[name], value) for name, value in plain.operands.items()
    )


def test_several_calls_and_backward_passes(path) -> None:
    model = model_of()
    with capture(model, path, targets=[data(n)[1] for n in range(2)], loss="mse"):
        for n in range(2):
            step_of(model, *data(n))
    assert Bundle.read(path).events == ["forward 0", "backward 0", "forward 1", "backward 1"]
    with capture(model, path):
        (model(data(0)[0]).sum() + model(data(1)[0]).sum()).backward()
    assert sorted(Bundle.read(path).events) == [
        "backward 0",
        "backward 1",
        "forward 0",
        "forward 1",
    ]


# -- whether it is written --


def test_a_weight_that_is_no_parameter_is_kept(path) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return weight * 2

    model, (x, y) = model_of("current"), data()
    torch.nn.utils.parametrize.register_parametrization(model.first, "weight", Doubled())
    with capture(model, path):
        step_of(model, x, y)
    read = Bundle.read(path)
    assert [name for name in read.operands if name.endswith("weight")] == ["0.weight"]
    assert torch.equal(read.operands["0.weight"], model.first.weight)


def test_above(path) -> None:
    assert not written(path, above=1e9)[1].written
    assert not path.exists()
    loss = float(written(path, above=0.0)[1].loss)
    path.unlink()
    assert not written(path, above=loss)[1].written
    assert not path.exists()


def test_a_loss_that_is_not_finite_is_above_everything(path) -> None:
    model, (x, y) = model_of(), data()
    with capture(model, path, above=1e9) as step:
        step.loss = step_of(model, x * float("nan"), y)
    assert step.written
    assert str(Bundle.read(path).loss) == "nan"


def test_when(path) -> None:
    seen = []
    _, step = written(path, when=lambda step: bool(seen.append((step.loss.item(), step.grad_norm))))
    assert not step.written
    assert seen[0][0] > 0
    assert seen[0][1] > 0


def test_a_step_that_raises_is_written(path) -> None:
    model, (x, y) = model_of(), data()
    with pytest.raises(ArithmeticError), capture(model, path):
        step_of(model, x, y)
        raise ArithmeticError
    assert Bundle.read(path).events == ["forward 0", "backward 0"]


def test_the_error_of_a_step_is_told_and_not_that_nothing_could_be_written(path) -> None:
    with (
        pytest.raises(ArithmeticError),
        pytest.warns(UserWarning, match="not written"),
        capture(model_of(), path),
    ):
        raise ArithmeticError


def test_gradients_of_before_are_not_measured(path) -> None:
    model, (x, y) = model_of(), data()
    step_of(model, x, y)
    with capture(model, path) as step:
        step_of(model, x, y)
    assert step.grad_norm is None


# -- what is refused --


def test_what_is_refused(path, tmp_path) -> None:
    model, (x, y) = model_of(), data()
    with pytest.raises(DTypeError, match="Module"):
        capture(lambda x: x, path)
    with pytest.raises(OptionError, match="cross_entropy"):
        capture(model, path, loss="hinge")
    with pytest.raises(OptionError, match="there are no targets"):
        capture(model, path, loss="mse")
    with pytest.raises(UsageError, match="folder"):
        capture(model, tmp_path / "nowhere" / "step.safetensors")
    with pytest.raises(DTypeError, match="targets is a object"):
        capture(model, path, targets=object())
    with (
        pytest.raises(DTypeError, match=r"call\.0\.kwargs\.scale is a object"),
        pytest.warns(match="not written"),
    ):
        with capture(model, path):
            model(x, scale=object())
    with pytest.raises(UsageError, match="compiled"):
        capture(torch.compile(model), path)
    with (
        ottava.autocast("current"),
        pytest.raises(UsageError, match="inside an autocast"),
        capture(model, path),
    ):
        pass
    with pytest.raises(UsageError, match="no loss is known"), capture(model, path, above=1.0):
        step_of(model, x, y)
    with pytest.raises(UsageError, match=r"first\.weight.*changed"), capture(model, path):
        step_of(model, x, y)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(UsageError, match="no layer"), capture(torch.nn.Linear(16, 16), path):
        pass
    assert not path.exists()


@pytest.mark.parametrize("name", ["kept", "hidden"])
def test_buffers_without_memory_are_refused(name, path) -> None:
    model = model_of()
    getattr(model, name).untyped_storage().resize_(0)
    with pytest.raises(UsageError, match=f"'{name}' has no memory"), capture(model, path):
        pass
    assert not path.exists()


def test_nothing_is_left_of_the_block(path) -> None:
    hooks = len(model_of()._forward_pre_hooks)
    model, step = written(path)
    assert len(model._forward_pre_hooks) == hooks
    assert function.inspector is None
    assert not step.loss.requires_grad


# -- reading --


def changed(path, change):
    """The file with another description."""
    from ottava.checkpoint.files import read_tensors, write_tensors

    tensors, metadata = read_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    told = json.loads(metadata[METADATA_KEY])
    change(told, tensors)
    write_tensors(path, tensors, metadata | {METADATA_KEY: json.dumps(told)})


def test_damage_is_told(path) -> None:
    written(path)
    whole = path.read_bytes()
    for damaged in (
        whole[:-5],
        whole[:20],
        b"",
        b"\x80\x04pickle",
        whole[:-100] + b"\x55" + whole[-99:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            Bundle.read(path)


def test_a_checkpoint_is_no_step(path) -> None:
    ottava.checkpoint.save_file(model_of().state_dict(), path)
    with pytest.raises(CheckpointError, match=f"{path.name}: this is no captured step"):
        Bundle.read(path)


CHANGES = {
    "version": lambda told, tensors: told.update(version=2),
    "no calls": lambda told, tensors: told.pop("calls"),
    "another entry": lambda told, tensors: told.update(code="print()"),
    "layers of another kind": lambda told, tensors: told.update(layers=[]),
    "an unknown recipe": lambda told, tensors: told["layers"].update(first=5),
    "an unknown layer": lambda told, tensors: told["calls"][0].update(layer="nobody"),
    "an unknown event": lambda told, tensors: told["events"].append("forward 7"),
    "events that are no texts": lambda told, tensors: told.update(events=[1]),
    "a dtype that is none": lambda told, tensors: told.update(autocast="load"),
    "arguments of another kind": lambda told, tensors: told["arguments"].append({"args": None}),
    "a loss that is no number": lambda told, tensors: told.update(loss="many"),
    "a call of other fields": lambda told, tensors: told["calls"].append({"name": 1}),
    "no activation": lambda told, tensors: tensors.pop("operands/0.activation"),
    "no layers": lambda told, tensors: told.update(layers={}, calls=[]),
    "no calls of layers": lambda told, tensors: told.update(calls=[]),
    "a layer that is no text": lambda told, tensors: told["calls"][0].update(layer=[]),
    "an unknown loss": lambda told, tensors: told.update(loss_name="hinge"),
    "events in another order": lambda told, tensors: told["events"].reverse(),
    "an event that comes twice": lambda told, tensors: told["events"].append("backward 0"),
    "no event": lambda told, tensors: told.update(events=[]),
    "an activation of integers": lambda told, tensors: tensors.update(
        {"operands/0.activation": tensors["operands/0.activation"].long()}
    ),
    "an activation of one dimension": lambda told, tensors: tensors.update(
        {"operands/0.activation": torch.ones(8)}
    ),
    "a gradient of other rows": lambda told, tensors: tensors.update(
        {"operands/1.gradient": torch.ones(7, 16)}
    ),
    "a tensor of no kind": lambda told, tensors: tensors.update(stray=torch.zeros(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit_is_told(name, path) -> None:
    written(path)
    changed(path, CHANGES[name])
    with pytest.raises(CheckpointError, match=path.name):
        Bundle.read(path)


@pytest.mark.parametrize(
    "said", [{"tensor": "nowhere"}, {"object": "os.system"}, {}, {"list": 5}, {"dtype": "os"}, []]
)
def test_arguments_that_are_none(said) -> None:
    with pytest.raises(CheckpointError, match="described"):
        unflatten(said, {}, "cpu")


def test_arguments_come_back() -> None:
    from ottava_bisect.trees import flatten

    tensors = {}
    value = {
        "a": [1, 2.5, float("inf"), None, True, "text"],
        "b": (torch.ones(2), torch.bfloat16),
        "c": {},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = unflatten(json.loads(json.dumps(flatten(value, "x", tensors))), tensors, "cpu")
    assert torch.equal(found["b"][0], torch.ones(2))
    assert {**found, "b": found["b"][1]} == {**value, "b": torch.bfloat16}
    assert isinstance(found["b"], tuple)


def test_an_interrupt_at_the_end_leaves_no_hooks(tmp_path, monkeypatch):
    model, path, interrupts = model_of("current"), tmp_path / "step", [KeyboardInterrupt]
    remove = torch.utils.hooks.RemovableHandle.remove

    def interrupted(handle):
        if interrupts:
            raise interrupts.pop()
        remove(handle)

    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt), capture(model, path):
        model(torch.ones(2, 16)).sum().backward()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert function.inspector is None
    assert not path.exists()


def test_analyze_refuses_a_captured_step(path):
    model = ottava.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "current")
    with capture(model, path):
        model(torch.randn(4, 32)).sum().backward()
    with pytest.raises(CheckpointError, match=r"is a captured step.*ottava-bisect"):
        ottava_debug.analyze(path)
