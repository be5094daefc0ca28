"""Two hundred steps of planted amaxes: scales and histories byte for byte those of a scalar oracle, at every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.formats import Format
from ottava.kernels.backends import use_backend
from ottava.recipes import QuantizerRole
from ottava.recipes.stepping import begin_step
from ottava_delayed import DelayedScaling, DelayedScalingState
from tests.recipes_delayed.slot_oracle import Slot, divide, largest

ROLES = [QuantizerRole("linear", tensor_type) for tensor_type in ("input", "weight", "grad_output")]


def third_largest(history: torch.Tensor) -> torch.Tensor:
    return history.nan_to_num(0.0).sort(0, descending=True).values[min(2, len(history) - 1)]


def halved(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling) -> torch.Tensor:
    """Half of the usual scale, at most twice the last one."""
    usual = torch.div(torch.full_like(amax, fp8_max / 2), amax.nan_to_num(1.0, posinf=torch.inf).clamp(min=1e-30))
    return torch.minimum(usual, 2 * scale)


def oracle_third(history: list[float]) -> float:
    return sorted((0.0 if np.isnan(h) else min(h, float(np.finfo(np.float32).max)) for h in history), reverse=True)[
        min(2, len(history) - 1)
    ]


def oracle_halved(amax: float, scale: float, fp8_max: float, margin: float) -> float:
    usual = divide(fp8_max / 2, 1.0 if np.isnan(amax) else max(float(np.float32(1e-30)), amax))
    return min(usual, 2 * scale)


AMAX: dict[str, tuple[Any, Any]] = {
    "max": ("max", largest),
    "most_recent": ("most_recent", lambda history: history[0]),
    "function": (third_largest, oracle_third),
}


def amaxes(random: np.random.Generator, count: int) -> np.ndarray:
    values = np.exp(random.normal(0, 3, count)).astype(np.float32)
    kind = random.random(count)
    values[kind < 0.10] = 0.0
    values[(kind >= 0.10) & (kind < 0.16)] *= np.float32(1e6)
    values[(kind >= 0.16) & (kind < 0.19)] = np.inf
    values[(kind >= 0.19) & (kind < 0.22)] = np.nan
    values[(kind >= 0.22) & (kind < 0.25)] = np.float32(1e-44)
    return values


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("scale_algorithm", [None, "function"])
@pytest.mark.parametrize("algorithm", AMAX)
@pytest.mark.parametrize("length", [1, 2, 16, 1024])
def test_two_hundred_steps(length: int, algorithm: str, scale_algorithm: str | None, backend: str) -> None:
    margin = {1: 0, 2: 1, 16: 3, 1024: -2}[length]
    mine, theirs = AMAX[algorithm]
    recipe = DelayedScaling(
        margin=margin,
        amax_history_len=length,
        amax_compute_algo=mine,
        scaling_factor_compute_algo=halved if scale_algorithm else None,
    )
    layers = [DelayedScalingState(recipe, ROLES) for _ in range(3)]
    slots = [
        [
            Slot(length, 57344.0 if i == 2 else 448.0, margin, theirs, oracle_halved if scale_algorithm else None)
            for i in range(3)
        ]
        for _ in layers
    ]
    random = np.random.default_rng(length)
    for step in range(200):
        for layer, row in zip(layers, slots, strict=True):
            planted = amaxes(random, 3)
            layer.amax_history[0] = torch.from_numpy(planted)
            for slot, amax in zip(row, planted, strict=True):
                slot.history[0] = float(amax)
                slot.update()
        with use_backend(backend):
            begin_step(layers, None)
        for layer, row in zip(layers, slots, strict=True):
            scales = np.array([slot.scale for slot in row], np.float32)
            same = (layer.scale.numpy() == scales) | (np.isnan(layer.scale.numpy()) & np.isnan(scales))
            assert same.all(), (step, layer.scale, scales)
            history = np.array([slot.history for slot in row], np.float32).T
            got = layer.amax_history.numpy()
            assert ((got == history) | (np.isnan(got) & np.isnan(history))).all(), step


@pytest.mark.parametrize("fp8_format", Format)
def test_formats_by_direction(fp8_format: Format) -> None:
    state = DelayedScalingState(DelayedScaling(fp8_format=fp8_format), ROLES)
    state.amax_history[0] = 1.0
    begin_step([state], None)
    forward = 57344.0 if fp8_format is Format.E5M2 else 448.0
    backward = 448.0 if fp8_format is Format.E4M3 else 57344.0
    assert state.scale.tolist() == [forward, forward, backward]


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (OptionError, {"margin": "1"}),
        (OptionError, {"margin": float("nan")}),
        (OptionError, {"margin": True}),
        (OptionError, {"fp8_format": "HYBRID"}),
        (OptionError, {"amax_history_len": 0}),
        (OptionError, {"amax_history_len": 2.0}),
        (OptionError, {"amax_compute_algo": "mean"}),
        (OptionError, {"scaling_factor_compute_algo": "max"}),
        (OptionError, {"reduce_amax": None}),
    ],
)
def test_options_are_checked(error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        DelayedScaling(**options)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (DTypeError, {"amax_compute_algo": lambda history: 1.0}),
        (ShapeError, {"amax_compute_algo": lambda history: history}),
        (DTypeError, {"scaling_factor_compute_algo": lambda amax, *_: amax.double()}),
        (ShapeError, {"scaling_factor_compute_algo": lambda amax, *_: amax.sum()}),
    ],
)
def test_functions_are_checked_before_anything_changes(error: type[Exception], options: dict[str, Any]) -> None:
    state = DelayedScalingState(DelayedScaling(amax_history_len=4, **options), ROLES)
    state.amax_history[0] = 2.0
    before = {name: value.clone() for name, value in state.state_dict().items()}
    with pytest.raises(error, match=next(iter(options))):
        begin_step([state], None)
    assert all(torch.equal(value, before[name]) for name, value in state.state_dict().items())


def test_slots_that_saw_nothing_stay() -> None:
    state = DelayedScalingState(DelayedScaling(amax_history_len=3), ROLES)
    state.amax_history[:, 1] = torch.tensor([0.0, 5.0, 7.0])
    state.scale[1] = 3.0
    state.amax_history[0, 0] = 1.0
    begin_step([state], None)
    assert state.scale.tolist() == [448.0, 3.0, 1.0]
    assert state.amax_history.tolist() == [[0.0, 0.0, 0.0], [0.0, 5.0, 0.0], [1.0, 7.0, 0.0]]
