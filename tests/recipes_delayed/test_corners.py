"""Where a step could silently fail to begin, or a state silently be lost."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.nn import Linear
from ottava.recipes import stepping
from ottava_delayed import DelayedScaling, Float8Quantizer, scaling_statistics


def delayed(**options: Any) -> DelayedScaling:
    return DelayedScaling(amax_history_len=4, **options)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))


def batch(step: int) -> torch.Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(step)) * (1 + 5 * step % 7)


def scale_for(*amaxes: torch.Tensor) -> torch.Tensor:
    return torch.div(torch.tensor(448.0), torch.stack(amaxes).max())


def test_the_state_lies_where_the_weight_does() -> None:
    net = ottava.convert(model().to("meta"), delayed())
    assert all(buffer.is_meta for buffer in net.buffers())
    assert net(torch.empty(3, 16, device="meta")).shape == (3, 16)


@pytest.mark.parametrize("assign", [False, True])
def test_a_meta_model_is_filled_from_a_checkpoint(assign: bool) -> None:
    net = ottava.convert(model(), delayed())
    for step in range(2):
        net(batch(step)).sum().backward()
    other = ottava.convert(model().to("meta"), delayed())
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=assign)
    for module in (net, other):
        module(batch(3)).sum().backward()
    assert torch.equal(net[0].recipe_state.scale, other[0].recipe_state.scale)
    assert torch.equal(net[0].recipe_state.amax_history, other[0].recipe_state.amax_history)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_whole_converted_model(use_reentrant: bool) -> None:
    plain, recomputed = ottava.convert(model(), delayed()), ottava.convert(model(), delayed())
    for step in range(4):
        plain(batch(step).requires_grad_()).sum().backward()
        checkpoint(recomputed, batch(step).requires_grad_(), use_reentrant=use_reentrant).sum().backward()
        for mine, theirs in zip(plain.buffers(), recomputed.buffers(), strict=True):
            assert torch.equal(mine, theirs), step


def test_a_block_inside_a_disabled_one_begins_steps() -> None:
    layer, recipe = Linear(16, 16), delayed()
    for step in range(3):
        with ottava.autocast(recipe, enabled=False), ottava.autocast(recipe):
            layer(batch(step)).sum().backward()
    assert layer.recipe_state.scale[0] == scale_for(batch(0).abs().max(), batch(1).abs().max())


def test_a_block_entered_without_gradients_has_not_begun() -> None:
    layer, recipe = Linear(16, 16), delayed()
    for step in range(3):
        with torch.no_grad(), ottava.autocast(recipe), torch.enable_grad(), ottava.autocast(recipe):
            layer(batch(step)).sum().backward()
    assert layer.recipe_state.scale[0] == scale_for(batch(0).abs().max(), batch(1).abs().max())


def test_no_grad_alone_is_an_evaluation() -> None:
    net = ottava.convert(model(), delayed())
    net(batch(0)).sum().backward()
    before = [buffer.clone() for buffer in net.buffers()]
    with torch.no_grad():
        net(1e4 * batch(1))
    assert all(torch.equal(mine, old) for mine, old in zip(net.buffers(), before, strict=True))


def test_converting_again_keeps_what_was_learnt() -> None:
    net = ottava.convert(model(), delayed())
    for step in range(2):
        net(batch(step)).sum().backward()
    before = net[0].recipe_state.scale.clone()
    ottava.convert(net, delayed())
    net[0].bind(None)
    net[0].bind(delayed())
    assert torch.equal(net[0].recipe_state.scale, before)
    unbound = torch.nn.Sequential(Linear(16, 16))
    with ottava.autocast(delayed(), calibrating=True):
        unbound(batch(1))
    ottava.convert(unbound, delayed())
    assert unbound[0].recipe_state.scale[0] == scale_for(batch(1).abs().max())


def test_loaded_before_a_recipe_is_bound() -> None:
    net = ottava.convert(model(), delayed())
    for step in range(2):
        net(batch(step)).sum().backward()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    other = torch.nn.Sequential(Linear(16, 16), torch.nn.Tanh(), Linear(16, 16))
    other.load_state_dict(state, strict=True)
    assert other.state_dict().keys() == state.keys()
    ottava.convert(other, delayed())
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_a_factory_goes_over_the_recipe() -> None:
    own = Float8Quantizer(torch.tensor([8.0]), torch.zeros(1), torch.float8_e5m2)
    recipe = delayed()
    recipe.set_quantizer_factory(lambda role: own if role.tensor_type == "input" else None)
    net = ottava.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), recipe)
    net(batch(0)).sum().backward()
    assert own.amax == batch(0).abs().max()
    assert scaling_statistics(net)["0"]["input"].largest_amax == 0.0
    assert scaling_statistics(net)["0"]["weight"].largest_amax > 0.0


def test_a_converted_model_outside_the_tree_of_another() -> None:
    class Student(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 16)
            self.friends = [ottava.convert(model(), delayed())]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.friends[0](x)

    net = ottava.convert(Student(), delayed())
    for step in range(2):
        net(batch(step)).sum().backward()
    for layer in (net.layer, net.friends[0][0]):
        assert layer.recipe_state.scale[0] == scale_for(batch(0).abs().max())


def test_a_converted_part_of_a_converted_model_begins_once() -> None:
    inner = ottava.convert(model(), delayed())
    net = ottava.convert(torch.nn.Sequential(inner, inner), delayed())
    for step in range(3):
        net(batch(step)).sum().backward()
        assert (inner[0].recipe_state.amax_history[1:, 0] > 0).sum() == step


def test_models_trained_in_turns() -> None:
    nets = [ottava.convert(model(), delayed()) for _ in range(2)]
    alone = ottava.convert(model(), delayed())
    for step in range(4):
        losses = [net(batch(step)).sum() for net in nets]
        for loss in losses:
            loss.backward()
        alone(batch(step)).sum().backward()
        for net in nets:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(net.buffers(), alone.buffers(), strict=True))


def test_blocks_of_recipes_that_are_gone_are_forgotten() -> None:
    layer = Linear(16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(30):
            recipe = delayed(amax_compute_algo=lambda history: history[0])
            with ottava.autocast(recipe):
                layer(batch(step)).sum().backward()
    del layer
    before = len(stepping._cohorts)
    stepping.cohort_for(delayed(margin=5), None)
    assert len(stepping._cohorts) <= before
    assert (
        sum(1 for recipe, _, _ in stepping._cohorts if recipe is not None and callable(recipe.amax_compute_algo)) == 0
    )


def test_a_block_around_several_steps_is_noticed() -> None:
    net, recipe = ottava.convert(model(), delayed()), delayed()
    with ottava.autocast(recipe):
        net(batch(0)).sum().backward()
        with pytest.warns(UserWarning, match="enter it anew for every step"):
            net(batch(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            with ottava.autocast(recipe):
                net(batch(step)).sum().backward()
