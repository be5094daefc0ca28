"""The state is plain tensors: saved, loaded, moved, copied, resized and resumed, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.errors import UsageError
from ottava_delayed import DelayedScaling
from tests.comparing import assert_same

LENGTH = 5


def model(recipe: Any = None) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    return ottava.convert(net, recipe or DelayedScaling(amax_history_len=LENGTH))


def train(net: Any, steps: range = range(3)) -> Any:
    for step in steps:
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(step))
        net((1 + step) * x).sum().backward()
    return net


def assigned(state: Any) -> None:
    values = {name: value.clone() for name, value in state.state_dict().items()}
    state.load_state_dict(values, assign=True)


def given_data(state: Any) -> None:
    for buffer in state.buffers():
        buffer.data = buffer.data.clone()


def replaced(state: Any) -> None:
    for name, buffer in list(state.named_buffers()):
        setattr(state, name, buffer.clone())


@pytest.mark.parametrize("change", [assigned, given_data, replaced])
def test_a_layer_records_into_the_buffers_that_it_has_now(change: Any) -> None:
    net, other = train(model()), train(model())
    change(net[0].recipe_state)
    for one in (net, other):
        train(one, range(3, 6))
    assert_same(list(net.state_dict().values()), list(other.state_dict().values()))


@pytest.mark.parametrize("through_meta", [False, True])
def test_initializing_a_layer_forgets_its_steps(through_meta: bool) -> None:
    net = model()
    fresh = [buffer.clone() for buffer in net.buffers()]
    train(net, range(1000, 1003))
    assert net[0].recipe_state.saturated[0] > 0
    if through_meta:
        net.to("meta").to_empty(device="cpu")
    for layer in (net[0], net[2]):
        layer.reset_parameters()
    assert_same(list(net.buffers()), fresh)
    train(net)
    assert net[0].recipe_state.amax_history[0, 0] > 0


def test_a_state_that_waits_for_its_recipe_is_a_copy() -> None:
    """A layer without a recipe keeps the state that it loads for the block that brings one."""
    source = train(model())
    first, second = ottava.nn.Linear(16, 8), ottava.nn.Linear(8, 4)
    waiting = torch.nn.Sequential(first, torch.nn.GELU(), second)
    waiting.load_state_dict(source.state_dict())
    expected = {name: value.clone() for name, value in source.state_dict().items()}
    train(source, range(3, 5))
    assert_same([waiting.state_dict()[name] for name in expected], [*expected.values()])


@pytest.mark.parametrize(("saved", "loaded"), [(6, 3), (6, 1), (3, 6), (1, 4)])
def test_a_history_of_another_length(saved: int, loaded: int) -> None:
    net = train(model(DelayedScaling(amax_history_len=saved)), range(8))
    other, state = model(DelayedScaling(amax_history_len=loaded)), net.state_dict()
    with pytest.warns(UserWarning, match=f"saved with {saved} steps and is loaded into {loaded}"):
        other.load_state_dict(state, strict=True)
    old, new = net[0].recipe_state.amax_history, other[0].recipe_state.amax_history
    kept = min(saved, loaded) - 1
    assert torch.equal(new[0], old[0])
    assert torch.equal(new[loaded - kept :], old[saved - kept :])
    assert not new[1 : loaded - kept].any()
    assert torch.equal(other[0].recipe_state.scale, net[0].recipe_state.scale)
    # The dictionary is the caller's.
    assert state["0.recipe_state.amax_history"].shape[0] == saved


def test_a_state_says_what_it_has() -> None:
    text = repr(model()[0].recipe_state)
    assert "slots=['input', 'weight', 'grad_output'], amax_history_len=5" in text


def test_replicas_of_data_parallel_are_refused() -> None:
    """They are made anew in each pass, so that what they record would be lost."""
    stateless = ottava.nn.Linear(16, 8)
    assert stateless._replicate_for_data_parallel() is not stateless
    layer = ottava.nn.Linear(16, 8, name="block.0", recipe="delayed")
    with pytest.raises(UsageError, match=r"'block\.0'(?s:.*)DistributedDataParallel"):
        layer._replicate_for_data_parallel()
    layer.bind(None)
    with pytest.raises(UsageError, match="is lost"):  # A block may bring the recipe of the state.
        layer._replicate_for_data_parallel()
