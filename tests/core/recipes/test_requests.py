"""Quantizer requests: roles of one layer that are served by the states of several recipes."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from rows import RowQuantizer, Rows

import ottava
from ottava import QuantizerRequest, QuantizerRole
from ottava.errors import CheckpointError, DTypeError, OptionError, RecipeNotFoundError
from ottava.recipes import RecipeState
from ottava.tensors import Quantizer


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
        made = RowQuantizer(rowwise=rowwise, columnwise=columnwise)
        made.internal = True
        return made

    def reset(self) -> None:
        self.steps.zero_()

    def __deepcopy__(self, memo: Any) -> Any:
        made = CountingState(self.recipe, [QuantizerRole(tensor_type=t) for t in self.roles])
        made.load_state_dict(self.state_dict())
        memo[id(self)] = made
        return made


@dataclass(frozen=True)
class Counting(ottava.Recipe):
    """Keeps a :class:`CountingState`."""

    name: ClassVar[str] = "counting"
    stateful: ClassVar[bool] = True
    label: str = ""
    calls: ClassVar[list[tuple[str, int]]] = []

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> RowQuantizer:
        return RowQuantizer()

    def make_state(self, roles: Any, *, amax_reduction_group: Any = None) -> CountingState:
        return CountingState(self, roles)

    def update_states(self, states: Any, amax_reduction_group: Any) -> None:
        self.calls.append((self.label, len(states)))
        for state in states:
            state.steps += 1


def over(recipe: Any, **given: Any) -> Any:
    """``recipe`` with a factory that answers for some tensor types."""
    recipe.set_quantizer_factory(lambda role: given.get(role.tensor_type))
    return recipe


def net(recipe: Any, count: int = 2) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return ottava.convert(
        torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(count)]), recipe
    )


def step(model: torch.nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@pytest.fixture(autouse=True)
def no_calls() -> None:
    Counting.calls.clear()


def test_a_stateless_recipe_gives_its_quantizer() -> None:
    recipe = over(Counting(), weight=QuantizerRequest(Rows()))
    assert isinstance(recipe.quantizer("weight"), RowQuantizer)
    layer = net(over(Rows(), weight=QuantizerRequest(Rows())), 1)[0]
    assert not layer._binding.state.stateful
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_the_layers_of_a_model_begin_a_step_together() -> None:
    model = net(
        over(
            Rows(),
            input=QuantizerRequest(Counting("a")),
            grad_output=QuantizerRequest(Counting("a")),
        )
    )
    for _ in range(3):
        step(model)
    assert Counting.calls == [("a", 2)] * 3
    assert model[0].recipe_state.counting.steps == 3
    # An input and a gradient in each step, in one state.
    assert model[0].recipe_state.counting.seen.tolist() == [3, 3]
    assert list(model.state_dict())[:4] == [
        "0.weight",
        "0.bias",
        "0.recipe_state.counting.steps",
        "0.recipe_state.counting.seen",
    ]


def test_equal_recipes_share_a_state_and_others_do_not() -> None:
    mixed = over(
        Rows(), input=QuantizerRequest(Counting("a")), weight=QuantizerRequest(Counting("b"))
    )
    model = net(mixed)
    step(model)
    assert Counting.calls == [("a", 2), ("b", 2)]
    assert [name for name, _ in model[0].recipe_state.named_children()] == [
        "counting",
        "counting_2",
    ]


def test_what_the_stateful_recipe_below_serves_stays_with_it() -> None:
    model = net(
        over(Counting("below"), weight=QuantizerRequest(Counting("asked")), input=RowQuantizer())
    )
    step(model)
    assert sorted(Counting.calls) == [("asked", 2), ("below", 2)]
    below = model[0].recipe_state.counting
    assert below.roles == ["input", "grad_output"]


def test_a_region_begins_the_step_of_parts() -> None:
    recipe = over(Rows(), input=QuantizerRequest(Counting("a")))
    layers = [ottava.nn.Linear(4, 4) for _ in range(2)]
    for _ in range(3):
        with ottava.autocast(recipe):
            for layer in layers:
                step(layer)
    # The first block finds no layer yet.
    assert [label for label, count in Counting.calls if count == 2] == ["a"] * 2


def test_evaluation_moves_nothing() -> None:
    model = net(over(Rows(), input=QuantizerRequest(Counting("a"))))
    step(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert model[0].recipe_state.counting.steps == 1
    assert model[0].recipe_state.counting.seen.tolist() == [1]


def test_the_state_is_saved_copied_and_reset() -> None:
    recipe = over(Rows(), input=QuantizerRequest(Counting("a")))
    model = net(recipe)
    step(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = net(recipe)
    other.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(model)
    step(model)
    for twin in (other, copied):
        assert twin[0].recipe_state.counting.steps == 1
        assert twin[0].recipe_state is not model[0].recipe_state
        step(twin)
        assert twin[0].recipe_state.counting.steps == 2
    model[0].reset_parameters()
    assert model[0].recipe_state.counting.steps == 0


def test_another_factory_makes_another_state() -> None:
    recipe = over(Rows(), input=QuantizerRequest(Counting("a")))
    model = net(recipe, 1)
    step(model)
    first = model[0].recipe_state
    ottava.convert(model, recipe)
    assert model[0].recipe_state is first
    over(recipe, input=QuantizerRequest(Counting("b")))
    ottava.convert(model, recipe)
    assert model[0].recipe_state is not first


def test_a_name_will_do_for_a_recipe() -> None:
    with pytest.raises(RecipeNotFoundError, match="nonesuch"):
        QuantizerRequest("nonesuch")  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="recipe is a int"):
        QuantizerRequest(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [lambda: None, lambda role, layer: None, 3])
def test_a_factory_that_takes_something_else_is_told(wrong: Any) -> None:
    recipe = Rows()
    with pytest.raises(DTypeError, match=r"the factory .*factory\(role\)"):
        recipe.set_quantizer_factory(wrong)
    assert recipe._factory is None


@pytest.mark.parametrize("wrong", [3, "weight", Rows, Rows()])
def test_a_factory_that_gives_something_else_is_told(wrong: Any) -> None:
    with pytest.raises(DTypeError, match=r"returned a \w+ for QuantizerRole.*QuantizerRequest"):
        over(Rows(), weight=wrong).quantizer("weight")


def test_a_factory_may_be_given_by_name() -> None:
    with pytest.raises(RecipeNotFoundError, match="quantizer factory 'nonesuch'"):
        Rows().set_quantizer_factory("nonesuch")
    with pytest.raises(DTypeError, match="the factory is a int"):
        Rows().set_quantizer_factory(3)  # type: ignore[arg-type]


def test_a_mixed_layer_compiles() -> None:
    recipe = over(Rows(), grad_output=RowQuantizer(), input=QuantizerRequest(Rows()))
    layer = net(recipe, 1)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).square().sum().backward()
    eager, x.grad = x.grad, None
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    assert torch.equal(x.grad, eager)


def test_a_recipe_that_asks_for_itself_is_told() -> None:
    recipe = Counting("a")
    recipe.set_quantizer_factory(lambda role: QuantizerRequest(recipe))
    for ask in (lambda: recipe.quantizer("weight"), lambda: net(recipe)):
        with pytest.raises(OptionError, match="'counting' asks for that recipe"):
            ask()


def test_a_checkpoint_of_another_recipes_state_is_told() -> None:
    step(model := net(over(Rows(), input=QuantizerRequest(Counting("a")))))
    plain = ottava.nn.Linear(4, 4, name="up")
    plain.load_state_dict(model[0].state_dict())
    with pytest.raises(
        CheckpointError, match=r"loaded for Linear 'up' is not one of Counting.*steps, seen"
    ):
        plain.bind(Counting("a"))


def test_a_copy_of_a_layer_has_a_state_of_its_own() -> None:
    """Whoever writes a state need not say how it is copied."""

    class Bare(CountingState):
        __deepcopy__ = RecipeState.__deepcopy__  # type: ignore[assignment]

    state = Bare(Counting("a"), [QuantizerRole(tensor_type="input")])
    state.step, state.amax_reduction_group = object(), object()
    copied = copy.deepcopy(state)
    assert copied is not state
    assert (copied.step, copied.amax_reduction_group) == (None, None)
    state.steps += 1
    assert copied.steps == 0
    assert copied.is_of(Counting("a"))


# -- what the base class does for states --


@pytest.mark.parametrize(
    "recipe", [Counting(), over(Counting("outer"), input=QuantizerRequest(Counting("inner")))]
)
def test_states_are_float32_whatever_the_defaults_are(recipe: Any) -> None:
    """Of a class that names neither dtype nor device, and leaves ``_apply`` to torch."""
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        layer = ottava.nn.Linear(8, 8, recipe=recipe, device="cpu")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    layer(torch.ones(2, 8, dtype=torch.bfloat16))
    for cast in (
        layer.bfloat16,
        layer.half,
        layer.double,
        layer.float,
        lambda: layer.to(torch.bfloat16),
    ):
        cast()
        found = [buffer for name, buffer in layer.named_buffers()]
        assert {(buffer.dtype, buffer.device.type) for buffer in found} == {(torch.float32, "cpu")}
    assert any(bool(buffer.any()) for buffer in layer.buffers())
    layer.to("meta").to_empty(device="cpu")
    steps = [buffer for name, buffer in layer.named_buffers() if name.endswith("steps")]
    assert not any(bool(buffer.any()) for buffer in steps)
