"""Steps of planted amaxes: scales and histories byte for byte those of a scalar oracle, after every
step."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.formats import Format
from ottava.kernels.backends import use_backend
from ottava.recipes import QuantizerRole
from ottava.recipes.step import update_states
from ottava_delayed import DelayedScaling, DelayedScalingState
from tests.recipes_delayed.slot_oracle import Slot, divide, largest

ROLES = [QuantizerRole("linear", tensor_type) for tensor_type in ("input", "weight", "grad_output")]


def third_largest(history: torch.Tensor) -> torch.Tensor:
    return history.nan_to_num(0.0).sort(0, descending=True).values[min(2, len(history) - 1)]


def halved(
    amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> torch.Tensor:
    """Half of the usual scale, at most twice the last one."""
    usual = torch.div(
        torch.full_like(amax, fp8_max / 2), amax.nan_to_num(1.0, posinf=torch.inf).clamp(min=1e-30)
    )
    return torch.minimum(usual, 2 * scale)


def oracle_third(history: list[float]) -> float:
    return sorted(
        (0.0 if np.isnan(h) else min(h, float(np.finfo(np.float32).max)) for h in history),
        reverse=True,
    )[min(2, len(history) - 1)]


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


MARGIN = {1: 0, 2: 1, 16: 3, 1024: -2}


def check_steps(length: int, algorithm: str, by_function: bool, steps: int) -> None:
    """Every backend against the oracle, in scales and histories, after every step."""
    mine, theirs = AMAX[algorithm]
    recipe = DelayedScaling(
        margin=MARGIN[length],
        amax_history_len=length,
        amax_compute_algo=mine,
        scaling_factor_compute_algo=halved if by_function else None,
    )
    layers = {
        backend: [DelayedScalingState(recipe, ROLES) for _ in range(3)]
        for backend in ("cpu", "reference")
    }
    scale_of = oracle_halved if by_function else None
    slots = [
        [
            Slot(length, 57344.0 if i == 2 else 448.0, MARGIN[length], theirs, scale_of)
            for i in range(3)
        ]
        for _ in range(3)
    ]
    random = np.random.default_rng(length)
    for step in range(steps):
        planted = [amaxes(random, 3) for _ in slots]
        for row, values in zip(slots, planted, strict=True):
            for slot, amax in zip(row, values, strict=True):
                slot.history[0] = float(amax)
                slot.update()
        scales = np.array([[slot.scale for slot in row] for row in slots], np.float32)
        histories = np.array(
            [[slot.history for slot in row] for row in slots], np.float32
        ).swapaxes(1, 2)
        for backend, states in layers.items():
            for state, values in zip(states, planted, strict=True):
                state.amax_history[0] = torch.from_numpy(values)
            with use_backend(backend):
                update_states(states, None)
            # NaN equals NaN; the message has the elements that differ.
            words = f"{backend}, step {step}"
            np.testing.assert_array_equal(
                np.stack([s.scale.numpy() for s in states]), scales, words
            )
            np.testing.assert_array_equal(
                np.stack([s.amax_history.numpy() for s in states]), histories, words
            )


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("algorithm", AMAX)
@pytest.mark.parametrize(("length", "steps"), [(1, 30), (2, 40), (16, 40), (1024, 10)])
def test_scales_and_histories(length: int, steps: int, algorithm: str, by_function: bool) -> None:
    check_steps(length, algorithm, by_function, steps)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", AMAX)
def test_histories_that_have_gone_round(algorithm: str) -> None:
    for length, by_function in itertools.product(MARGIN, (False, True)):
        check_steps(length, algorithm, by_function, max(200, length + 20))


def test_functions_may_write_to_what_they_are_given() -> None:
    def amax(history: torch.Tensor) -> torch.Tensor:
        found = history.amax(0)
        history.zero_()
        return found

    def scaled(
        amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
    ) -> torch.Tensor:
        return scale.copy_(fp8_max / amax)

    recipe = DelayedScaling(
        amax_history_len=2, amax_compute_algo=amax, scaling_factor_compute_algo=scaled
    )
    state = DelayedScalingState(recipe, ROLES)
    state.amax_history[0] = 2.0
    update_states([state], None)
    assert state.scale.tolist() == [224.0, 224.0, 28672.0]
    assert state.amax_history.tolist() == [[0.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("fp8_format", Format)
def test_formats_by_direction(fp8_format: Format) -> None:
    state = DelayedScalingState(DelayedScaling(fp8_format=fp8_format), ROLES)
    state.amax_history[0] = 1.0
    update_states([state], None)
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
def test_functions_are_checked_before_anything_changes(
    error: type[Exception], options: dict[str, Any]
) -> None:
    state = DelayedScalingState(DelayedScaling(amax_history_len=4, **options), ROLES)
    state.amax_history[0] = 2.0
    before = {name: value.clone() for name, value in state.state_dict().items()}
    with pytest.raises(error, match=next(iter(options))):
        update_states([state], None)
    assert all(torch.equal(value, before[name]) for name, value in state.state_dict().items())


def test_slots_that_saw_nothing_stay() -> None:
    state = DelayedScalingState(DelayedScaling(amax_history_len=3), ROLES)
    state.amax_history[:, 1] = torch.tensor([0.0, 5.0, 7.0])
    state.scale[1] = 3.0
    state.amax_history[0, 0] = 1.0
    update_states([state], None)
    assert state.scale.tolist() == [448.0, 3.0, 1.0]
    assert state.amax_history.tolist() == [[0.0, 0.0, 0.0], [0.0, 5.0, 0.0], [1.0, 7.0, 0.0]]
