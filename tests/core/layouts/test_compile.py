"""Compiled code has the bytes of eager code: quantizing, views, writes, layers of all layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ottava import QuantizedTensor
from ottava.nn import Linear
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    LAYOUTS,
    QUANTIZERS,
    USAGES,
    OneQuantizer,
    boundary,
    inner,
    quantizer,
)
from tests.core.layouts.test_primary_weights import net, passes
from tests.samples import wide

#: The last quantizer calls kernels that are not traced.
NAMES = list(LAYOUTS)
SOME = ["mxfp8", "mxfp8-squares", "1x128", "128x128", "rows", "tensor-transposed", "int8-3x5"]
#: Compiling costs seconds for each layout.
GROUPS = pytest.mark.parametrize(
    "names", [SOME, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["some", "all"]
)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


@GROUPS
def test_quantizing_and_dequantizing(names: list[str]) -> None:
    makers = [
        quantizer(name, list(USAGES)[number % 3], internal=True)
        for number, name in enumerate(names)
    ]

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for make in makers:
            q = make(x + 1)
            results += [q.dequantize(), q.dequantize(torch.float64) * 2]
        return results

    fast = compiled(run)
    for shape in ((33, 70), ()):
        x = wide(*shape, dtype=torch.bfloat16)
        assert_same(fast(x), run(x))


VIEWS: dict[str, Callable[[Any, int], Any]] = {
    "rows": lambda t, n: t[n:],
    "rows off the boundary": lambda t, n: t[5:7],
    "columns": lambda t, n: t[:, n:],
    "t": lambda t, n: t.t(),
    "rows of t": lambda t, n: t.t()[n:],
    "view": lambda t, n: t.view(2, n, -1),
    "flat": lambda t, n: t.reshape(-1),
    "flat t": lambda t, n: t.t().reshape(-1),
    "select": lambda t, n: t.view(2, n, -1)[1],
    "unsqueeze": lambda t, n: t.unsqueeze(0),
    "contiguous t": lambda t, n: t.t().contiguous(),
    "to": lambda t, n: t.to(torch.bfloat16),
}


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


@GROUPS
def test_quantized_tensors_and_their_views(names: list[str]) -> None:
    """All ops of one layout, and some of each other."""
    inputs = {
        name: QUANTIZERS[name](wide(2 * boundary(name), 2 * boundary(name) + 8))
        for name in names
        if boundary(name) > 1
    }
    pairs = [
        (name, what)
        for number, name in enumerate(inputs)
        for place, what in enumerate(VIEWS)
        if name == "mxfp8" or (place + number) % 4 == 0
    ]

    def run(inputs: dict[str, torch.Tensor]) -> list[Any]:
        results = [q.dequantize(torch.float64) for q in inputs.values()]
        for name, what in pairs:
            view = VIEWS[what](inputs[name], boundary(name))
            results += [view, view + 1]
        return results

    found, expected = compiled(run)(inputs), run(inputs)
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        with told(number, pairs[max(0, (number - len(inputs)) // 2)]):
            assert isinstance(one, QuantizedTensor) is isinstance(two, QuantizedTensor)
            assert_same(values_of(one), values_of(two))


def test_writes_in_place() -> None:
    made = {name: [QUANTIZERS[name](wide(64, 70)) for _ in range(2)] for name in SOME[::2]}

    def run(tensors: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        for q in tensors:
            q.copy_(x)
            q.mul_(2.0)
        return [q.dequantize() for q in tensors]

    x = wide(64, 70, seed=1)
    one, two = ([pair[i] for pair in made.values()] for i in range(2))
    assert_same(compiled(run)(one, x), run(two, x))
    for mine, theirs in zip(one, two, strict=True):
        for columnwise in (False, True):
            assert_same(mine.for_usage(columnwise), theirs.for_usage(columnwise))


def test_a_quantizer_that_gives_tensors_is_refused() -> None:
    make = QUANTIZERS["mxfp8"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="GridQuantizer"):
        compiled(lambda x: make(x).dequantize())(wide(64, 70))


class Layers(torch.nn.Module):
    """A layer of each of these layouts, side by side."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            Linear(40, 20, recipe=OneQuantizer(row=name)) for name in names
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


@GROUPS
def test_layers(names: list[str]) -> None:
    """Forward and backward, for sizes that change, in one graph."""
    model = Layers(names if len(names) > len(SOME) else names[::2])
    counter = CompileCounterWithBackend("aot_eager")
    fast = compiled(model, backend=counter, dynamic=True)
    # A compiler takes one block for another case than several; no layout goes from one to several.
    for rows in (70, 100):
        x = wide(rows, 40, sigma=1.0)
        assert_same(passes(fast, model, x), passes(model, model, x))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "name", ["mxfp8-squares", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[::3])]
)
def test_primary_weights_and_their_steps(name: str) -> None:
    model = net(name)
    twin = copy.deepcopy(model)
    fast = compiled(twin)
    for step in range(2):
        x = wide(24, 70, seed=step, sigma=1.0)
        assert_same(passes(fast, twin, x), passes(model, model, x))
        for module in (model, twin):
            torch.optim.SGD(module.parameters(), lr=1e-4).step()
        assert_same(inner(twin[0].weight), inner(model[0].weight))
