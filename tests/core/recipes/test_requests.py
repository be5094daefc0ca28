"""Quantizer factories and requests: roles of one layer that are served by several recipes, and the
states of these."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import ottava
from ottava import QuantizerRequest, QuantizerRole
from ottava.errors import CheckpointError, DTypeError, OptionError, RecipeNotFoundError
from ottava.recipes import RecipeState
from ottava.recipes.role import Explanation
from ottava.tensors import GridQuantizer, Quantizer

LAYOUT = ottava.Layout(torch.float8_e4m3fn, (1, None))


class CountingState(torch.nn.Module, RecipeState):
    """Counts steps, and what was quantized in them."""

    stateful: ClassVar[bool] = True
    steps: torch.Tensor
    seen: torch.Tensor

    def __init__(
        self, recipe: Any, roles: Sequence[QuantizerRole], *, amax_reduction_group: Any = None
    ) -> None:
        super().__init__()
        self.recipe, self.factory, self.amax_reduction_group = recipe, recipe._factory, None
        self.roles = [role.tensor_type for role in roles]
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(len(roles)))

    def serves(self, recipe: Any, amax_reduction_group: Any) -> bool:
        return self.is_of(recipe)

    def quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool, recording: bool = True
    ) -> Quantizer:
        if recording:
            self.seen[self.roles.index(tensor_type)] += 1
        quantizer = GridQuantizer(LAYOUT, rowwise=rowwise, columnwise=columnwise)
        quantizer.internal = True
        return quantizer

    def reset(self) -> None:
        self.steps.zero_()


@dataclass(frozen=True)
class Counting(ottava.Recipe):
    """Keeps a :class:`CountingState`."""

    name: ClassVar[str] = "counting"
    stateful: ClassVar[bool] = True
    label: str = ""
    calls: ClassVar[list[tuple[str, int]]] = []

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> GridQuantizer:
        return GridQuantizer(LAYOUT)

    def make_state(self, roles: Any, *, amax_reduction_group: Any = None) -> CountingState:
        return CountingState(self, roles)

    def update_states(self, states: Any, amax_reduction_group: Any) -> None:
        self.calls.append((self.label, len(states)))
        for state in states:
            state.steps += 1


class CountingLater(Counting):
    """Whose state is in one that counts steps, too."""

    high_precision_until_step = 1


class Answers:
    """A factory that is an object, to which no copy of it is equal."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def __call__(self, role: QuantizerRole) -> Any:
        return self.answers.get(role.tensor_type)


def over(recipe: Any, **answers: Any) -> Any:
    """``recipe`` with a factory that answers for some tensor types."""
    recipe.set_quantizer_factory(Answers(answers))
    return recipe


def net(recipe: Any, count: int = 2) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(count)]
    return ottava.convert(torch.nn.Sequential(*layers), recipe)


def step(model: torch.nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    Counting.calls.clear()


def test_a_factory_is_asked_for_each_role_and_goes_over_the_recipe(
    recipe: Any, quantizer: Any
) -> None:
    roles: list[QuantizerRole] = []
    failing = {"weight"}

    def factory(role: QuantizerRole) -> Any:
        if role.tensor_type in failing:
            raise ZeroDivisionError
        roles.append(role)
        return quantizer if role.tensor_type == "weight" else None

    role = QuantizerRole("linear", "weight", "0")
    assert recipe.explain(role) == Explanation("sample E4M3", "sample E4M3")
    assert recipe.explain("grad_output").rowwise == "sample E5M2"
    assert recipe.rules() == ()
    recipe.set_quantizer_factory(factory)
    with pytest.raises(ZeroDivisionError):
        net(recipe, 1)
    # What it answered before it failed is asked again.
    failing.clear()
    roles.clear()
    net(recipe, 1)
    types = ("input", "weight", "grad_output")
    assert set(roles) == {QuantizerRole("linear", tensor_type, "0") for tensor_type in types}
    assert recipe.explain("weight").columnwise == "SampleQuantizer E4M3"
    assert recipe.explain("input").columnwise == "sample E4M3"
    over(recipe, input=QuantizerRequest(Counting()))
    assert recipe.explain("input").rowwise.startswith("counting")


def test_a_stateless_recipe_gives_its_quantizer(recipe: Any) -> None:
    other = type(recipe)()
    over(recipe, weight=QuantizerRequest(other), input=GridQuantizer(LAYOUT))
    assert type(recipe.quantizer("weight")) is type(other.quantizer("weight"))
    assert type(recipe.quantizer("input")) is GridQuantizer
    layer = net(recipe, 1)[0]
    assert list(layer.state_dict()) == ["weight", "bias"]
    step(layer)


def test_the_layers_of_a_model_begin_the_steps_of_their_parts_together(recipe: Any) -> None:
    asked = QuantizerRequest(Counting("a"))
    model = net(over(recipe, input=asked, grad_output=asked))
    for _ in range(3):
        step(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert Counting.calls == [("a", 2)] * 3
    # An input and a gradient in each step, in one state; an evaluation moves nothing.
    assert model[0].recipe_state.counting.steps == 3
    assert model[0].recipe_state.counting.seen.tolist() == [3, 3]
    names = ["weight", "bias", "recipe_state.counting.steps", "recipe_state.counting.seen"]
    assert list(model.state_dict())[:4] == [f"0.{name}" for name in names]


def test_equal_recipes_share_a_state_and_others_do_not(recipe: Any) -> None:
    requests = {"input": QuantizerRequest(Counting("a")), "weight": QuantizerRequest(Counting("b"))}
    model = net(over(recipe, **requests))
    step(model)
    assert Counting.calls == [("a", 2), ("b", 2)]
    children = [name for name, _ in model[0].recipe_state.named_children()]
    assert children == ["counting", "counting_2"]
    Counting.calls.clear()
    below = Counting("below")
    asked = QuantizerRequest(Counting("asked"))
    model = net(over(below, weight=asked, input=GridQuantizer(LAYOUT)))
    step(model)
    assert sorted(Counting.calls) == [("asked", 2), ("below", 2)]
    assert model[0].recipe_state.counting.roles == ["input", "grad_output"]
    # A recipe that is asked for may ask for another one.
    Counting.calls.clear()
    step(net(over(recipe, weight=QuantizerRequest(below))))
    assert Counting.calls == [("asked", 2)]


def test_a_region_begins_the_step_of_parts_and_of_loaded_states(recipe: Any) -> None:
    over(recipe, input=QuantizerRequest(Counting("a")))
    layers = [ottava.nn.Linear(4, 4) for _ in range(2)]
    for _ in range(3):
        with ottava.autocast(recipe):
            for layer in layers:
                step(layer)
    # The first block finds no layer yet.
    assert [label for label, count in Counting.calls if count == 2] == ["a"] * 2
    # What is loaded goes into the next step, although nothing has run since the last one began.
    with ottava.autocast(recipe), torch.no_grad():
        for layer in layers:
            layer.eval()(torch.ones(2, 4))
            layer.train().load_state_dict(layer.state_dict())
    Counting.calls.clear()
    with ottava.autocast(recipe):
        step(layers[0])
    assert Counting.calls == [("a", 2)]


def test_a_state_is_made_for_training_whatever_is_set_around() -> None:
    layer: Any = ottava.nn.Linear(4, 4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.device("meta"):
            layer.bind(Counting())
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    step(layer)
    assert (layer.recipe_state.steps, layer.recipe_state.steps.dtype) == (1, torch.float32)


def test_the_state_is_saved_copied_reset_and_follows_the_factory(recipe: Any) -> None:
    over(recipe, input=QuantizerRequest(Counting("a")))
    model, other = net(recipe), net(recipe)
    step(model)
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    step(model)
    for twin in (other, copied):
        assert twin[0].recipe_state.counting.steps == 1
        step(twin)
        assert twin[0].recipe_state.counting.steps == 2
    later = net(CountingLater("a"))
    step(later)
    for each in (model, later):
        each[0].reset_parameters()
        assert each[0].recipe_state.counting.steps == 0
    first = model[0].recipe_state
    ottava.convert(model, recipe)
    assert model[0].recipe_state is first
    over(recipe, input=QuantizerRequest(Counting("b")))
    ottava.convert(model, recipe)
    assert model[0].recipe_state is not first
    recipe.set_quantizer_factory(None)
    ottava.convert(model, recipe)
    assert list(model[0].state_dict()) == ["weight", "bias"]


def test_what_is_no_factory_request_or_quantizer_is_refused(recipe: Any) -> None:
    wrong_factories: list[Any] = [lambda: None, lambda role, layer: None]
    for factory in wrong_factories:
        with pytest.raises(DTypeError, match=r"the factory .*factory\(role\)"):
            recipe.set_quantizer_factory(factory)
    with pytest.raises(DTypeError, match="the factory is a int"):
        recipe.set_quantizer_factory(3)
    with pytest.raises(RecipeNotFoundError, match="quantizer factory 'nonesuch'"):
        recipe.set_quantizer_factory("nonesuch")
    assert recipe._factory is None
    for answer in (3, "weight", type(recipe), recipe):
        with pytest.raises(DTypeError, match=r"returned a \w+ for QuantizerRole.*QuantizerRequest"):
            over(recipe, weight=answer).quantizer("weight")
    with pytest.raises(RecipeNotFoundError, match="nonesuch"):
        QuantizerRequest("nonesuch")  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="recipe is a int"):
        QuantizerRequest(3)  # type: ignore[arg-type]
    itself = Counting("a")
    itself.set_quantizer_factory(lambda role: QuantizerRequest(itself))
    for ask in (lambda: itself.quantizer("weight"), lambda: net(itself)):
        with pytest.raises(OptionError, match="'counting' asks for that recipe"):
            ask()


def test_the_state_of_another_recipe_in_a_checkpoint_is_refused(recipe: Any) -> None:
    model = net(over(recipe, input=QuantizerRequest(Counting("a"))))
    step(model)
    plain = ottava.nn.Linear(4, 4, name="up")
    plain.load_state_dict(model[0].state_dict())
    with pytest.raises(CheckpointError, match=r"for Linear 'up' is not one of Counting.*steps"):
        plain.bind(Counting("a"))
