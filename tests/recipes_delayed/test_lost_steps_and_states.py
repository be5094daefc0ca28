"""Where a step could silently fail to begin, or a state silently be lost."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ottava
from ottava.nn import Linear
from ottava.nn import call as calls
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
    other.load_state_dict(
        {name: value.clone() for name, value in net.state_dict().items()}, assign=assign
    )
    for module in (net, other):
        module(batch(3)).sum().backward()
    assert torch.equal(net[0].recipe_state.scale, other[0].recipe_state.scale)
    assert torch.equal(net[0].recipe_state.amax_history, other[0].recipe_state.amax_history)


def normalized() -> torch.nn.Sequential:
    """No layer of it takes what the model takes."""
    return torch.nn.Sequential(torch.nn.LayerNorm(16), *model())


@pytest.mark.parametrize("made", [model, normalized])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_whole_converted_model(
    use_reentrant: bool, made: Callable[[], torch.nn.Module]
) -> None:
    plain, recomputed = ottava.convert(made(), delayed()), ottava.convert(made(), delayed())
    for step in range(4):
        plain(batch(step).requires_grad_()).sum().backward()
        checkpoint(
            recomputed, batch(step).requires_grad_(), use_reentrant=use_reentrant
        ).sum().backward()
        for mine, theirs in zip(plain.buffers(), recomputed.buffers(), strict=True):
            assert torch.equal(mine, theirs), step


@pytest.mark.parametrize("inside", ["a block", "a converted model", "a layer"])
def test_inside_a_reentrant_checkpoint(inside: str) -> None:
    """Gradients are off there; a step begins all the same at what takes a tensor that the
    checkpoint takes."""

    def trained(use_reentrant: bool | None) -> list[torch.Tensor]:
        net = ottava.convert(model(), delayed())[:1] if inside == "a layer" else model()
        if inside == "a converted model":
            net = ottava.convert(net, delayed())

        def run(x: torch.Tensor) -> torch.Tensor:
            with ottava.autocast(delayed()) if inside == "a block" else contextlib.nullcontext():
                return 1.0 * net(x)

        made = []
        for step in range(3):
            x = batch(step).requires_grad_()
            y = run(x) if use_reentrant is None else checkpoint(run, x, use_reentrant=use_reentrant)
            y.square().mean().backward()
            made += [x.grad, *(value.clone() for value in net.state_dict().values())]
        return made

    with warnings.catch_warnings(action="ignore"):
        plain = trained(None)
        assert all(map(torch.equal, plain, trained(use_reentrant=True)))
        assert all(map(torch.equal, plain, trained(use_reentrant=False)))


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


@pytest.mark.parametrize("refused", ["shape", "dtype", "main_grad", "microbatch"])
def test_a_layer_that_refuses_its_operands_has_begun_no_step(refused: str) -> None:
    layer = Linear(16, 16, recipe=delayed())
    layer(batch(0)).sum().backward()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    operands: dict[str, Any] = {"input": batch(1)}
    if refused == "shape":
        operands["input"] = torch.randn(12, 32)
    elif refused == "dtype":
        operands["input"] = batch(1).double()
    elif refused == "main_grad":
        layer.fuse_wgrad_accumulation = True
    else:
        operands["is_first_microbatch"] = "yes"
    with pytest.raises(ottava.errors.OttavaError):
        layer(**operands)
    after = layer.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    layer.fuse_wgrad_accumulation = False
    layer(batch(1))
    assert any(not torch.equal(value, after[name]) for name, value in before.items())


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
            assert all(
                torch.equal(mine, theirs)
                for mine, theirs in zip(net.buffers(), alone.buffers(), strict=True)
            )


def test_blocks_of_recipes_that_are_gone_are_forgotten() -> None:
    layer = Linear(16, 16)
    recipes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(30):
            recipe = delayed(amax_compute_algo=lambda history: history[0])
            recipes.append(weakref.ref(recipe))
            with ottava.autocast(recipe):
                layer(batch(step)).sum().backward()
    assert sum(known() is not None for known in recipes) < 5
    del layer, recipe
    gc.collect()
    # Blocks of another recipe make room.
    with warnings.catch_warnings(action="ignore"), ottava.autocast(delayed(margin=5)):
        pass
    assert not [known for known in recipes if known() is not None]


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


def test_what_is_written_to_a_primary_weight_fits() -> None:
    with ottava.quantized_model_init(delayed()):
        layer = Linear(16, 16, recipe=delayed())
    layer(batch(0)).sum().backward()
    large = 50 * torch.randn(16, 16)
    with torch.no_grad():
        layer.weight.copy_(large)
        assert torch.allclose(layer.weight.dequantize(), large, atol=large.abs().max().item() / 16)
        torch.nn.init.constant_(layer.weight, 7.0)
        assert torch.allclose(layer.weight.dequantize(), torch.full((16, 16), 7.0), rtol=0.04)
    layer.load_state_dict({"weight": large, "bias": torch.zeros(16)}, strict=False)
    assert torch.allclose(layer.weight.dequantize(), large, atol=large.abs().max().item() / 16)
    # A scale that is large enough stays what it was.
    scale = layer.recipe_state.scale[1].clone()
    with torch.no_grad():
        layer.weight.copy_(0.001 * layer.weight.get_high_precision_init_val())
    assert layer.weight._scale_inv == torch.div(torch.tensor(1.0), scale)


def test_a_function_that_gives_infinity() -> None:
    recipe = delayed(scaling_factor_compute_algo=lambda amax, *_: torch.full_like(amax, torch.inf))
    net = ottava.convert(model(), recipe)
    for step in range(2):
        net(batch(step)).sum().backward()
    assert (net[0].recipe_state.scale == torch.finfo(torch.float32).max).all()


@pytest.mark.parametrize("change", ["load", "dtype", "recipe", "bind"])
def test_a_kept_weight_does_not_outlive_what_it_was_made_of(change: str) -> None:
    layer, x = Linear(16, 16, recipe=delayed()), batch(0)
    layer(x, is_first_microbatch=True)
    if change == "load":
        layer.load_state_dict(
            {"weight": torch.zeros(16, 16), "bias": torch.zeros(16)}, strict=False
        )
        assert not layer(x, is_first_microbatch=False).any()
    elif change == "dtype":
        layer.bfloat16()
        assert layer(x.bfloat16(), is_first_microbatch=False).dtype == torch.bfloat16
    else:
        other = DelayedScaling(fp8_format=ottava.Format.E5M2)
        if change == "bind":
            layer.bind(other)
            layer(x, is_first_microbatch=False)
        else:
            with pytest.warns(UserWarning, match="discarded"), ottava.autocast(other):
                layer(x, is_first_microbatch=False)
        assert layer._binding.microbatch_weight.storage._fp8_dtype == torch.float8_e5m2


@pytest.mark.filterwarnings("ignore:.*in one region")
def test_recomputation_uses_the_kept_weight() -> None:
    layer, other = Linear(16, 16, recipe=delayed()), Linear(16, 16, recipe=delayed())
    other.load_state_dict(layer.state_dict())
    with ottava.autocast():
        for module in (layer, other):
            for step, first in ((0, True), (1, False)):
                x = batch(step).requires_grad_()
                if module is layer:
                    module(x, first).sum().backward()
                else:
                    checkpoint(module, x, first, use_reentrant=False).sum().backward()
    assert torch.equal(layer.weight.grad, other.weight.grad)
    assert torch.equal(layer.recipe_state.amax_history, other.recipe_state.amax_history)


def selective() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


def hooked(function: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return function(x)


PLAIN, REENTRANT = (functools.partial(checkpoint, use_reentrant=kind) for kind in (False, True))
#: What is around a layer, and around that with what follows it.
RECOMPUTED: dict[str, tuple[Any, Any]] = {
    "plain": (PLAIN, None),
    "reentrant": (REENTRANT, None),
    "plain in plain": (PLAIN, PLAIN),
    "plain in reentrant": (PLAIN, REENTRANT),
    "reentrant in plain": (REENTRANT, PLAIN),
    "reentrant in reentrant": (REENTRANT, REENTRANT),
    "hooks in plain": (hooked, PLAIN),
    "hooks in reentrant": (hooked, REENTRANT),
    "plain in hooks": (PLAIN, hooked),
    "reentrant in hooks": (REENTRANT, hooked),
    "selective": (functools.partial(PLAIN, context_fn=selective), None),
    "plain without an early stop": (functools.partial(PLAIN, early_stop=False), PLAIN),
}


class Sine(torch.autograd.Function):
    """What follows a layer, in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos()


def seen(inner: Any, outer: Any, after: Any = torch.sin) -> dict[str, torch.Tensor]:
    """What a layer has seen in some steps."""
    torch.manual_seed(0)
    layer, recipe = Linear(16, 16), delayed()

    def followed(x: torch.Tensor) -> Any:
        return after(layer(x) if inner is None else inner(layer, x))

    for step in range(4):
        x = (10.0**step * batch(0)).requires_grad_()
        with ottava.autocast(recipe):
            y = followed(x) if outer is None else outer(followed, x)
        y.sum().backward()
    return dict(layer.named_buffers())


@pytest.mark.parametrize("how", RECOMPUTED)
def test_recomputation_counts_what_is_clamped_once(how: str) -> None:
    plain, recomputed = seen(None, None), seen(*RECOMPUTED[how])
    assert plain["recipe_state.saturated"][0] > 0
    assert all(torch.equal(value, recomputed[name]) for name, value in plain.items())


@pytest.mark.parametrize("outer", [PLAIN, REENTRANT], ids=["plain", "reentrant"])
@pytest.mark.parametrize("inner", [None, hooked], ids=["itself", "hooks"])
def test_recomputation_for_a_function_in_python_counts_once(inner: Any, outer: Any) -> None:
    """Autograd's node is of a class in Python then, as that of a reentrant checkpoint is: of a
    user's, or of Ottava."""
    layer: Any = Linear(16, 16, recipe=delayed())
    after = [Sine.apply] * 2 if inner is None else [layer, copy.deepcopy(layer)]
    plain, recomputed = seen(None, None, after[0]), seen(inner, outer, after[1])
    assert plain["recipe_state.saturated"][0] > 0
    assert all(torch.equal(value, recomputed[name]) for name, value in plain.items())


def test_recomputation_where_torch_does_not_tell_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is seen, and what is clamped may count twice."""
    monkeypatch.setattr(calls, "repeats_forward", lambda: False)
    plain = seen(None, None)
    for how in RECOMPUTED:
        recomputed = seen(*RECOMPUTED[how])
        for name in ("scale", "amax_history"):
            assert torch.equal(plain[f"recipe_state.{name}"], recomputed[f"recipe_state.{name}"]), (
                how
            )


def test_a_factory_set_later_is_noticed() -> None:
    recipe = delayed()
    net = ottava.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), recipe)
    net(batch(0)).sum().backward()
    own = Float8Quantizer(torch.tensor([8.0]), torch.zeros(1), torch.float8_e5m2)
    recipe.set_quantizer_factory(lambda role: own if role.tensor_type == "input" else None)
    with pytest.warns(UserWarning, match="discarded"):
        net(batch(1))
    assert own.amax == batch(1).abs().max()


def test_reset_forgets_everything() -> None:
    net = ottava.convert(model(), delayed())
    fresh = [buffer.clone() for buffer in net.buffers()]
    for step in range(3):
        net(1000 * batch(step)).sum().backward()
    for layer in (net[0], net[2]):
        layer.reset_parameters()
    assert all(torch.equal(mine, old) for mine, old in zip(net.buffers(), fresh, strict=True))


def test_statistics_of_the_step_before() -> None:
    net = ottava.convert(model(), delayed())
    for step in (3, 0, 1):
        net(batch(step)).sum().backward()
    seen = scaling_statistics(net)["0"]["input"]
    assert seen.amax == batch(0).abs().max()
    assert seen.largest_amax == max(batch(step).abs().max() for step in (3, 0, 1))


def test_a_calibration_that_fails_updates_nothing() -> None:
    net = ottava.convert(model(), delayed())
    with pytest.raises(ValueError, match="stop"), ottava.autocast(calibrating=True):
        net(batch(0))
        raise ValueError("stop")
    assert (net[0].recipe_state.scale == 1).all()
