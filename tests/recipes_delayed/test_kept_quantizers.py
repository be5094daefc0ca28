"""The quantizers that a state keeps between calls read and write its buffers, wherever these lie by
then."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DeviceError, DTypeError, UsageError
from ottava_delayed import DelayedScaling, Float8Quantizer

SLOTS = {"input": 0, "weight": 1, "grad_output": 2}


def used_layer() -> Any:
    layer = ottava.nn.Linear(16, 16, recipe=DelayedScaling(amax_history_len=4))
    x = torch.randn(4, 16, requires_grad=True)
    for _ in range(2):
        layer(x).square().sum().backward()
    return layer


def assert_of(state: Any, tensor_type: str = "input") -> None:
    """A quantizer of the state has the state's memory, and is the same one the next time."""
    made = state.quantizer(tensor_type, rowwise=True, columnwise=True)
    slot = SLOTS[tensor_type]
    assert made.internal
    assert (made.rowwise_usage, made.columnwise_usage) == (True, True)
    assert made.scale.data_ptr() == state.scale[slot].data_ptr()
    assert made.amax.data_ptr() == state.amax_history[0, slot].data_ptr()
    assert made.saturated.data_ptr() == state.saturated[slot].data_ptr()
    assert state.quantizer(tensor_type, rowwise=True, columnwise=True) is made


@pytest.mark.parametrize("tensor_type", list(SLOTS))
def test_they_are_kept(tensor_type: str) -> None:
    state = used_layer().recipe_state
    assert_of(state, tensor_type)
    variants = {
        id(state.quantizer(tensor_type, rowwise=r, columnwise=c, recording=recording))
        for r, c in ((True, False), (False, True), (True, True))
        for recording in (True, False)
    }
    assert len(variants) == 6
    silent = state.quantizer(tensor_type, rowwise=True, columnwise=False, recording=False)
    assert silent.amax is None
    assert silent.saturated is None


def test_buffers_that_are_replaced() -> None:
    layer = used_layer()
    state = layer.recipe_state
    loaded = {name: value.clone() + 1 for name, value in state.state_dict().items()}
    state.load_state_dict(loaded, assign=True)
    assert_of(state)
    state.scale.data = state.scale.data.clone() * 2
    assert_of(state)
    state.amax_history = state.amax_history.clone()
    assert_of(state)
    for name in ("saturated", "amax_history"):
        getattr(state, name).data = getattr(state, name).clone()
        assert_of(state)
    assert state.quantizer("input", rowwise=True, columnwise=False).scale == state.scale[0]


def test_copies_have_their_own() -> None:
    layer = used_layer()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.recipe_state._cache == {}
        assert_of(other.recipe_state)
        before = layer.recipe_state.amax_history.clone()
        other(1000 * torch.randn(4, 16))
        assert torch.equal(layer.recipe_state.amax_history, before)
        assert other.recipe_state.amax_history[0, 0] > 100
    assert_of(layer.recipe_state)


def test_replicas_are_refused() -> None:
    """torch.nn.DataParallel makes them in each forward pass on more than one device, and throws
    them away."""
    stateless = ottava.nn.Linear(16, 8)
    assert stateless._replicate_for_data_parallel()._binding is stateless._binding
    layer = ottava.nn.Linear(16, 8, name="block.0", recipe="delayed")
    with pytest.raises(
        UsageError, match=r"DataParallel copies Linear 'block\.0'(?s:.*)DistributedDataParallel"
    ):
        layer._replicate_for_data_parallel()
    layer.bind(None)
    with pytest.raises(UsageError, match="is lost"):  # A block may bring the recipe of the state.
        layer._replicate_for_data_parallel()


def test_quantizers_of_two_states_are_alike() -> None:
    mine, other = (
        used_layer().recipe_state.quantizer("weight", rowwise=True, columnwise=True)
        for _ in range(2)
    )
    assert mine.is_alike(other)
    assert mine.is_alike(copy.deepcopy(mine))
    assert mine != other
    assert not mine.is_alike(
        used_layer().recipe_state.quantizer("weight", rowwise=True, columnwise=False)
    )
    assert not mine.is_alike(
        used_layer().recipe_state.quantizer("input", rowwise=True, columnwise=True)
    )

    def double(tensor: Any) -> Any:
        return tensor.dequantize() * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    for quantizer in (mine, other):
        kept = quantizer.copy()
        kept.internal = False
        made = kept.quantize(torch.randn(8, 16))
        assert torch.equal(compiled(made), double(made))


def test_a_slot_is_initialized_where_it_is() -> None:
    state = used_layer().recipe_state
    quantizer = state.quantizer("weight", rowwise=True, columnwise=True).copy()
    before = state.scale.clone()
    with pytest.raises(DeviceError, match="the weight is on meta"):
        quantizer.initialize(torch.empty(8, 16, device="meta"))
    assert torch.equal(state.scale, before)
    quantizer.initialize(torch.full((8, 16), 2.0))
    assert state.scale.tolist() == [before[0], 224.0, *before[2:]]
    # From then on what does not fit takes the scale of its own amax.
    assert quantizer.quantize(torch.full((8, 16), 7.0)).dequantize().unique().tolist() == [7.0]


def test_a_layer_that_moves() -> None:
    layer = used_layer()
    layer.to("meta")
    on_meta = layer.recipe_state.quantizer("input", rowwise=True, columnwise=True)
    assert on_meta.scale.is_meta
    layer.to_empty(device="cpu")
    layer.recipe_state.reset()
    layer.reset_parameters()
    assert_of(layer.recipe_state)
    layer(torch.randn(4, 16))
    assert layer.recipe_state.amax_history[0, 0] > 0


def test_inference_mode_leaves_nothing_behind() -> None:
    layer = used_layer()
    layer.recipe_state._cache.clear()
    x = torch.randn(4, 16)
    with torch.inference_mode():
        inside = layer(x)
        assert_of(layer.recipe_state)
    # The same quantizers, of the same memory, and none of it belongs to inference mode.
    assert_of(layer.recipe_state)
    assert not layer.recipe_state.quantizer(
        "input", rowwise=True, columnwise=True
    ).scale.is_inference()
    with torch.no_grad():
        assert torch.equal(layer(x), inside)
    layer(x).sum().backward()


def test_a_state_that_inference_mode_made_is_trained() -> None:
    layer, x = ottava.nn.Linear(16, 16), torch.randn(4, 16)
    with torch.inference_mode(), ottava.autocast("delayed"):
        layer(x)
    state = layer.recipe_state
    assert not any(buffer.is_inference() for buffer in state.buffers())
    state.load_state_dict({name: value + 1 for name, value in state.state_dict().items()})
    with ottava.autocast("delayed"):
        layer(x).sum().backward()


def test_quantizers_of_a_factory_are_not_kept() -> None:
    """Whoever gave one may change it between calls."""
    own, recipe = (
        Float8Quantizer(torch.ones(1), torch.zeros(1), torch.float8_e5m2),
        DelayedScaling(amax_history_len=4),
    )
    recipe.set_quantizer_factory(lambda role: own if role.tensor_type == "input" else None)
    layer = ottava.nn.Linear(16, 16, recipe=recipe)
    x = torch.randn(4, 16)
    with torch.no_grad():
        first = layer(x)
        own.scale = torch.full((1,), 1e4)
        assert not torch.equal(layer(x), first)
        own.scale = torch.ones(1)
        assert torch.equal(layer(x), first)


def test_a_state_that_was_exchanged_is_looked_at() -> None:
    quantizer = Float8Quantizer(torch.ones(()), torch.zeros(()), torch.float8_e4m3fn)
    x = torch.randn(4, 16)
    quantizer.scale = torch.ones((), dtype=torch.float64)
    with pytest.raises(DTypeError):
        quantizer.quantize(x)
    quantizer.scale = torch.ones((), device="meta")
    with pytest.raises(DeviceError):
        quantizer.quantize(x)
    quantizer.scale, quantizer.amax = torch.ones(()), torch.zeros((), dtype=torch.bfloat16)
    with pytest.raises(DTypeError):
        quantizer.quantize(x)
