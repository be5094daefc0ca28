"""Training steps that are compiled whole: the bytes of eager code, and one compilation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ottava
from ottava import GridQuantizer, Layout
from ottava.kernels import fixed_seed
from ottava_custom import CustomRecipe, HybridQuantizer
from tests.comparing import assert_same

E4M3 = torch.float8_e4m3fn


def train(net: torch.nn.Module, run: Any) -> list[torch.Tensor]:
    """The outputs of steps, the gradients of the last one, and what the model then holds."""
    optimizer, random = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    outputs = []
    for step in range(4):
        x = torch.randn(8, 32, generator=random) * (step + 1)
        optimizer.zero_grad()
        outputs.append(run(x))
        outputs[-1].square().mean().backward()
        optimizer.step()
    return [*outputs, *(p.grad for p in net.parameters()), *net.state_dict().values()]


#: Words of backward; the conformance tests compile the others, in the long run.
WORDS = [("delayed", "high_precision"), ("delayed", "dequantized"), ("mxfp8", "dequantized")]


def test_recipes_compile_side_by_side_and_once_for_all_steps() -> None:
    """A state that changes in each step is no reason to compile again. The conformance tests of
    the recipes without a state compile in the long run alone."""
    rows, blocks = (GridQuantizer(Layout(E4M3, block)) for block in ((1, None), (2, 2)))
    sides = HybridQuantizer(rows, blocks)
    names = "delayed", "current", "rowwise", "blockwise", "mxfp8", "mx", "nvfp4"
    layers: list[torch.nn.Module] = [ottava.nn.Linear(32, 32, recipe=name) for name in names]
    layers.append(ottava.nn.TransposedLinear(32, 32, recipe="delayed"))
    for name, word in WORDS:
        recipe = ottava.get_recipe(name, backward=word)
        layers.append(ottava.nn.Linear(32, 32, recipe=recipe))
    # Plain code of torch is the slowest to compile, so these weights are not quantized in it.
    for recipe in ("custom", CustomRecipe(lambda role: sides)):
        with ottava.quantized_model_init(recipe):
            layers.append(ottava.nn.Linear(32, 32, recipe=recipe))
    torch.compiler.reset()
    model, counter = torch.nn.Sequential(*layers), CompileCounterWithBackend("aot_eager")
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, dynamic=False, backend=counter)
    # Equal seeds: some gradients are rounded at random.
    with fixed_seed():
        assert_same(train(twin, compiled), train(model, model))
    assert counter.frame_count == 1
