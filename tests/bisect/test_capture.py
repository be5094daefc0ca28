"""``capture`` writes a step as data, changes nothing in it, and reads only what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.utils.checkpoint import checkpoint

import ottava
import ottava_debug
from benchmarks.installed import recipes
from ottava.checkpoint.files import read_tensors, write_tensors
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError
from ottava_bisect import Bundle, capture
from ottava_bisect.bundle import METADATA_KEY
from ottava_bisect.recipe_data import build
from ottava_bisect.trees import flatten, unflatten
from tests.bisect.steps import Model, broken, captured, converted, data, seed, step_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.safetensors"


@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "custom"])
def test_a_captured_step_is_the_same_step(recipe: str, path: Path) -> None:
    model, watched = (converted(Model(), recipe) for _ in range(2))
    for number in range(3):
        seed(number)
        expected = step_of(model, *data(number))
        seed(number)
        with capture(watched, path) as step:
            found = step_of(watched, *data(number))
        assert torch.equal(found, expected)
        assert step.written
    for a, b in zip(model.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for name, value in model.state_dict().items():
        assert torch.equal(watched.state_dict()[name], value), name


def test_the_file_says_what_the_step_is(path: Path) -> None:
    """The rest of the file is what a replay needs to be the step (``test_replay.py``)."""
    model, (x, y) = converted(Model(), "delayed"), data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with capture(model, path, targets={"y": y}, loss="mse") as step:
        output = model(x, scale=0.5)
        step.loss = torch.nn.functional.mse_loss(output, y)
        step.loss.backward()
        x.zero_()
    read = Bundle.read(path)
    assert torch.equal(read.operands["0.activation"], data()[0])
    # The step itself has moved the state on.
    assert not torch.equal(before["norm.running_mean"], model.norm.running_mean)
    assert all(torch.equal(read.state[name], value) for name, value in before.items())
    assert unflatten(read.arguments[0]["kwargs"], read.tensors, "cpu") == {"scale": 0.5}
    assert torch.equal(unflatten(read.targets, read.tensors, "cpu")["y"], y)
    assert (read.events, read.loss_name) == (["forward 0", "backward 0"], "mse")
    assert read.loss == step.loss.item()
    gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    assert read.grad_norm == pytest.approx(float(gradients.norm()), rel=1e-12)
    assert [call.layer for call in read.calls] == ["first", "twice", "twice", "last"]
    # Parameters are in the state, and nothing needs the gradient of the model's input.
    assert not any(name.endswith("weight") for name in read.operands)
    assert [len(call.digests) for call in read.calls] == [4, 6, 6, 6]
    assert read.versions["torch"] == str(torch.__version__)
    # No class of anybody is named in the file.
    with safe_open(path, "pt") as file:
        assert "ottava_delayed" not in file.metadata()[METADATA_KEY]


def test_recipes_are_described_by_data(path: Path, tmp_path: Path) -> None:
    text = "default: current\nlayers:\n  - match: first\n    all: identity\n"
    (tmp_path / "mixed.yaml").write_text(text)
    read = Bundle.read(captured(Model(), path, str(tmp_path / "mixed.yaml")))
    assert read.recipes[0]["text"] == text
    assert {call.layer for call in read.calls} == {"twice", "last"}
    options = {"fp8_format": ottava.Format.E4M3, "amax_epsilon": 0.5}
    recipe = ottava.get_recipe("current", **options)
    read = Bundle.read(captured(Model(), path, recipe))
    assert build(read.recipes[0]).same_as(recipe)
    read = Bundle.read(captured(Model(), path, broken()))
    assert set(read.recipes[0]) == {"words"}
    model, (x, y) = torch.nn.Sequential(ottava.nn.Linear(16, 16)), data()
    with capture(model, path):
        with ottava.autocast("mxfp8"), torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        torch.nn.functional.mse_loss(output.float(), y).backward()
    read = Bundle.read(path)
    assert (read.recipes[0]["name"], read.autocast) == ("mxfp8", "bfloat16")


class Plain(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.twice(torch.relu(self.twice(self.first(x))))))


class Recomputing(Plain):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Recomputing):
    reentrant = True


def recorded(make: type[Model], path: Path, run: Any = None) -> Bundle:
    """A step whose model is called by ``run(model, x)``."""
    model, (x, y) = converted(make(), "current"), data()
    x.requires_grad_()
    with capture(model, path):
        output = model(x) if run is None else run(model, x)
        loss = torch.nn.functional.mse_loss(output, y)
        # A call without gradients in between changes nothing.
        with torch.no_grad():
            model(x)
        loss.backward()
    return Bundle.read(path)


def assert_recorded_alike(found: Bundle, plain: Bundle) -> None:
    assert found.events == plain.events == ["forward 0", "backward 0"]
    assert [call.layer for call in found.calls] == ["first", "twice", "twice", "last"]
    assert found.operands.keys() == plain.operands.keys()
    assert all(torch.equal(found.operands[n], value) for n, value in plain.operands.items())


@pytest.mark.parametrize("make", [Recomputing, Reentrant])
def test_recomputed_activations_are_recorded_once(make: type[Model], path: Path) -> None:
    found, plain = recorded(make, path), recorded(Plain, path)
    assert found.calls == plain.calls
    assert_recorded_alike(found, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [Plain, Recomputing])
def test_a_whole_model_that_is_recomputed_is_recorded_once(
    make: type[Model], reentrant: bool, path: Path
) -> None:
    found = recorded(make, path, lambda *call: checkpoint(*call, use_reentrant=reentrant))
    assert_recorded_alike(found, recorded(Plain, path))


def test_events_and_weights_that_are_no_parameters(path: Path) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    model = converted(Model(), "current")
    torch.nn.utils.parametrize.register_parametrization(model.first, "weight", Doubled())
    with capture(model, path, targets=[data(n)[1] for n in range(2)], loss="mse"):
        for n in range(2):
            step_of(model, *data(n))
    read = Bundle.read(path)
    assert read.events == ["forward 0", "backward 0", "forward 1", "backward 1"]
    assert [name for name in read.operands if name.endswith("weight")] == ["0.weight", "4.weight"]
    assert torch.equal(read.operands["0.weight"], model.first.weight)
    with capture(model, path):
        (model(data(0)[0]).sum() + model(data(1)[0]).sum()).backward()
    assert sorted(Bundle.read(path).events) == [
        f"{kind} {n}" for kind in ("backward", "forward") for n in (0, 1)
    ]


# -- whether the file is written --


def test_above_and_when_decide_whether_the_file_is_written(path: Path) -> None:
    seen: list[Any] = []

    def written(scale: float = 1.0, **options: Any) -> Any:
        model, (x, y) = converted(Model(), "current"), data()
        path.unlink(missing_ok=True)
        seed(0)
        with capture(model, path, **options) as step:
            step.loss = step_of(model, x * scale, y)
        assert path.exists() is step.written
        assert not model._forward_pre_hooks
        assert not step.loss.requires_grad
        return step

    loss = written().loss.item()
    assert not written(above=1e9).written
    assert not written(above=loss).written
    assert written(above=0.9 * loss).written
    assert written(when=lambda step: step.loss.item() == loss and step.grad_norm > 0).written
    assert not written(when=lambda step: bool(seen.append(step))).written
    assert len(seen) == 1
    assert not written(above=1e9, when=lambda step: True).written
    # A loss that is not finite is above everything.
    assert written(float("nan"), above=1e9).written
    assert str(Bundle.read(path).loss) == "nan"
    assert ottava.nn.function.inspector is None


def test_errors_of_the_step(path: Path) -> None:
    model, (x, y) = converted(Model(), "current"), data()
    with (
        pytest.raises(ArithmeticError),
        pytest.warns(UserWarning, match="not written: no layer of the model"),
        capture(model, path),
    ):
        raise ArithmeticError
    assert not path.exists()
    with pytest.raises(ArithmeticError), capture(model, path):
        step_of(model, x, y)
        raise ArithmeticError
    assert not model._forward_pre_hooks
    assert ottava.nn.function.inspector is None
    assert Bundle.read(path).events == ["forward 0", "backward 0"]
    # After Ctrl-C nothing is written.
    path.unlink()
    with pytest.raises(KeyboardInterrupt), capture(model, path):
        step_of(model, x, y)
        raise KeyboardInterrupt
    assert not path.exists()
    # Gradients of before are not measured.
    with capture(model, path) as step:
        step_of(model, x, y)
    assert step.grad_norm is None


def test_what_is_refused(path: Path, tmp_path: Path) -> None:
    model, (x, y) = converted(Model(), "current"), data()
    nowhere = tmp_path / "nowhere" / "step"
    for arguments, options, error, words in (
        ((lambda x: x, path), {}, DTypeError, "Module"),
        ((model, path), {"loss": "hinge"}, OptionError, "cross_entropy"),
        ((model, path), {"loss": "mse"}, OptionError, "there are no targets"),
        ((model, path), {"targets": object()}, DTypeError, "targets is a object"),
        ((model, nowhere), {}, UsageError, "folder"),
        ((torch.compile(model), path), {}, UsageError, "compiled"),
    ):
        with pytest.raises(error, match=words):
            capture(*arguments, **options)
    with (
        pytest.raises(DTypeError, match=r"call\.0\.kwargs\.scale is a object"),
        pytest.warns(match="not written"),
        capture(model, path),
    ):
        model(x, scale=object())
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
    for name in ("norm.running_mean", "hidden"):
        model = converted(Model(), "current")
        model.get_buffer(name).untyped_storage().resize_(0)
        with pytest.raises(UsageError, match=f"'{name}' has no memory"), capture(model, path):
            pass
    assert not path.exists()


# -- reading --

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
ACTIVATION = "operands/0.activation"
CHANGES: dict[str, Change] = {
    "version": lambda told, _: told.update(version=2),
    "no calls": lambda told, _: told.pop("calls"),
    "another entry": lambda told, _: told.update(code="print()"),
    "layers of another kind": lambda told, _: told.update(layers=[]),
    "an unknown recipe": lambda told, _: told["layers"].update(first=5),
    "a recipe that is True": lambda told, _: told["layers"].update(first=True),
    "an unknown layer": lambda told, _: told["calls"][0].update(layer="nobody"),
    "a layer that is no text": lambda told, _: told["calls"][0].update(layer=[]),
    "a call of other fields": lambda told, _: told["calls"].append({"name": 1}),
    "no layers": lambda told, _: told.update(layers={}, calls=[]),
    "no calls of layers": lambda told, _: told.update(calls=[]),
    "an unknown event": lambda told, _: told["events"].append("forward 7"),
    "events that are no texts": lambda told, _: told.update(events=[1]),
    "events in another order": lambda told, _: told["events"].reverse(),
    "an event that comes twice": lambda told, _: told["events"].append("backward 0"),
    "no event": lambda told, _: told.update(events=[]),
    "an unknown dtype": lambda told, _: told.update(autocast="load"),
    "arguments of another kind": lambda told, _: told["arguments"].append({"args": None}),
    "a loss that is no number": lambda told, _: told.update(loss="many"),
    "an unknown loss": lambda told, _: told.update(loss_name="hinge"),
    "no activation": lambda _, tensors: tensors.pop(ACTIVATION),
    "integers": lambda _, tensors: tensors.update({ACTIVATION: tensors[ACTIVATION].long()}),
    "one dimension": lambda _, tensors: tensors.update({ACTIVATION: torch.ones(8)}),
    "other rows": lambda _, tensors: tensors.update({"operands/1.gradient": torch.ones(7, 16)}),
    "a tensor of no kind": lambda _, tensors: tensors.update(stray=torch.zeros(1)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(Model(), tmp_path_factory.mktemp("whole") / "step.safetensors", "delayed")


@pytest.mark.parametrize("name", CHANGES)
def test_a_description_that_does_not_fit_is_refused(name: str, whole: Path, path: Path) -> None:
    tensors, metadata = read_tensors(whole)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    told = json.loads(metadata[METADATA_KEY])
    CHANGES[name](told, tensors)
    write_tensors(path, tensors, metadata | {METADATA_KEY: json.dumps(told)})
    with pytest.raises(CheckpointError, match=path.name):
        Bundle.read(path)


def test_other_files_are_refused(whole: Path, path: Path) -> None:
    data = whole.read_bytes()
    changed = data[:-100] + b"\x55" + data[-99:]
    for damaged in (data[:-5], data[:20], b"", b"\x80\x04pickle", changed):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            Bundle.read(path)
    ottava.checkpoint.save_file(Model().state_dict(), path)
    with pytest.raises(CheckpointError, match=f"{path.name}: this is no captured step"):
        Bundle.read(path)
    with pytest.raises(CheckpointError, match=r"is a captured step.*ottava-bisect"):
        ottava_debug.analyze(whole)


texts = st.text(st.characters(codec=None))
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
leaves |= st.sampled_from([torch.bfloat16, torch.int8])
arguments = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(texts, inner),
    max_leaves=8,
)


@given(arguments)
def test_arguments_come_back(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    told = json.loads(json.dumps(flatten([value, torch.ones(2)], "x", tensors)))
    found, tensor = unflatten(told, tensors, "cpu")
    assert repr(found) == repr(value)
    assert torch.equal(tensor, torch.ones(2))


def test_arguments_that_are_none_of_these() -> None:
    for told in ({"tensor": "x"}, {"object": "os.system"}, {}, {"list": 5}, {"dtype": "os"}, []):
        with pytest.raises(CheckpointError, match="described"):
            unflatten(told, {}, "cpu")
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(DTypeError, match="nested more than 64 times"):
        flatten(deep, "x", {})
