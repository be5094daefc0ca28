"""Updates of planted amaxes: scales and histories are those of a scalar slot after every step. (The
kernels of the update have tests of their own in core.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.formats import Format
from ottava.recipes import QuantizerRole
from ottava_delayed import DelayedScaling, DelayedScalingState
from tests.comparing import assert_same
from tests.slot_oracle import FLOAT32_MAX, Slot, divide, largest

ROLES = [QuantizerRole("linear", tensor_type) for tensor_type in ("input", "weight", "grad_output")]


def oldest(history: torch.Tensor) -> torch.Tensor:
    """Writes to what it is given, as a user's function may."""
    entries = history[-1].nan_to_num(0.0, posinf=1.0)
    history.zero_()
    return entries


def oldest_of_numbers(history: list[float]) -> float:
    return {np.inf: 1.0}.get(history[-1], 0.0 if np.isnan(history[-1]) else history[-1])


def halved(
    amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> torch.Tensor:
    """Half of the usual scale for finite amaxes from 1 on, at most twice the last one."""
    usual = torch.div(torch.full_like(amax, fp8_max / 2), amax.nan_to_num(1.0).clamp(1.0, 1e6))
    return scale.copy_(torch.minimum(usual, 2 * scale))


def half_of_numbers(amax: float, scale: float, fp8_max: float, margin: float) -> float:
    usual = divide(fp8_max / 2, 1.0 if np.isnan(amax) else min(max(1.0, amax), 1e6))
    return min(usual, 2 * scale)


AMAXES: dict[str, tuple[Any, Any]] = {
    "max": ("max", largest),
    "most_recent": ("most_recent", lambda history: history[0]),
    "function": (oldest, oldest_of_numbers),
}


def planted(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Amaxes, among them 0, infinity, NaN and such that the scale is infinite."""
    values = np.exp(random.normal(0, 3, shape)).astype(np.float32)
    special = np.array([0, 0, 1e6, np.inf, np.nan, 1e-44], np.float32)
    return np.where(random.random(shape) < 0.25, random.choice(special, shape), values)


@pytest.mark.parametrize(("layers", "length", "margin"), [(1, 1, 0), (1, 3, -2), (3, 5, 3)])
@pytest.mark.parametrize("by_function", [False, True], ids=["", "scales of a function"])
@pytest.mark.parametrize("algorithm", AMAXES)
def test_scales_and_histories(
    algorithm: str, by_function: bool, layers: int, length: int, margin: int
) -> None:
    of_torch, of_numbers = AMAXES[algorithm]
    recipe = DelayedScaling(
        margin=margin,
        amax_history_len=length,
        amax_compute_algo=of_torch,
        scaling_factor_compute_algo=halved if by_function else None,
    )
    scale_of = half_of_numbers if by_function else None
    slots = [
        [Slot(length, m, margin, of_numbers, scale_of) for m in (448.0, 448.0, 57344.0)]
        for _ in range(layers)
    ]
    states = [DelayedScalingState(recipe, ROLES) for _ in range(layers)]
    random = np.random.default_rng(length)
    for step in range(20):
        for state, row, amaxes in zip(states, slots, planted(random, (layers, 3)), strict=True):
            state.amax_history[0] = torch.from_numpy(amaxes)
            for slot, amax in zip(row, amaxes, strict=True):
                slot.history[0] = float(amax)
                slot.update()
        recipe.update_states(states, None)
        for state, row in zip(states, slots, strict=True):
            assert_same(state.scale, np.float32([slot.scale for slot in row]), note=step)
            history = np.float32([slot.history for slot in row]).T
            assert_same(state.amax_history, history, note=step)


# Options -> the scales of inputs, weights and output gradients whose amax is 1.
SCALES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "HYBRID": ({"fp8_format": Format.HYBRID}, [448.0, 448.0, 57344.0]),
    "E4M3": ({"fp8_format": Format.E4M3}, [448.0] * 3),
    "E5M2": ({"fp8_format": Format.E5M2}, [57344.0] * 3),
    "an infinite scale of a function": (
        {"scaling_factor_compute_algo": lambda amax, *_: torch.inf * amax},
        [FLOAT32_MAX] * 3,
    ),
}


@pytest.mark.parametrize("name", SCALES)
def test_the_scales_of_an_amax_of_one(name: str) -> None:
    options, scales = SCALES[name]
    recipe = DelayedScaling(**options)
    state = DelayedScalingState(recipe, ROLES)
    state.amax_history[0] = 1.0
    recipe.update_states([state], None)
    assert state.scale.tolist() == scales


def test_the_defaults_are_those_of_the_specification() -> None:
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (0, Format.HYBRID, 1024)
    assert (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo) == ("max", None)
    assert recipe.reduce_amax is True


@pytest.mark.parametrize(
    "options",
    [
        {"margin": "1"},
        {"margin": float("nan")},
        {"margin": True},
        {"margin": 65},
        {"fp8_format": "HYBRID"},
        {"amax_history_len": 0},
        {"amax_history_len": 2.0},
        {"amax_history_len": True},
        {"amax_compute_algo": "mean"},
        {"scaling_factor_compute_algo": "max"},
        {"reduce_amax": None},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        DelayedScaling(**options)


@pytest.mark.parametrize(
    ("error", "name", "function"),
    [
        (DTypeError, "amax_compute_algo", lambda history: 1.0),
        (ShapeError, "amax_compute_algo", lambda history: history[:1]),
        (DTypeError, "scaling_factor_compute_algo", lambda amax, *_: amax.double()),
        (ShapeError, "scaling_factor_compute_algo", lambda amax, *_: amax.sum()),
    ],
)
def test_functions_are_checked_before_anything_changes(
    error: type[Exception], name: str, function: Any
) -> None:
    recipe = DelayedScaling(amax_history_len=4, **{name: function})
    state = DelayedScalingState(recipe, ROLES)
    state.amax_history[0] = 2.0
    with pytest.raises(error, match=name):
        recipe.update_states([state], None)
    assert state.scale.tolist() == [1.0] * 3
    assert state.amax_history.tolist() == [[2.0] * 3, *([[0.0] * 3] * 3)]
