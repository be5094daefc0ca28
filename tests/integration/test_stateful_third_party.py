"""A recipe that keeps state, from outside the project, on core's public names alone: the kit, and
what it computes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import ottava
from ottava.cli.main import app
from tests.published import published

SOURCE = Path(__file__).parent / "stateful_package"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> Iterator[None]:
    modules = {
        name: (SOURCE / f"{name}.py").read_text()
        for name in ("acme_average", "acme_average_recipe")
    }
    with published(tmp_path, "acme-average", **modules):
        yield


@pytest.mark.parametrize("options", [["--fast"], pytest.param([], marks=pytest.mark.slow)])
def test_it_conforms(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["check-recipe", "acme-average", *options])
    assert done.exit_code == 0, done.output


def test_it_uses_public_names_alone() -> None:
    source = "".join(path.read_text() for path in SOURCE.glob("*.py"))
    assert re.findall(r"(?:import |\.)_(?!_)\w*", source) == []


def batch(step: int) -> torch.Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(step)) * (1 + 5 * step % 7)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(ottava.nn.Linear(16, 16), torch.nn.Tanh(), ottava.nn.Linear(16, 16))


Run = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def in_block(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with ottava.autocast("acme-average"):
        return net(x)


WAYS: dict[str, tuple[bool, Run]] = {
    "converted": (True, lambda net, x: net(x)),
    "block": (False, in_block),
    "reentrant": (True, lambda net, x: checkpoint(net, x.requires_grad_(), use_reentrant=True)),
    "not reentrant": (False, lambda net, x: checkpoint(in_block, net, x, use_reentrant=False)),
}


@pytest.mark.parametrize("way", WAYS)
def test_scales_follow_the_average(way: str) -> None:
    converts, run = WAYS[way]
    net: Any = ottava.convert(model(), "acme-average") if converts else model()
    average = torch.tensor(0.0)
    for step in range(6):
        x = batch(step)
        run(net, x).square().sum().backward()
        state = net[0].recipe_state
        assert state.average[0] == average
        assert state.scale[0] == (torch.div(torch.tensor(448.0), average) if step else 1.0)
        assert state.amax[0] == x.abs().max()
        with torch.no_grad():
            for block in (contextlib.nullcontext(), ottava.autocast("acme-average")):
                with block:
                    net(1000 * batch(step + 1))
        average = 0.5 * average + 0.5 * x.detach().abs().max() if step else x.detach().abs().max()


def test_another_model_goes_on_from_a_state_dict() -> None:
    net, other = (ottava.convert(model(), "acme-average") for _ in range(2))
    for step in range(3):
        net(batch(step)).sum().backward()
    other.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
    for each in (net, other):
        each(batch(3)).sum().backward()
    for mine, theirs in zip(net.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)
