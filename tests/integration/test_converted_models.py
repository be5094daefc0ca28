"""A converted model is of the class that it was, to whoever looks; ``revert`` gives the model back;
patterns that name no layer are refused before anything is changed."""

from __future__ import annotations

import abc
import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from torch.nn.utils import parametrize

import ottava
from ottava.errors import DTypeError, OptionError, UsageError
from ottava.nn import Linear, TransposedLinear
from ottava_custom import CustomRecipe, by_layer, by_tensor
from ottava_integrations import convert_file
from tests.copying import by_pickle

# It has a state, so that its models begin steps.
RECIPE = "delayed"


class Net(torch.nn.Module):
    """A model with an attribute and a method of its own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layer = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)

    def twice(self, x: torch.Tensor) -> Any:
        return self(self(x))


class Slotted(Net):
    """One that says how it is pickled."""

    def __reduce__(self) -> Any:
        return type(self), (self.width,), self.__dict__


class Registered(Net):
    """Told of its subclasses, of which it refuses two of one name."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, family: str) -> None:
        if cls.__name__ in Registered.known:
            raise ValueError(f"duplicate {cls.__name__}")
        Registered.known.append(cls.__name__)


class Member(Registered, family="models"):
    def forward(self, x: torch.Tensor) -> Any:
        return 2 * super().forward(x)


class Registry(abc.ABCMeta):
    """Has each class that it makes, of which it refuses two of one name."""

    known: ClassVar[dict[str, type]] = {}

    def __new__(cls, name: str, bases: Any, namespace: Any) -> Any:
        if name in cls.known:
            raise ValueError(f"duplicate {name}")
        cls.known[name] = made = super().__new__(cls, name, bases, namespace)
        return made


class ByMetaclass(Net, metaclass=Registry):
    pass


CLASSES = [Net, Slotted, Member, ByMetaclass]


def step(model: Any, size: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    y: torch.Tensor = model(torch.full((4, 16), size))
    y.square().mean().backward()
    return y.detach()


def assert_steps_alike(*models: Any) -> None:
    """The models go on training alike, and so begin their steps alike."""
    for number in range(3):
        outputs = [step(model, 2.0**number) for model in models]
        assert torch.equal(*outputs)
        states = [model.state_dict().values() for model in models]
        assert all(map(torch.equal, *states))


def scale_of(layer: Any) -> float:
    """Of the input: 448 by the largest input of the step before."""
    return float(layer.recipe_state.scale[0])


@pytest.mark.parametrize("cls", CLASSES)
def test_the_class_looks_as_before(cls: Any) -> None:
    plain, model = cls(), ottava.convert(cls(), RECIPE)
    kind = type(model)
    assert [isinstance(each, cls) for each in (plain, model)] == [True, True]
    assert [isinstance(each, kind) for each in (plain, model)] == [False, True]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(kind, name) == getattr(cls, name)
    assert type(kind) is type(cls)
    assert repr(model).startswith(f"{cls.__name__}(\n")
    x, factor = torch.ones(4, 16), 2 if cls is Member else 1
    with torch.no_grad():
        assert torch.equal(model.twice(x), factor * model.layer(factor * model.layer(x)))
    assert type(ottava.convert(cls(), RECIPE)) is kind, "one class serves all models of a class"
    assert type(ottava.convert(model, RECIPE)) is kind, "converting again changes nothing"
    assert type(ottava.convert(cls(), "current")) is cls, "without state no step begins"
    assert (Registered.known, set(Registry.known)) == (["Member"], {"ByMetaclass"})
    step(model, 7.0)
    for way in (copy.deepcopy, by_pickle):
        twin = way(model)
        assert isinstance(twin, cls)
        assert cls is Slotted or type(twin) is kind
        assert_steps_alike(twin, copy.deepcopy(model))
        assert scale_of(twin.layer) == 448 / 7
    assert cls is Slotted or type(copy.copy(model)) is kind
    pickled = pickle.dumps(model)
    assert __name__.encode() in pickled
    assert b"ConvertedModel" not in pickled


def parametrized(model: Any) -> Any:
    parametrize.register_parametrization(model.layer, "weight", torch.nn.Identity())
    return model


WRAPS: dict[str, Callable[[Any], Any]] = {
    "DataParallel": torch.nn.DataParallel,
    "Sequential": torch.nn.Sequential,
    "parametrized": parametrized,
}


@pytest.mark.parametrize("name", WRAPS)
def test_inside_of_others_a_model_begins_the_same_steps(name: str) -> None:
    model, plain = ottava.convert(Net(), RECIPE), ottava.convert(Net(), RECIPE)
    wrapped = WRAPS[name](model)
    for number in range(3):
        assert torch.equal(step(wrapped, 2.0**number), step(plain, 2.0**number))
        assert scale_of(model.layer) == scale_of(plain.layer)
    assert scale_of(plain.layer) == 448 / 2


def test_a_layer_that_is_the_model_and_a_slice_of_one() -> None:
    model = ottava.convert(torch.nn.Linear(16, 16), RECIPE)
    plain = copy.deepcopy(model)
    parametrize.register_parametrization(model, "weight", torch.nn.Identity())
    for number in range(3):
        assert torch.equal(step(model, 2.0**number), step(plain, 2.0**number))
    assert scale_of(model) == 448 / 2
    # A slice, which torch makes of the same class, is no converted model until it is converted.
    layers = torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)
    stack = ottava.convert(torch.nn.Sequential(*layers), RECIPE)
    for _ in range(2):
        step(stack[:2])
    assert (scale_of(stack[0]), scale_of(stack[2])) == (448, 1)
    part = ottava.convert(stack[:2], RECIPE)
    step(part)
    assert_steps_alike(part, copy.deepcopy(part))


def test_hooks_see_a_step_that_has_begun_and_a_recursion_begins_one() -> None:
    seen: list[tuple[str, float]] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda module, *_: seen.append((name, scale_of(module.layer)))

    model: Any = Net()
    model.register_forward_pre_hook(hook("before, early"))
    model.register_forward_hook(hook("after, early"))
    ottava.convert(model, RECIPE)
    model.register_forward_pre_hook(hook("before, first"), prepend=True)
    model.register_forward_hook(hook("after, late"))
    step(model, 2.0)
    seen.clear()
    step(model, 2.0)
    names = ["before, first", "before, early", "after, early", "after, late"]
    assert seen == [(name, 448 / 2) for name in names]

    class Deep(Net):
        def forward(self, x: torch.Tensor, depth: int = 2) -> Any:
            return self(super().forward(x), depth - 1) if depth else x

    deep: Any = ottava.convert(Deep(), RECIPE)
    for number in range(3):
        step(deep)
        history = deep.layer.recipe_state.amax_history
        assert int((history[1:, 0] > 0).sum()) == number


# -- revert --


class Tied(torch.nn.Module):
    """Tied layers, a module in two places, and one that is no product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
        self.tied = torch.nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.again = self.first

    def forward(self, x: torch.Tensor) -> Any:
        return self.again(self.tied(self.norm(self.first(x))))


class Turned(torch.nn.Module):
    """Stores its weight as the Conv1D of Transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.nf = 8
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


ottava.register_converter(Turned, TransposedLinear.from_linear)


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, by_pickle])
@pytest.mark.parametrize("name", ["current", "delayed"])
def test_a_reverted_model_is_as_before(name: str, copied: Any) -> None:
    plain, x = torch.nn.ModuleDict({"model": Tied(), "turned": Turned()}), torch.randn(4, 8)
    expected, values = plain["model"](x), copy.deepcopy(plain.state_dict())
    model: Any = copied(ottava.convert(plain, name).eval())
    parameters, attributes = {id(p) for p in model.parameters()}, vars(model["model"]).keys()
    model["model"](x).sum().backward()
    assert ottava.revert(model) is model
    inner, turned = model["model"], model["turned"]
    assert (type(model), type(inner.first)) == (torch.nn.ModuleDict, torch.nn.Linear)
    assert (type(turned), turned.nf) == (Turned, 8)
    assert inner.again is inner.first
    assert not inner.first.training
    assert {id(p) for p in model.parameters()} == parameters
    assert model.state_dict().keys() == values.keys()
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert torch.equal(inner(x), expected)
    assert vars(inner).keys() == attributes
    assert {*ottava.conversion_report(model).skipped.values()} == {"not converted"}
    assert ottava.conversion_report(ottava.convert(model, name)).share == 1
    layer = ottava.revert(Linear(8, 4, name="x", fuse_wgrad_accumulation=True))
    assert vars(layer).keys() == vars(torch.nn.Linear(8, 4)).keys()


@pytest.mark.parametrize("trains", [True, False])
def test_a_kept_weight_is_frozen_after_revert_as_it_was(trains: bool) -> None:
    model = Tied()
    ottava.convert(model, "current", primary=True)
    model.first.weight.requires_grad_(trains)
    ottava.revert(model)
    assert model.first.weight.requires_grad is trains


def test_kept_weights_are_dequantized_and_old_optimizers_warned_of() -> None:
    model, x = Tied(), torch.randn(4, 8)
    ottava.convert(model, "current", primary=True, keep_initial_values=True)
    model.first.weight.tag = "mine"  # type: ignore[attr-defined]
    stale = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    kept: Any = model.first.weight
    values, gradient = kept.dequantize(), kept.grad
    ottava.revert(model)
    weight: Any = model.first.weight
    assert type(weight) is torch.nn.Parameter
    assert torch.equal(weight, values)
    assert (model.tied.weight, weight.grad, weight.tag) == (weight, gradient, "mine")
    assert not hasattr(weight, "_high_precision_init_val")
    text = r"SGD holds parameters from before ottava\.revert\(model\).*'tied\.weight'"
    with pytest.warns(UserWarning, match=text):
        stale.step()
    with warnings.catch_warnings(action="error"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


class Mine(Linear):
    """Does more than its base."""


def test_what_has_no_plain_layer_is_refused_before_anything_changes() -> None:
    refused: list[tuple[Any, str]] = [
        (Mine(8, 8), "Mine 'last' is of a subclass, whose behaviour would be lost"),
        (TransposedLinear(8, 8), "TransposedLinear 'last' was made of no other layer"),
    ]
    for layer, words in refused:
        model = torch.nn.ModuleDict({"first": Linear(8, 8), "last": layer})
        with pytest.raises(UsageError, match=words):
            ottava.revert(model)
        assert type(model["first"]) is Linear
    with pytest.raises(DTypeError, match="model is a dict"):
        ottava.revert({})  # type: ignore[type-var]


# -- patterns of recipe files and factories --

NAMES = ("q_proj", "k_proj", "up", "down")


def blocks() -> Any:
    stack = [torch.nn.ModuleDict({n: torch.nn.Linear(32, 32) for n in NAMES}) for _ in range(2)]
    return torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(8, 32),
            "blocks": torch.nn.ModuleList(stack),
            "head": torch.nn.Linear(32, 8),
        }
    )


def file_with(folder: Path, *patterns: str, default: str = "identity", name: str = "r") -> Path:
    path = folder / f"{name}.yaml"
    rules = "".join(f"  - match: [{pattern!r}]\n    all: current\n" for pattern in patterns)
    path.write_text(f"default: {default}\n" + (f"layers:\n{rules}" if rules else ""))
    return path


@pytest.mark.filterwarnings("ignore:(only|nothing).*of the weights of products")
def test_patterns_that_name_no_layer_are_refused_with_the_nearest_name(tmp_path: Path) -> None:
    nothing = "the name of a linear layer, or of a module that it is in"
    wrong = {
        "*.q_prj": "a name such as *.q_proj",
        "blocks.0.q_prj": "a name such as blocks.0.q_proj",
        "block.0": "a name such as blocks.0",
        "*q_prj": "a name such as *q_proj",
        "Head": "a name such as head",
        "blocks.2": "a name such as blocks.1",
        "embed": nothing,
        "zzz": nothing,
    }
    model = blocks()
    before = {name: type(module) for name, module in model.named_modules()}
    for pattern, expected in wrong.items():
        path = file_with(tmp_path, "blocks.0.up", pattern)
        place = f"{path}, line 5, column 13: pattern {pattern!r} matches no layer of the model"
        with pytest.raises(OptionError) as error:
            ottava.convert(model, path)
        assert f"{place}. Expected: {expected}" in str(error.value)
        with pytest.raises(OptionError, match="by_layer matches no layer") as error:
            # Inside of another factory, too.
            weights = by_layer({pattern: "current"}, "identity")
            ottava.convert(model, CustomRecipe(by_tensor("current", weight=weights)))
        assert f"Expected: {expected}" in str(error.value)
    with pytest.raises(OptionError, match=r"exclude pattern '\*\.q_prj' .*such as \*\.q_proj"):
        ottava.convert(model, "current", exclude="*.q_prj")
    inner = file_with(tmp_path, "*.dwn", name="inner")
    outer = file_with(tmp_path, default=f"{{recipe: custom, file: {str(inner)!r}}}")
    with pytest.raises(OptionError, match=r"r\.yaml.*inner\.yaml.*'\*\.dwn'.*\*\.down"):
        ottava.convert(model, outer)
    assert {name: type(module) for name, module in model.named_modules()} == before
    with pytest.raises(OptionError, match="'head' matches no layer"):
        ottava.convert(torch.nn.Linear(32, 32), file_with(tmp_path, "head"))
    for pattern in ("head", "*.q_proj", "blocks.0", "blocks.[01].down", "h?ad"):
        path = file_with(tmp_path, pattern)
        # Layers that are left alone, or were converted before, are layers all the same.
        left = ottava.convert(blocks(), path, exclude=["head", "blocks"])
        assert not isinstance(left["head"], Linear)
        again = ottava.convert(ottava.convert(blocks(), "current"), path)
        assert isinstance(again["head"], Linear)


def test_a_file_is_exported_by_the_same_patterns_and_what_it_keeps_is_not_warned_of(
    tmp_path: Path,
) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    safetensors.torch.save_file(blocks().state_dict(), source)
    with pytest.raises(OptionError, match=r"'\*\.q_prj' matches no layer.*such as \*\.q_proj"):
        convert_file(source, target, file_with(tmp_path, "*.q_prj"))
    done = convert_file(source, target, file_with(tmp_path, "*.q_proj"))
    assert done.quantized == ("blocks.0.q_proj.weight", "blocks.1.q_proj.weight")
    path = tmp_path / "keeps.yaml"
    path.write_text("default: current\nlayers:\n  - match: [q_proj, k_proj]\n    all: identity\n")
    with warnings.catch_warnings(action="error"):
        ottava.convert(blocks()["blocks"][0], path)
