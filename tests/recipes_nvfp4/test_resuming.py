"""Gradients are rounded at random, and a run that is interrupted repeats every bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from tests.comparing import assert_same
from tests.ranks import run
from tests.samples import wide

SAVED_AT, STEPS = 2, 5
#: How the layers run: as they are, or recomputed in the backward pass.
WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda net, x: net(x),
    "reentrant": lambda net, x: checkpoint(net, x, use_reentrant=True),
    "not reentrant": lambda net, x: checkpoint(net, x, use_reentrant=False),
}


class Run:
    """A model with dropout, which draws from torch's generator, too, and its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = torch.nn.Linear(64, 48), torch.nn.Dropout(0.1), torch.nn.Linear(48, 64)
        self.model = ottava.convert(torch.nn.Sequential(*layers), "nvfp4")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, way: str, first: int, stop: int) -> None:
        for step in range(first, stop):
            x = wide(32, 64, seed=step, sigma=1.0).requires_grad_()
            WAYS[way](self.model, x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(states | {"random": torch.get_rng_state()}, path)

    def load(self, path: Path, *, random: bool) -> None:
        states = torch.load(path, weights_only=True)
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        if random:
            torch.set_rng_state(states["random"])

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def resume(mesh: Any, path: Path, way: str, random: bool) -> list[torch.Tensor]:
    """The weights of a saved run after its last step, in a process that knows the file alone."""
    resumed = Run(seed=99)
    resumed.load(path, random=random)
    resumed.train(way, SAVED_AT, STEPS)
    return resumed.weights()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[torch.Tensor]]]:
    """For each way the file of a run that was saved on its way, and the weights at its end."""
    runs = {}
    for way in WAYS:
        path = tmp_path_factory.mktemp("runs") / "run.pt"
        training = Run(seed=0)
        training.train(way, 0, SAVED_AT)
        training.save(path)
        training.train(way, SAVED_AT, STEPS)
        runs[way] = path, training.weights()
    return runs


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_has_the_same_weights(whole: Any, way: str) -> None:
    path, expected = whole[way]
    (weights,) = run(resume, 1, path=path, way=way, random=True)
    assert_same(weights, expected)


def test_recomputation_changes_no_bit(whole: Any) -> None:
    for way in WAYS:
        assert_same(whole[way][1], whole["plain"][1], note=way)


def test_the_random_state_is_a_part_of_the_run(whole: Any) -> None:
    path, expected = whole["plain"]
    (weights,) = run(resume, 1, path=path, way="plain", random=False)
    assert not torch.equal(weights[0], expected[0])
