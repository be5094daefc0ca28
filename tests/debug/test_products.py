"""Layers that are watched compute what others compute, bit for bit."""

from copy import deepcopy

import pytest
import torch

import ottava
from benchmarks.installed import recipes
from ottava_debug.products import Inspection, Watch


def trained(model, *, steps=3):
    """Outputs, gradients and state of a few steps."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(8, 32, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    return found + list(model.state_dict().values())


def model_of(recipe, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32, bias=False))
    return ottava.convert(model.to(dtype), recipe)


@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "custom"])
def test_an_inspection_that_changes_nothing_changes_nothing(recipe):
    model = model_of(recipe)
    expected = trained(deepcopy(model))
    with Watch(lambda layer: Inspection()):
        found = trained(model)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
