"""Training steps that are compiled whole: the bytes of eager code, and one compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ottava
from ottava import GridQuantizer, Layout
from ottava.kernels import fixed_seed
from ottava_current import Float8CurrentScaling
from ottava_custom import CurrentScalingQuantizerRef, CustomRecipe, HybridQuantizer
from tests.comparing import assert_same

E4M3 = torch.float8_e4m3fn


def train(net: torch.nn.Module, run: Any, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The outputs of steps, the gradients of the last one, and what the model then holds."""
    optimizer, random = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    outputs = []
    for step, rows in enumerate(sizes):
        x = torch.randn(rows, 32, generator=random) * (step + 1)
        optimizer.zero_grad()
        outputs.append(run(x))
        outputs[-1].square().mean().backward()
        optimizer.step()
    return [*outputs, *(p.grad for p in net.parameters()), *net.state_dict().values()]


def assert_compiles(model: torch.nn.Module, sizes: tuple[int, ...], *, dynamic: bool) -> None:
    torch.compiler.reset()
    twin, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, dynamic=dynamic, backend=counter)
    assert_same(train(twin, compiled, sizes), train(model, model, sizes))
    assert dynamic or counter.frame_count == 1


def hybrid(role: Any) -> HybridQuantizer:
    sides = [CurrentScalingQuantizerRef(torch.float8_e4m3fn, eps=eps) for eps in (1e-3, 1e-2)]
    return HybridQuantizer(*sides)


#: Whose quantizers have options that are numbers.
NUMBERS: dict[str, Callable[[], ottava.Recipe]] = {
    "current": lambda: Float8CurrentScaling(amax_epsilon=1e-3),
    "reference": lambda: CustomRecipe("current-ref"),
    "hybrid": lambda: CustomRecipe(hybrid),
}


def test_recipes_compile_side_by_side_and_once_for_all_steps() -> None:
    """A state that changes in each step is no reason to compile again. The conformance tests of
    the recipes without a state compile in the long run alone."""
    rows, blocks = (GridQuantizer(Layout(E4M3, block)) for block in ((1, None), (2, 2)))
    sides = HybridQuantizer(rows, blocks)
    names = "delayed", "current", "rowwise", "blockwise", "mxfp8", "mx", "nvfp4"
    layers: list[torch.nn.Module] = [ottava.nn.Linear(32, 32, recipe=name) for name in names]
    layers.append(ottava.nn.TransposedLinear(32, 32, recipe="delayed"))
    # Plain code of torch is the slowest to compile, so these weights are not quantized in it.
    for recipe in ("custom", CustomRecipe(lambda role: sides)):
        with ottava.quantized_model_init(recipe):
            layers.append(ottava.nn.Linear(32, 32, recipe=recipe))
    # Equal seeds: some gradients are rounded at random.
    with fixed_seed():
        assert_compiles(torch.nn.Sequential(*layers), (8,) * 4, dynamic=False)


class Tied(torch.nn.Module):
    """One layer, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).relu())


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_a_layer_that_runs_twice_compiles_for_all_sizes(name: str) -> None:
    model = ottava.convert(torch.nn.Sequential(Tied(), torch.nn.Linear(32, 16)), NUMBERS[name]())
    assert_compiles(model, (8, 5), dynamic=True)
