"""A converted model is of the class that it was, to whoever looks: pickles, copies, names, hooks,
wrappers."""

from __future__ import annotations

import abc
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.utils import parametrize

import ottava

RECIPE = "delayed"


class Net(torch.nn.Module):
    """A model with an attribute and a method of its own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layer = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))  # type: ignore[no-any-return]


class Slotted(Net):
    """One that says how it is pickled."""

    def __reduce__(self) -> Any:
        return type(self), (self.width,), self.__dict__


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def step(model: Any, size: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    y: torch.Tensor = model(torch.full((4, 16), size))
    y.square().mean().backward()
    return y


def steps_alike(one: Any, other: Any) -> bool:
    """Whether both go on training alike, and so begin their steps alike."""
    for number in range(3):
        if not torch.equal(step(one, 2.0**number), step(other, 2.0**number)):
            return False
        if not all(map(torch.equal, one.state_dict().values(), other.state_dict().values())):
            return False
    scale = one.get_submodule("layer.recipe_state").scale
    return bool(scale[0] == 448 / 7)


def test_the_class_looks_as_before() -> None:
    model = ottava.convert(Net(), RECIPE)
    cls = type(model)
    assert isinstance(model, Net)
    assert (cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__) == (
        "Net",
        "Net",
        __name__,
        Net.__doc__,
    )
    assert repr(model).startswith("Net(\n")
    with torch.no_grad():
        assert torch.equal(model.twice(torch.ones(4, 16)), model(model(torch.ones(4, 16))))
    assert type(ottava.convert(Net(), RECIPE)) is cls, "one class serves all models of a class"
    assert type(ottava.convert(model, RECIPE)) is cls, "converting again changes nothing"
    assert type(ottava.convert(Net(), "current")) is Net, "without state there is no step to begin"
    assert set(model.state_dict()) >= set(Net().state_dict())


def test_super_in_its_methods_is_as_before() -> None:
    class Child(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = ottava.convert(Child(), RECIPE)
    x = torch.ones(4, 16)
    with torch.no_grad():
        assert torch.equal(model(x), 2 * model.layer(x))


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, by_pickle, by_torch])
@pytest.mark.parametrize("cls", [Net, Slotted])
def test_copies_and_pickles(cls: type[Net], way: Callable[[Any], Any]) -> None:
    model = ottava.convert(cls(), RECIPE)
    step(model, 7.0)
    made = way(model)
    assert isinstance(made, cls)
    assert cls is Slotted or type(made) is type(model)
    if way is not copy.copy:  # which shares the layers
        assert steps_alike(made, model)


def test_a_pickle_names_the_class_that_was_converted() -> None:
    """So that it loads wherever that can be imported."""
    pickled = pickle.dumps(ottava.convert(Net(), RECIPE))
    assert f"{__name__}".encode() in pickled
    assert b"ConvertedModel" not in pickled


@pytest.mark.parametrize("name", ["weight"])
def test_parametrized_layers(name: str) -> None:
    model = ottava.convert(Net(), RECIPE)
    plain = copy.deepcopy(model)
    parametrize.register_parametrization(model.layer, name, torch.nn.Identity())
    for number in range(3):
        assert torch.equal(step(model, 2.0**number), step(plain, 2.0**number))
    assert model.layer.recipe_state.scale[0] == 448 / 2


def test_a_parametrized_model() -> None:
    """The model is the layer, whose class torch changes once more."""
    model = ottava.convert(torch.nn.Linear(16, 16), RECIPE)
    plain = copy.deepcopy(model)
    parametrize.register_parametrization(model, "weight", torch.nn.Identity())
    for number in range(3):
        assert torch.equal(step(model, 2.0**number), step(plain, 2.0**number))
    assert model.recipe_state.scale[0] == 448 / 2


def test_other_objects_of_the_class_are_as_before() -> None:
    """A slice, which torch makes of the same class, is no converted model until it is converted."""
    layers = torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)
    model = ottava.convert(torch.nn.Sequential(*layers), RECIPE)
    x = torch.ones(4, 16)
    for _ in range(2):
        model[:2](x).sum().backward()
        assert len(model[:2]) == 2
    assert model[0].recipe_state.scale[0] == 448
    assert model[2].recipe_state.scale[0] == 1
    part = ottava.convert(model[:2], RECIPE)
    before = copy.deepcopy(part)
    for _ in range(2):
        assert torch.equal(part(x), before(x))
    assert torch.equal(
        type(model)(torch.nn.Linear(16, 16))(x).isnan(), torch.zeros(4, 16, dtype=torch.bool)
    )


def test_hooks_see_a_step_that_has_begun() -> None:
    """Hooks run inside the region, those that were there before the conversion too, and in their
    order."""
    seen: list[tuple[str, float]] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda module, *_: seen.append((name, float(module.layer.recipe_state.scale[0])))

    model: Any = Net()
    model.register_forward_pre_hook(hook("before, early"))
    model.register_forward_hook(hook("after, early"))
    ottava.convert(model, RECIPE)
    model.register_forward_pre_hook(hook("before, first"), prepend=True)
    model.register_forward_pre_hook(hook("before, late"))
    model.register_forward_hook(hook("after, late"))
    step(model, 2.0)
    seen.clear()
    step(model, 2.0)
    names = ["before, first", "before, early", "before, late", "after, early", "after, late"]
    assert seen == [(name, 448 / 2) for name in names]


def test_a_model_that_calls_itself_begins_one_step() -> None:
    class Deep(Net):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self(super().forward(x), depth - 1) if depth else x

    model = ottava.convert(Deep(), RECIPE)
    for number in range(1, 4):
        step(model)
        assert int((model.layer.recipe_state.amax_history[1:, 0] > 0).sum()) == number - 1


@pytest.mark.parametrize(
    "wrap", [torch.nn.DataParallel, torch.jit.ignore, lambda model: torch.nn.Sequential(model)]
)
def test_inside_of_others(wrap: Any) -> None:
    model, plain = ottava.convert(Net(), RECIPE), ottava.convert(Net(), RECIPE)
    wrapped = wrap(model)
    for number in range(3):
        x = torch.full((4, 16), 2.0**number)
        wrapped(x).square().mean().backward()
        plain(x).square().mean().backward()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_compiled_whole() -> None:
    torch._dynamo.reset()
    model, plain = ottava.convert(Net(), RECIPE), ottava.convert(Net(), RECIPE)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number in range(3):
        x = torch.full((4, 16), 2.0**number)
        compiled(x).square().mean().backward()
        plain(x).square().mean().backward()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


class Registered(torch.nn.Module):
    """Told of its subclasses, of which it refuses two of one name."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, family: str) -> None:
        if cls.__name__ in Registered.known:
            raise ValueError(f"duplicate {cls.__name__}")
        Registered.known.append(cls.__name__)


class Member(Registered, family="models"):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def test_a_class_that_registers_its_subclasses_is_not_told_of_a_conversion() -> None:
    model = ottava.convert(Member(), "delayed")
    model(torch.randn(4, 32)).sum().backward()
    assert Registered.known == ["Member"]
    assert isinstance(model, Member)


class Registry(type):
    """Has each class that it makes, of which it refuses two of one name."""

    known: ClassVar[dict[str, type]] = {}

    def __new__(cls, name: str, bases: Any, namespace: Any) -> Any:
        if name in cls.known:
            raise ValueError(f"duplicate {name}")
        made = super().__new__(cls, name, bases, namespace)
        made.family = "models"  # type: ignore[attr-defined]
        return made

    def __init__(cls, name: str, bases: Any, namespace: Any) -> None:
        super().__init__(name, bases, namespace)
        Registry.known[name] = cls


class ByMetaclass(Net, metaclass=Registry):
    pass


class Abstract(Net, abc.ABC):
    @abc.abstractmethod
    def name(self) -> str: ...


class Concrete(Abstract):
    def name(self) -> str:
        return "concrete"


def test_a_metaclass_that_registers_its_classes_is_not_told_of_a_conversion() -> None:
    model: Any = ottava.convert(ByMetaclass(), RECIPE)
    assert Registry.known == {"ByMetaclass": ByMetaclass}
    assert type(type(model)) is Registry
    assert model.family == "models"
    step(model, 7.0)
    assert steps_alike(model, by_pickle(model))


def test_abstract_classes() -> None:
    model = ottava.convert(Concrete(), RECIPE)
    assert isinstance(model, Concrete)
    assert isinstance(model, Abstract)
    assert not isinstance(Concrete(), type(model))
    assert isinstance(model, type(model))
    # Each class remembers for itself what is of it, and what is not.
    assert issubclass(Concrete, Concrete)
    assert not isinstance(Concrete(), type(model))
    step(model, 7.0)
    assert steps_alike(model, by_pickle(model))
