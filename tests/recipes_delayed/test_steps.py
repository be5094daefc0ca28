"""Steps of ordinary models: what begins one, what is recorded, what is warned of, what lives on.

``tests/integration/test_steps.py`` runs random programs against the rule.
"""

from __future__ import annotations

import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ottava
from ottava import torch_private
from ottava.nn import Linear
from ottava.nn import call as calls
from ottava_delayed import DelayedScaling, Float8Quantizer, scaling_statistics
from tests import oracle
from tests.comparing import assert_same

LENGTH = 4


def delayed(**options: Any) -> DelayedScaling:
    return DelayedScaling(amax_history_len=LENGTH, **options)


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))


def batch(step: int) -> torch.Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(step)) * (1 + 5 * step % 7)


def amax(x: torch.Tensor) -> float:
    return x.abs().max().item()


def scale_for(*amaxes: float, fp8_max: float = 448.0) -> float:
    return oracle.scale_from_amax(max(amaxes), fp8_max)[0]


def statistics(net: Any, tensor_type: str = "input") -> Any:
    return scaling_statistics(net)["0"][tensor_type]


# -- recomputation --


def on_cpu(function: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return function(x)


class Sine(torch.autograd.Function):
    """A function whose node in the graph is of a class in Python, as that of a checkpoint is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * ctx.saved_tensors[0].cos()


def selective() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


PLAIN, REENTRANT = (functools.partial(checkpoint, use_reentrant=kind) for kind in (False, True))
#: What is around a layer, around that with the function that follows it, and that function.
RECOMPUTED: dict[str, tuple[Any, Any, Any]] = {
    "plain": (PLAIN, None, torch.sin),
    "reentrant": (REENTRANT, None, torch.sin),
    "plain in plain": (PLAIN, PLAIN, torch.sin),
    "plain in reentrant": (PLAIN, REENTRANT, torch.sin),
    "reentrant in plain": (REENTRANT, PLAIN, torch.sin),
    "reentrant in reentrant": (REENTRANT, REENTRANT, torch.sin),
    "hooks in plain": (on_cpu, PLAIN, torch.sin),
    "hooks in reentrant": (on_cpu, REENTRANT, torch.sin),
    "reentrant in hooks": (REENTRANT, on_cpu, torch.sin),
    "selective": (functools.partial(PLAIN, context_fn=selective), None, torch.sin),
    "no early stop": (functools.partial(PLAIN, early_stop=False), PLAIN, torch.sin),
    "before a function in Python, plain": (None, PLAIN, Sine.apply),
    "before a function in Python, reentrant": (None, REENTRANT, Sine.apply),
    "before another layer, plain": (on_cpu, PLAIN, "a layer"),
    "before another layer, reentrant": (on_cpu, REENTRANT, "a layer"),
}


def recomputed(inner: Any, outer: Any, after: Any) -> dict[str, torch.Tensor]:
    """What a layer has seen in some steps."""
    torch.manual_seed(0)
    layer, recipe = Linear(16, 16), delayed()
    if after == "a layer":
        after = Linear(16, 16, recipe=delayed())

    def followed(x: torch.Tensor) -> Any:
        return after(layer(x) if inner is None else inner(layer, x))

    for step in range(4):
        x = (10.0**step * batch(0)).requires_grad_()
        with ottava.autocast(recipe):
            y = followed(x) if outer is None else outer(followed, x)
        y.sum().backward()
    return dict(layer.named_buffers())


@pytest.mark.parametrize("told", [True, False], ids=["torch tells", "torch does not tell"])
@pytest.mark.parametrize("way", RECOMPUTED)
def test_recomputation_records_once(way: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch does not tell the kind of a recomputation, clamped elements may count twice."""
    if not told:
        monkeypatch.setattr(calls, "repeats_forward", lambda: False)
    inner, outer, after = RECOMPUTED[way]
    plain, result = recomputed(None, None, after), recomputed(inner, outer, after)
    assert plain["recipe_state.saturated"][0] > 0
    for name, value in plain.items():
        if told or "saturated" not in name:
            assert_same(result[name], value, note=name)


def test_a_recomputed_model_whose_layers_take_nothing_of_its_input() -> None:
    """A reentrant checkpoint turns gradients off, so that only the input tells of training."""
    results = []
    for around in (lambda net, x: net(x), PLAIN, REENTRANT):
        net = ottava.convert(torch.nn.Sequential(torch.nn.LayerNorm(16), *model()), delayed())
        for step in range(3):
            around(net, batch(step).requires_grad_()).sum().backward()
        results.append(list(net.buffers()))
    assert_same(results[1:], results[:1] * 2)


@pytest.mark.parametrize("around", [PLAIN, REENTRANT], ids=["plain", "reentrant"])
def test_a_recomputation_where_torch_tells_no_backward_pass(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, around: Any
) -> None:
    """In a region that stays open it changes nothing."""

    def gradients() -> list[Any]:
        net = ottava.convert(model(), delayed())
        for step in range(3):
            net.zero_grad()
            with ottava.autocast():
                y = net[2](around(net[0], batch(step).requires_grad_()))
                scale = net[0].recipe_state.scale.clone()
                y.square().mean().backward()
            assert torch.equal(net[0].recipe_state.scale, scale)
        return [parameter.grad for parameter in net.parameters()]

    expected = gradients()
    lacking = {"graph_task_id": torch_private.Fallbacks.graph_task_id, "KNOWS_BACKWARD": False}
    for name, module in list(sys.modules.items()):
        if name.startswith("ottava"):
            for attribute in lacking.keys() & vars(module).keys():
                monkeypatch.setattr(module, attribute, lacking[attribute])
    assert_same(gradients(), expected)
    assert not [warning for warning in recwarn if "region" in str(warning.message)]


# -- calibration --


def test_a_layer_that_is_bound_or_converted_later_keeps_what_it_has_learnt() -> None:
    alone = torch.nn.Sequential(Linear(16, 16))
    with torch.no_grad(), ottava.autocast(delayed(), calibrating=True):
        alone(batch(1))
    ottava.convert(ottava.convert(alone, delayed()), delayed())
    alone[0].bind(None)
    alone[0].bind(delayed())
    assert alone[0].recipe_state.scale[0].item() == scale_for(amax(batch(1)))


# -- what begins no step, and what begins one all the same --


# A call of a layer with an option that it refuses.
REFUSED: dict[str, tuple[dict[str, Any], bool]] = {
    "shape": ({"input": torch.randn(12, 32)}, False),
    "dtype": ({"input": batch(1).double()}, False),
    "microbatch": ({"input": batch(1), "is_first_microbatch": "yes"}, False),
    "no main_grad": ({"input": batch(1)}, True),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_a_layer_that_refuses_its_operands_has_begun_no_step(refused: str) -> None:
    operands, fuses = REFUSED[refused]
    layer = Linear(16, 16, recipe=delayed())
    layer(batch(0)).sum().backward()
    before = [value.clone() for value in layer.buffers()]
    layer.fuse_wgrad_accumulation = fuses
    with pytest.raises(ottava.errors.OttavaError):
        layer(**operands)
    assert_same(list(layer.buffers()), before)


# -- recipes and factories --


def test_a_factory_goes_over_the_recipe() -> None:
    own = Float8Quantizer(torch.tensor([8.0]), torch.zeros(1), torch.float8_e5m2)
    recipe = delayed()
    net = ottava.convert(model(), recipe)
    net(batch(0)).sum().backward()
    recipe.set_quantizer_factory(lambda role: own if role.tensor_type == "input" else None)
    with pytest.warns(UserWarning, match="discarded"):
        net(batch(1)).sum().backward()
    assert own.amax is not None
    assert own.internal is False
    assert own.amax.item() >= amax(batch(1))
    assert statistics(net).largest_amax == 0.0
    assert statistics(net, "weight").largest_amax > 0.0
    # Whoever gave a quantizer may change it between calls.
    with torch.no_grad():
        first = net[0](batch(0))
        own.scale = torch.full((1,), 1e6)
        assert not torch.equal(net[0](batch(0)), first)


def test_warnings_of_a_forward_pass_after_a_backward_pass() -> None:
    net, alone = ottava.convert(model(), delayed()), Linear(16, 16)
    with ottava.autocast(delayed()):
        net(batch(0)).sum().backward()
        with pytest.warns(UserWarning, match="enter it anew for every step"):
            net(batch(1))
    with warnings.catch_warnings(action="error"):
        repr(net)
        for step in range(3):
            with ottava.autocast(delayed()):
                net(batch(step)).sum().backward()
        with ottava.autocast(delayed()):
            alone(batch(0))
            # Loading is no backward pass, and calibration no forward pass of a step.
            alone.load_state_dict(alone.state_dict())
            alone(batch(0))
        net.load_state_dict(net.state_dict())
        with ottava.autocast(calibrating=True):
            net(batch(1))


# -- how long things live --


@pytest.fixture
def no_garbage_is_collected() -> Iterator[None]:
    # The first checkpoint of a process imports the compiler, which refers to running frames.
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def in_regions(net: Any, calibrates: bool = False) -> Any:
    def run(x: torch.Tensor) -> Any:
        if calibrates:
            with ottava.autocast(delayed(), calibrating=True):
                net(x)
        with ottava.autocast(delayed()):
            return net(x)

    return run


#: Of a layer: what runs it.
RUNS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda layer: layer,
    "converted": lambda layer: ottava.convert(torch.nn.Sequential(layer), delayed()),
    "in regions": in_regions,
    "recomputed": lambda layer: in_regions(functools.partial(PLAIN, layer)),
    "calibrated": lambda layer: in_regions(layer, calibrates=True),
}


@pytest.mark.usefixtures("no_garbage_is_collected")
def test_a_state_goes_with_its_layer() -> None:
    for way, make in RUNS.items():
        layer, references = Linear(16, 16, recipe=delayed()), []
        run = make(layer)
        for _ in range(5):
            y = run(torch.ones(4, 16, requires_grad=True))
            y.sum().backward()
            references.append(sys.getrefcount(weakref.ref(layer.recipe_state)))
        # A step notes what ran since it began, however many steps there were.
        assert references[1:] == references[1:2] * 4, way
        parts = [weakref.ref(layer.recipe_state), weakref.ref(layer.recipe_state.scale)]
        del run, layer, y
        assert [part() for part in parts] == [None, None], way


def test_blocks_of_recipes_that_are_gone_are_forgotten() -> None:
    layer, recipes = Linear(16, 16), []
    with warnings.catch_warnings(action="ignore"):
        for step in range(30):
            recipe = delayed(amax_compute_algo=lambda history: history[0])
            recipes.append(weakref.ref(recipe))
            with ottava.autocast(recipe):
                layer(batch(step)).sum().backward()
        assert sum(known() is not None for known in recipes) < 5
        del layer, recipe
        gc.collect()
        # Blocks of another recipe make room.
        with ottava.autocast(delayed(margin=5)):
            pass
    assert not [known for known in recipes if known() is not None]
