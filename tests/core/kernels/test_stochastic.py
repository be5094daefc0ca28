"""Stochastic rounding: to neighbours in proportion to the distances, repeatably."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ottava import Layout, kernels
from tests import oracle
from tests.cases import told
from tests.comparing import assert_same

SHARES = (0.03, 0.25, 0.5, 0.87)


def layout_of(name: str) -> Layout:
    """One scale, which an infinite value makes 1."""
    element = oracle.ELEMENTS[name].name
    return Layout(element, (None, None), columnwise="transposed", stochastic=True)


def rounded(name: str, x: torch.Tensor, seed: int) -> torch.Tensor:
    """The values that elements become, with a scale of 1."""
    layout, x = layout_of(name), torch.cat([x, torch.tensor([math.inf])])
    data, scales, *_ = kernels.grid_quantize_levels(
        x, layout, seed=torch.tensor(seed), columnwise=False
    )
    assert scales.item() == 1.0
    values = kernels.grid_decode(data, scales, layout, torch.float32)
    assert values[len(x) - 1] == oracle.MAX[name]
    return values[: len(x) - 1]


def between(name: str) -> list[tuple[float, float, float]]:
    """``(value, lower neighbour, upper neighbour)`` at both ends of a format, with both signs."""
    element = oracle.ELEMENTS[name]
    triples = []
    for sign, magnitudes in ((1, element.positive), (-1, element.negative)):
        for place in (0, len(magnitudes) - 2):
            low, high = sorted(sign * magnitude for magnitude in magnitudes[place : place + 2])
            triples += [(low + share * (high - low), low, high) for share in SHARES]
    return triples


def check_means(name: str, seeds: range, copies: int) -> None:
    """The mean of what a value becomes is the value, within four standard errors."""
    values, low, high = torch.tensor(between(name)).t()
    draws = torch.stack([rounded(name, values.repeat(copies), seed) for seed in seeds])
    draws = draws.view(-1, len(values)).double()
    assert bool(((draws == low) | (draws == high)).all())
    share = (values.double() - low) / (high - low)
    error = (high - low) * (share * (1 - share) / len(draws)).sqrt()
    deviation = (draws.mean(0) - values.double()) / error
    assert deviation.abs().max() < 4, deviation


@pytest.mark.parametrize("name", oracle.ELEMENTS)
def test_the_mean_is_the_value(name: str) -> None:
    """Over 10,000 draws: 250 places, 40 seeds."""
    check_means(name, range(40), 250)


def test_a_seed_repeats() -> None:
    """Whatever the order in memory and the state of torch's generator, which stays as it is."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((40, 70), dtype=np.float32))
    for fields in ({"second_level": "tensor"}, {"second_level": "row"}, {}):
        layout = Layout(
            "E2M1",
            (1, 16),
            torch.float8_e4m3fn,
            columnwise="transposed",
            stochastic=True,
            **fields,
        )
        with told(layout.text):
            seed, state = torch.tensor(5), torch.get_rng_state()
            first = kernels.grid_quantize_levels(x, layout, seed=seed)
            turned = kernels.grid_quantize_levels(x.t().contiguous().t(), layout, seed=seed)
            assert_same(turned, first)
            torch.rand(3)
            assert_same(kernels.grid_quantize_levels(x, layout, seed=seed.reshape(1)), first)
            torch.set_rng_state(state)
            other = kernels.grid_quantize_levels(x, layout, seed=torch.tensor(5 + 2**32))
            assert not torch.equal(other[0], first[0])
            assert_same(torch.get_rng_state(), state)
            assert_same(seed, torch.tensor(5))
