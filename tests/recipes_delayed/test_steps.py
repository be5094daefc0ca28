"""When scales are updated, and what is recorded: regions, evaluation, recomputation, microbatches,
calibration."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava import kernels, torch_private
from ottava.kernels import for_layers
from ottava.nn import Linear
from ottava_delayed import DelayedScaling, DelayedScalingState, scaling_statistics

LENGTH = 4


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))


def delayed(**options: Any) -> DelayedScaling:
    return DelayedScaling(amax_history_len=LENGTH, **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(step)) * (1 + 5 * step % 7)


def states(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.clone() for name, value in net.state_dict().items() if "recipe_state" in name
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_uses_the_scales_of_the_steps_before() -> None:
    net = ottava.convert(model(), delayed())
    layer = net[0]
    state = layer.recipe_state
    seen: list[list[float]] = []
    for step in range(12):
        x = batch(step).requires_grad_()
        amaxes = [x.abs().max().item(), layer.weight.abs().max().item()]
        net(x).square().mean().backward()
        past = [entry[0] for entry in seen[-LENGTH:]]
        expected = (
            torch.div(torch.tensor(448.0), torch.tensor(max(past))) if past else torch.tensor(1.0)
        )
        assert state.scale[0] == expected
        # Row 0 holds this step's, the last row that of the step before.
        assert state.amax_history[0, :2].tolist() == amaxes
        assert state.amax_history[0, 2] > 0
        if step:
            assert state.amax_history[-1, :2].tolist() == seen[-1]
        seen.append(amaxes)


def test_one_update_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    net = ottava.convert(model(), delayed())
    calls: list[int] = []
    original = kernels.update_scales
    monkeypatch.setattr(
        kernels,
        "update_scales",
        lambda scales, *a, **k: (calls.append(len(scales)), original(scales, *a, **k)),
    )
    for step in range(3):
        net(batch(step)).sum().backward()
    assert calls == [2, 2, 2]


@pytest.mark.parametrize("how", ["converted", "region", "named", "standalone", "part"])
def test_every_way_to_run_gives_the_same(how: str) -> None:
    """Converted, inside a block with an equal recipe made anew each time, and layers called by
    themselves."""
    expected = ottava.convert(model(), DelayedScaling())
    net = model()
    run: Callable[[torch.Tensor], torch.Tensor] = net
    if how == "converted":
        net = ottava.convert(net, "delayed")
        run = net
    elif how in ("region", "named"):
        ottava.convert(net, "delayed")
        for layer in (net[0], net[2]):
            layer.bind(None)

        def run(x: torch.Tensor) -> torch.Tensor:
            with ottava.autocast("delayed" if how == "named" else DelayedScaling()):
                return net(x)

    elif how == "standalone":
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            Linear(16, 32, recipe="delayed"), torch.nn.Tanh(), Linear(32, 8, recipe="delayed")
        )
        run = net
    else:
        ottava.convert(net, "delayed")

        def run(x: torch.Tensor) -> torch.Tensor:
            # Around the converted module's own forward.
            return net[2](net[1](net[0](x)))

    for step in range(4):
        for module, forward in ((expected, expected), (net, run)):
            module.zero_grad()
            forward(batch(step)).square().mean().backward()
        assert torch.equal(net[0].weight.grad, expected[0].weight.grad), step
        assert torch.equal(net[2].weight.grad, expected[2].weight.grad), step
    assert same(states(net), states(expected))


def test_evaluation_changes_nothing() -> None:
    net = ottava.convert(model(), delayed())
    for step in range(2):
        net(batch(step)).sum().backward()
    before = states(net)
    net.eval()
    with torch.no_grad():
        for step in range(5):
            net(100 * batch(step))
            with ottava.autocast(delayed()):
                net(100 * batch(step))
    assert same(states(net), before)


def test_an_evaluation_outside_of_regions_leaves_layers_in_their_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that evaluate alone would otherwise reduce the layers one by one afterwards."""
    layers = [Linear(16, 16, recipe=delayed()) for _ in range(2)]
    net = torch.nn.Sequential(*layers)
    counts: list[int] = []
    update = DelayedScaling.update_states

    def counting(self: Any, updated: Any, group: Any) -> None:
        counts.append(len(updated))
        update(self, updated, group)

    monkeypatch.setattr(DelayedScaling, "update_states", counting)
    for step in range(3):
        with ottava.autocast():
            net(batch(step)).sum().backward()
        counts.clear()
        with torch.no_grad():
            net(batch(step))
    with ottava.autocast():
        net(batch(3))
    assert counts == [2]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_records_once(use_reentrant: bool) -> None:
    plain = ottava.convert(model(), delayed())
    recomputed = copy.deepcopy(plain)
    for step in range(4):
        x, y = batch(step).requires_grad_(), batch(step).requires_grad_()
        plain(x).square().mean().backward()
        recomputed_forward(recomputed, y, use_reentrant).square().mean().backward()
        assert torch.equal(x.grad, y.grad)
        for p, q in zip(plain.parameters(), recomputed.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        assert same(states(plain), states(recomputed)), step


def recomputed_forward(
    net: torch.nn.Sequential, x: torch.Tensor, use_reentrant: bool
) -> torch.Tensor:
    """The whole net as a region, both layers recomputed in the backward."""
    original: Any = net.__class__

    class Recomputed(original):  # type: ignore[misc]
        def forward(self, input: torch.Tensor) -> Any:
            return checkpoint(
                lambda t: original.forward(self, t), input, use_reentrant=use_reentrant
            )

    net.__class__ = Recomputed
    try:
        return net(x)
    finally:
        net.__class__ = original


def test_microbatches_quantize_the_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(16, 8, recipe=delayed())
    casts: list[tuple[int, ...]] = []
    cast_slot = for_layers.cast_slot

    def counting(x: torch.Tensor, **options: Any) -> Any:
        casts.append(tuple(x.shape))
        return cast_slot(x, **options)

    monkeypatch.setattr(for_layers, "cast_slot", counting)
    for first in (True, False, False):
        layer(batch(3), is_first_microbatch=first).sum().backward()
    assert casts.count((8, 16)) == 1
    assert casts.count((12, 16)) == 3
    # The weight's slot moved with the one step that saw it, the input's with each.
    assert (layer.recipe_state.amax_history[1:, 1] > 0).sum() == 1
    assert (layer.recipe_state.amax_history[1:, 0] > 0).sum() == 2


def test_double_use_and_unused_layers() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(10 * self.used(x))

    net = ottava.convert(Twice(), delayed())
    untouched = states(net.unused)
    for step in range(3):
        net(batch(step)[:, :8]).sum().backward()
        history = net.used.recipe_state.amax_history
        assert (history[1:, 0] > 0).sum() == step
        # The larger of the two inputs is what is kept.
        assert history[0, 0] > batch(step)[:, :8].abs().max()
    assert same(states(net.unused), untouched)


def test_nested_and_neighbouring_regions() -> None:
    outer, inner = DelayedScaling(amax_history_len=3), DelayedScaling(amax_history_len=5)
    a, b = Linear(8, 8), Linear(8, 8)
    for step in range(3):
        with ottava.autocast(outer):
            x = a(batch(step)[:, :8])
            with ottava.autocast(inner):
                x = b(x)
            with ottava.autocast(outer):
                x = a(x)
            with ottava.autocast():
                x = a(x)
        x.sum().backward()
        assert (a.recipe_state.amax_history[1:, 0] > 0).sum() == min(step, 2)
        assert (b.recipe_state.amax_history[1:, 0] > 0).sum() == step


def test_an_error_in_the_forward_leaves_the_region() -> None:
    net = ottava.convert(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), delayed()
    )
    with pytest.raises(ottava.errors.ShapeError):
        net(torch.ones(2, 9))
    net(torch.ones(2, 8)).sum().backward()
    net(torch.ones(2, 8)).sum().backward()
    assert (net[1].recipe_state.amax_history[1:, 0] > 0).sum() == 1


def test_switching_off_and_on_keeps_the_state() -> None:
    net = ottava.convert(model(), delayed())
    net(batch(0)).sum().backward()
    before = states(net)
    with ottava.autocast(enabled=False):
        net(batch(1)).sum().backward()
    assert same(states(net), before)
    net(batch(2)).sum().backward()
    assert net[0].recipe_state.scale[0] == torch.div(torch.tensor(448.0), batch(0).abs().max())


def test_another_recipe_for_a_while_keeps_the_state() -> None:
    class Plain(ottava.Recipe):
        name = "plain"

        def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
            from ottava_delayed import Float8Quantizer

            return Float8Quantizer(torch.ones(1), None, torch.float8_e4m3fn)

    net, plain = ottava.convert(model(), delayed()), Plain()
    net(batch(0)).sum().backward()
    before = states(net)
    with ottava.autocast(plain):
        net(batch(1)).sum().backward()
    assert same(states(net), before)
    net(batch(2)).sum().backward()
    assert net[0].recipe_state.amax_history[-1, 0] == batch(0).abs().max()


def test_another_configuration_starts_afresh_and_says_so() -> None:
    net = ottava.convert(model(), delayed())
    net(batch(0)).sum().backward()
    with (
        ottava.autocast(DelayedScaling(amax_history_len=9)),
        pytest.warns(UserWarning, match="is discarded"),
    ):
        net(batch(1)).sum().backward()
    assert net[0].recipe_state.amax_history.shape == (9, 3)


def test_calibration() -> None:
    net = ottava.convert(model(), delayed())
    reference = model()
    with torch.no_grad():
        for step in range(3):
            with ottava.autocast(calibrating=True):
                assert torch.equal(net(batch(step)), reference(batch(step)))
    state = net[0].recipe_state
    largest = max(batch(step).abs().max() for step in range(3))
    assert state.scale[0] == torch.div(torch.tensor(448.0), largest)
    assert state.scale[1] == torch.div(torch.tensor(448.0), reference[0].weight.abs().max())
    assert state.scale[2] == 1.0
    assert state.amax_history[0].tolist() == [0.0, 0.0, 0.0]


def test_a_state_that_is_loaded_is_no_backward_pass(recwarn: pytest.WarningsRecorder) -> None:
    layer, x = Linear(16, 16), torch.randn(4, 16)
    with ottava.autocast(DelayedScaling()):
        layer(x)
        layer.load_state_dict(layer.state_dict())
        layer(x)
    assert not recwarn.list


def test_calibration_with_gradients_is_no_forward_pass_of_a_step(
    recwarn: pytest.WarningsRecorder,
) -> None:
    net = ottava.convert(model(), delayed())
    net(batch(0)).sum().backward()
    for load in (False, True):
        if load:
            net.load_state_dict(net.state_dict())
        with ottava.autocast(calibrating=True):
            net(batch(1))
    assert not recwarn


def test_evaluation_after_calibration_is_close() -> None:
    reference, x = model(), batch(2) * 500
    nets = [ottava.convert(model(), delayed()).eval() for _ in range(2)]
    with torch.no_grad():
        with ottava.autocast(calibrating=True):
            nets[0](x)
        errors = [(net[0](x) - reference[0](x)).abs().max() for net in nets]
    # With the scale of a fresh state most of the inputs are clamped.
    assert errors[0] * 10 < errors[1]


def test_calibration_overwrites() -> None:
    net = ottava.convert(model(), delayed())
    with ottava.autocast(calibrating=True):
        net(batch(5))
        net(batch(0))
    assert net[0].recipe_state.amax_history[-1, 0] == batch(0).abs().max()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_observed_is_recomputed_in_high_precision(use_reentrant: bool) -> None:
    net, reference, x = ottava.convert(model(), delayed()), model(), batch(0).requires_grad_()
    with ottava.autocast(calibrating=True):
        y = checkpoint(net, x, use_reentrant=use_reentrant)
    y.sum().backward()
    reference(batch(0)).sum().backward()
    assert torch.equal(net[0].weight.grad, reference[0].weight.grad)


def test_saturation_is_counted() -> None:
    net = ottava.convert(model(), DelayedScaling(amax_history_len=2))
    for _ in range(3):
        net(batch(0)).sum().backward()
    quiet = scaling_statistics(net)["0"]["input"]
    spike = batch(0)
    spike[3, :5] *= 1000
    net(spike).sum().backward()
    loud = scaling_statistics(net)["0"]["input"]
    assert quiet.scale == 448.0 / torch.tensor(quiet.amax)
    expected = int((spike.abs() * loud.scale > 448).sum())
    assert loud.saturated - quiet.saturated == expected > 0
    assert loud.largest_amax == spike.abs().max()
    net(batch(0)).sum().backward()
    assert scaling_statistics(net)["0"]["input"].scale == torch.div(
        torch.tensor(448.0), spike.abs().max()
    )


def test_margin_leaves_room() -> None:
    net = ottava.convert(model(), delayed(margin=2))
    for _ in range(2):
        net(batch(0)).sum().backward()
    net(3 * batch(0)).sum().backward()
    assert scaling_statistics(net)["0"]["input"].saturated == 0


def test_primary_weights_start_with_their_own_scale() -> None:
    with ottava.quantized_model_init(delayed()):
        layer = Linear(16, 8, recipe=delayed())
    initial = layer.weight.get_high_precision_init_val()
    assert layer.weight._scale_inv == torch.div(
        torch.tensor(1.0), torch.div(torch.tensor(448.0), initial.abs().max())
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        layer(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (layer.recipe_state.amax_history[1:, 1] > 0).sum() == 2
    assert layer.weight._quantizer.scale.data_ptr() == layer.recipe_state.scale[1].data_ptr()
    copied = copy.deepcopy(layer)
    copied(batch(0)).sum().backward()
    assert copied.weight._quantizer.scale.data_ptr() == copied.recipe_state.scale[1].data_ptr()


def test_layers_keep_float32_state_in_a_bfloat16_model() -> None:
    net = ottava.convert(model(), delayed()).bfloat16()
    net(batch(0).bfloat16()).sum().backward()
    state = net[0].recipe_state
    assert isinstance(state, DelayedScalingState)
    assert {state.scale.dtype, state.amax_history.dtype} == {torch.float32}
    assert state.saturated.dtype == torch.int64
    assert net[0].weight.dtype == torch.bfloat16


def test_made_on_meta_and_filled() -> None:
    net = ottava.convert(
        torch.nn.Sequential(torch.nn.Linear(16, 8, device="meta")), delayed()
    ).to_empty(device="cpu")
    net[0].reset_parameters()
    for step in range(2):
        net(batch(step)).sum().backward()
    assert net[0].recipe_state.scale[0] == torch.div(torch.tensor(448.0), batch(0).abs().max())


def test_no_warnings_in_ordinary_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = ottava.convert(model(), delayed())
        net(batch(0)).sum().backward()
        repr(net)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_where_torch_tells_no_backward_pass(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, use_reentrant: bool
) -> None:
    """In a region that stays open it changes nothing; without one it begins a step of its own,
    unless the checkpoint's forward pass, without gradients, has begun that."""

    def stepped(around: bool) -> tuple[list[torch.Tensor], list[bool]]:
        """The gradients of the last step, and for each whether the recomputed layer's scales stayed
        what they were."""
        kept = []
        net = ottava.convert(model(), delayed())
        for step in range(3):
            net.zero_grad()
            with ottava.autocast(enabled=True) if around else contextlib.nullcontext():
                hidden = checkpoint(
                    net[0], batch(step).requires_grad_(), use_reentrant=use_reentrant
                )
                loss = net[2](net[1](hidden)).square().mean()
                scale = net[0].recipe_state.scale.clone()
                loss.backward()
                kept.append(torch.equal(net[0].recipe_state.scale, scale))
        return [p.grad for p in net.parameters() if p.grad is not None], kept

    want, kept = stepped(around=True)
    assert kept == [True] * 3 == stepped(around=False)[1]
    lacking = {"graph_task_id": torch_private.Fallbacks.graph_task_id, "KNOWS_BACKWARD": False}
    for name, place in list(sys.modules.items()):
        for of_torch in lacking.keys() & vars(place).keys() if name.startswith("ottava") else ():
            monkeypatch.setattr(place, of_torch, lacking[of_torch])
    got, kept = stepped(around=True)
    assert kept == [True] * 3
    assert all(map(torch.equal, got, want))
    assert (False in stepped(around=False)[1]) is not use_reentrant
    assert not [warning for warning in recwarn if "region" in str(warning.message)]
