"""Steps whose region is inside the graph, or around it, have the bytes of eager ones. (The
conformance kit compiles converted models.)"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.distributed import quantize_master_weights
from ottava_delayed import DelayedScaling
from tests.comparing import assert_same

# The process that compiles for the conformance kit has imported the compiler.
pytestmark = pytest.mark.xdist_group("ranks")
RECIPE = DelayedScaling(amax_history_len=3)


def compiled(run: Any) -> Any:
    return torch.compile(run, fullgraph=True, backend="aot_eager")


def in_a_region(call: Any) -> Any:
    def run(x: torch.Tensor) -> Any:
        with ottava.autocast(RECIPE):
            return call(x)

    return run


def recomputed(call: Any) -> Any:
    return lambda x: checkpoint(call, x, use_reentrant=False)


def bytes_of(net: Any) -> list[torch.Tensor]:
    """The state of a model: inner tensors of the quantized weights, and plain tensors."""
    tensors: list[torch.Tensor] = []
    for value in net.state_dict().values():
        inner = value.inner_list() if isinstance(value, ottava.QuantizedTensor) else [value]
        # Clones, because a region of another model with the recipe begins its next step.
        tensors += [tensor.clone() for tensor in inner if tensor is not None]
    return tensors


def train(net: Any, run: Any) -> list[torch.Tensor]:
    """Outputs and gradients of some steps, and the state at the end of each."""
    optimizer, results = torch.optim.SGD(net.parameters(), lr=0.5), []
    for step in range(4):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(24, 32, generator=random, dtype=net[0].weight.dtype) * (step + 1)
        y = run(x.requires_grad_())
        y.square().mean().backward()
        results += [y, x.grad, *(parameter.grad.clone() for parameter in net.parameters())]
        # Before the optimizer, whose writes would give this weight the quantizer of its slot, too.
        kept = [w for w in net.parameters() if isinstance(w, ottava.QuantizedTensor)][-1:]
        for factor in (4.0, 0.25):
            quantize_master_weights(kept, [factor * weight.dequantize() for weight in kept], None)
        optimizer.step()
        optimizer.zero_grad()
        results += bytes_of(net)
    return results


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_have_the_bytes_of_eager_ones(inside: bool) -> None:
    """With the region inside of what is compiled, or with a region and a checkpoint around it."""
    torch._dynamo.reset()
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()).bfloat16()
    net = ottava.convert(net, RECIPE)
    twin: Any = copy.deepcopy(net)
    eager = in_a_region(net if inside else recomputed(net))
    traced = compiled(in_a_region(twin)) if inside else in_a_region(recomputed(compiled(twin)))
    assert_same(train(twin, traced), train(net, eager))
    assert (twin[0].recipe_state.scale != 1).all()


@pytest.mark.parametrize("written", [False, True])
def test_quantized_weights_are_recorded_from_the_first_step(written: bool) -> None:
    """Compiled passes cannot give a weight the quantizer of its slot."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with ottava.quantized_model_init(RECIPE):
        layers = [ottava.nn.Linear(32, 32, recipe=RECIPE) for _ in range(2)]
    made = ottava.convert(torch.nn.Sequential(*layers), RECIPE)
    if written:
        with torch.no_grad():
            for layer in layers:
                layer.weight.mul_(3)
                assert not layer.recipe_state.amax_history.any()
    net, twin = copy.deepcopy(made), copy.deepcopy(made)
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = train(twin, compiled(twin))
    assert_same(results, train(net, net))
    assert all((layer.recipe_state.scale != 1).all() for layer in twin)


def test_copies_record_their_weights_themselves() -> None:
    with ottava.quantized_model_init(RECIPE):
        layer = ottava.nn.Linear(32, 32, recipe=RECIPE)
    layer(torch.ones(1, 32))
    before = layer.recipe_state.amax_history.clone()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.mul_(100)
    assert_same(layer.recipe_state.amax_history, before)


def test_a_layer_without_a_state_is_named() -> None:
    torch._dynamo.reset()
    run = compiled(in_a_region(ottava.nn.Linear(16, 8)))
    with pytest.raises(Exception, match=r"UsageError|compiled code cannot make one"):
        run(torch.randn(2, 16))
