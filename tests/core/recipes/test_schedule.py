"""Steps in high precision: a recipe computes in it at first, then quantized, then again.

A weight of 1/3 is no number of E4M3. So the output of a layer shows how a step computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ottava
from ottava import GridQuantizer, Layout
from ottava.errors import OptionError, UsageError
from tests.copying import by_pickle

THIRD = torch.tensor(1 / 3).item()
FIRST, LAST, STEPS = 2, 4, 6
#: Whether each step computes in high precision.
EXPECTED = [True, True, False, False, True, True]


@dataclass(frozen=True)
class Scheduled(ottava.Recipe):
    """E4M3 with one scale of 1 for all, because no amax is above 448."""

    name: ClassVar[str] = "scheduled"
    high_precision_until_step: int = FIRST
    high_precision_after_step: int | None = LAST

    def make_quantizer(
        self, role: ottava.QuantizerRole, *, amax_reduction_group: Any = None
    ) -> ottava.Quantizer:
        return GridQuantizer(Layout(torch.float8_e4m3fn, (1, None), rounding="floor"))


def layer() -> torch.nn.Linear:
    made = torch.nn.Linear(16, 16, bias=False)
    torch.nn.init.constant_(made.weight, THIRD)
    return made


def model(recipe: ottava.Recipe) -> torch.nn.Module:
    return ottava.convert(torch.nn.Sequential(layer()), recipe)


def is_high_precision(y: torch.Tensor) -> bool:
    """How a layer computed, whose inputs are ones."""
    exact = torch.full_like(y, 16 * THIRD)
    return torch.allclose(y, exact, rtol=1e-6, atol=0)


def ones() -> torch.Tensor:
    return torch.ones(16, 16, requires_grad=True)


def step(run: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Run a step; whether it computed in high precision, forward and backward alike."""
    x = ones()
    y = run(x)
    y.sum().backward()
    assert x.grad is not None
    assert is_high_precision(x.grad) == is_high_precision(y)
    return is_high_precision(y)


def steps(run: Callable[[torch.Tensor], torch.Tensor], count: int = STEPS) -> list[bool]:
    return [step(run) for _ in range(count)]


# -- ways to run a step --


def converted(recipe: ottava.Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    return model(recipe)


def alone(recipe: ottava.Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    made = ottava.nn.Linear.from_linear(layer())
    made.bind(recipe)
    return made


def in_region(recipe: ottava.Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    plain = ottava.nn.Linear.from_linear(layer())

    def run(x: torch.Tensor) -> torch.Tensor:
        with ottava.autocast(recipe):
            return plain(x)

    return run


def recomputed(reentrant: bool) -> Callable[[ottava.Recipe], Callable[..., torch.Tensor]]:
    def make(recipe: ottava.Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
        class Checkpointed(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer()

            def forward(self, x: torch.Tensor) -> Any:
                return checkpoint(self.layer, x, use_reentrant=reentrant)

        return ottava.convert(Checkpointed(), recipe)

    return make


def evaluated_between(recipe: ottava.Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    """Evaluation moves nothing, and computes as the step before it."""
    net = model(recipe)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(net(x.detach()), y)
        return y

    return run


def one_role(way: Callable[..., Any]) -> Callable[[ottava.Recipe], Callable[..., torch.Tensor]]:
    """The schedule of a recipe that a factory requests for the weight alone."""

    def make(recipe: ottava.Recipe) -> Any:
        def factory(role: ottava.QuantizerRole) -> Any:
            return ottava.QuantizerRequest(recipe) if role.tensor_type == "weight" else None

        outer = replace(Scheduled(), high_precision_until_step=0, high_precision_after_step=None)
        outer.set_quantizer_factory(factory)
        return way(outer)

    return make


def first_microbatches(recipe: ottava.Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    """The second microbatch of a step uses the weight that the first one quantized."""
    net = model(recipe)

    def run(x: torch.Tensor) -> torch.Tensor:
        with ottava.autocast():
            y = net[0](x, is_first_microbatch=True)
            assert torch.equal(net[0](x, is_first_microbatch=False), y)
        return y

    return run


WAYS = {
    "converted": converted,
    "alone": alone,
    "in a region": in_region,
    "recomputed": recomputed(False),
    "recomputed, reentrant": recomputed(True),
    "evaluated between": evaluated_between,
    "one role": one_role(converted),
    "one role, alone": one_role(alone),
    "one role, in a region": one_role(in_region),
    "microbatches": first_microbatches,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_and_the_last_steps_are_in_high_precision(way: str) -> None:
    assert steps(WAYS[way](Scheduled())) == EXPECTED


@pytest.mark.parametrize(
    ("until", "after", "expected"),
    [
        (0, 2, [False, False, True, True, True, True]),
        (3, None, [True, True, True, False, False, False]),
        (0, None, [False] * STEPS),
    ],
)
def test_one_end_of_training(until: int, after: int | None, expected: list[bool]) -> None:
    assert steps(model(Scheduled(until, after))) == expected


def test_a_weight_that_lives_in_fp8() -> None:
    net = ottava.convert(torch.nn.Sequential(layer()), Scheduled(), primary=True)
    with torch.no_grad():
        net[0].weight.copy_(torch.ones(16, 16))
    found = []
    for _ in range(STEPS):
        y = net(torch.full((16, 16), THIRD, requires_grad=True))
        y.sum().backward()
        found.append(is_high_precision(y))
    assert found == EXPECTED
    assert isinstance(net[0].weight, ottava.QuantizedTensor)


# The first step of a region has a graph of its own, in which the region takes the layer in.
@pytest.mark.parametrize(("way", "graphs"), [("converted", 2), ("alone", 2), ("in a region", 3)])
def test_compiled_code_has_one_graph_for_each_kind_of_step(way: str, graphs: int) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = WAYS[way](Scheduled())
    with torch.no_grad():
        # Compiled code makes no states.
        run(torch.ones(16, 16))
    assert steps(torch.compile(run, backend=counter, fullgraph=True)) == EXPECTED
    assert counter.frame_count == graphs


def test_compiled_code_is_not_recomputed_where_the_precision_changes() -> None:
    """It would be the graph of the next step. Elsewhere a recomputation counts no step."""
    torch.compiler.reset()
    net = model(Scheduled(1, None))
    with torch.no_grad():
        net(torch.ones(16, 16))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)

    def run(x: torch.Tensor) -> Any:
        return checkpoint(compiled, x, use_reentrant=False)

    with pytest.raises(UsageError, match=r"recomputed in step 1.*inside of the compiled code"):
        step(run)
    assert steps(run, 2) == [False, False]
    assert net.state_dict()["0.recipe_state.steps"] == 3


def saved(net: torch.nn.Module) -> torch.nn.Module:
    """A model that is resumed from the state of another."""
    resumed = model(Scheduled())
    resumed.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
    return resumed


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, saved])
@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_copy_goes_on_where_it_was_made(at: int, duplicate: Callable[..., Any]) -> None:
    net = model(Scheduled())
    steps(net, at)
    twin = duplicate(net)
    with torch.no_grad():
        assert is_high_precision(twin(torch.ones(16, 16))) == EXPECTED[at - 1]
    for each in (twin, net):
        assert steps(each, STEPS - at) == EXPECTED[at:]


def test_a_compiled_run_is_resumed() -> None:
    torch.compiler.reset()
    net = model(Scheduled())
    steps(net, 2)
    resumed = torch.compile(saved(net), backend="aot_eager", fullgraph=True)
    assert steps(resumed, STEPS - 2) == EXPECTED[2:]


def test_a_reset_and_a_plain_state_dict_start_again() -> None:
    net = model(Scheduled())
    steps(net, 3)
    net[0].recipe_state.reset()
    with torch.no_grad():
        assert is_high_precision(net(torch.ones(16, 16)))
    assert steps(net, 3) == EXPECTED[:3]
    with pytest.warns(UserWarning, match="no scaling state for a layer"):
        net.load_state_dict({"0.weight": torch.full((16, 16), THIRD)})
    assert steps(net) == EXPECTED


def test_calibration_evaluation_and_high_precision_count_no_step() -> None:
    net = model(Scheduled())
    regions = ottava.autocast(calibrating=True), ottava.autocast(enabled=False), torch.no_grad()
    for region in (*regions, regions[0]):
        with region:
            net(torch.ones(16, 16))
    assert steps(net) == EXPECTED


@pytest.mark.parametrize(
    ("until", "after", "match"),
    [
        (-1, None, "high_precision_until_step is -1.*an integer >= 0"),
        (1.0, None, "high_precision_until_step is 1.0"),
        (True, None, "high_precision_until_step is True"),
        (0, -2, "high_precision_after_step is -2.*or None"),
        (0, "end", "high_precision_after_step is 'end'"),
        (3, 3, "=3 and high_precision_after_step=3 leave no step to quantize"),
        (0, 0, "leave no step to quantize"),
    ],
)
def test_refusals(until: Any, after: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        Scheduled(until, after)


class Unchecked(Scheduled):
    """A recipe that is no dataclass of its own, and sets the option later."""

    def __post_init__(self) -> None:
        pass


def test_a_recipe_that_does_not_check_itself_is_checked_when_it_is_bound() -> None:
    with pytest.raises(OptionError, match="leave no step"):
        model(Unchecked(5, 4))


def test_compiled_code_refuses_to_make_the_state() -> None:
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"UsageError|compiled code cannot make one"):
        torch.compile(in_region(Scheduled()), backend="eager", fullgraph=True)(ones())


def test_the_number_is_a_plain_tensor_of_the_state_dict() -> None:
    net = model(Scheduled()).bfloat16()
    number = net.state_dict()["0.recipe_state.steps"]
    assert list(net.state_dict()) == ["0.weight", "0.recipe_state.steps"]
    assert type(number) is torch.Tensor
    assert (number.dtype, number.shape) == (torch.int64, ())
