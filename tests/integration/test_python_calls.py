"""How much Python an eager step of a layer runs: what stands between kernels on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

import ottava

# A converted model begins a step besides, which updates what a recipe keeps.
MOST = {"bound": 150, "converted": 190}
MAKE: dict[str, Callable[[str], torch.nn.Module]] = {
    "bound": lambda recipe: ottava.nn.Linear(64, 64, recipe=recipe),
    "converted": lambda recipe: ottava.convert(torch.nn.Linear(64, 64), recipe),
}


@pytest.mark.parametrize("how", MAKE)
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_a_forward_and_backward_pass_makes_few_calls(recipe: str, how: str) -> None:
    layer = MAKE[how](recipe)
    x, dy = torch.randn(16, 64, requires_grad=True), torch.randn(16, 64)
    for _ in range(3):
        layer(x).backward(dy)
    calls: list[str] = []
    sys.setprofile(
        lambda frame, event, _: calls.append(frame.f_code.co_qualname) if event == "call" else None
    )
    try:
        layer(x).backward(dy)
    finally:
        sys.setprofile(None)
    assert len(calls) <= MOST[how], calls
