"""Compiled code has the bytes of eager code: quantizing, views, writes, layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava import QuantizedTensor
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    LAYOUTS,
    QUANTIZERS,
    ROTATED_ONCE,
    USAGES,
    assert_directions,
    boundary,
    inner,
    quantizer,
)
from tests.core.layouts.test_primary_weights import net, passes
from tests.samples import wide

# One process imports the compiler, for all tests of core.
pytestmark = pytest.mark.xdist_group("compiler")
#: Not QUANTIZERS: "Float8Tensor", its last entry, calls kernels that are not traced.
NAMES = list(LAYOUTS)
OF_A_LAYER = [name for name in NAMES if name not in ROTATED_ONCE]
#: Compiling costs a second for each of these.
SOME = ["mxfp8", "1x128", "tensor-transposed"]
EACH = [pytest.param([name], id=name, marks=pytest.mark.slow) for name in NAMES]
GROUPS = pytest.mark.parametrize("names", [pytest.param(SOME, id="some"), *EACH])


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


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
def test_tensors(names: list[str]) -> None:
    """One graph that quantizes, takes views and writes: all of one layout, some of several."""
    usages = list(USAGES)
    makers = [
        quantizer(name, usages[(turn + number) % 3], internal=True)
        for number, name in enumerate(names)
        for turn in range(3 if len(names) == 1 else 1)
    ]
    inputs = {
        name: QUANTIZERS[name](wide(2 * boundary(name), 2 * boundary(name) + 8))
        for name in names
        if boundary(name) > 1
    }
    pairs = [
        (name, what)
        for number, name in enumerate(inputs)
        for place, what in enumerate(VIEWS)
        if name == "mxfp8" or len(names) == 1 or (place + number) % 4 == 0
    ]

    def run(x: torch.Tensor, inputs: Any, targets: list[torch.Tensor]) -> dict[Any, Any]:
        results: dict[Any, Any] = {}
        for number, make in enumerate(makers):
            q, scalar = make(x + 1), make(x[0, 0])
            results[number] = [q.dequantize(), q.dequantize(torch.float64) * 2, scalar.dequantize()]
        for name, what in pairs:
            view = VIEWS[what](inputs[name], boundary(name))
            results[name, what] = [view, view + 1]
        for number, q in enumerate(targets):
            q.copy_(x)
            q.mul_(2.0)
            results["write", number] = [q.dequantize()]
        return results

    x = wide(33, 70, dtype=torch.bfloat16)
    ours, theirs = ([QUANTIZERS[name](wide(33, 70)) for name in names] for _ in range(2))
    found, expected = compiled(run)(x, inputs, ours), run(x, inputs, theirs)
    for case, values in expected.items():
        with told(case):
            for one, two in zip(found[case], values, strict=True):
                assert isinstance(one, QuantizedTensor) is isinstance(two, QuantizedTensor)
                assert_same(values_of(one), values_of(two))
    for one, two in zip(ours, theirs, strict=True):
        assert_directions(one, two)


def test_a_quantizer_that_gives_tensors_is_refused() -> None:
    make = QUANTIZERS["mxfp8"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="GridQuantizer"):
        compiled(lambda x: make(x).dequantize())(wide(64, 70))


class Layers(torch.nn.Module):
    """Layers side by side: of plain weights, and of weights that are kept quantized."""

    def __init__(self, plain: list[str], primary: list[str]) -> None:
        super().__init__()
        self.plain, self.primary = (
            torch.nn.ModuleList(net(name, primary=names is primary)[0] for name in names)
            for names in (plain, primary)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in (*self.plain, *self.primary)], -1)


@pytest.mark.parametrize(
    ("plain", "primary"),
    [
        pytest.param(["1x128"], ["mxfp8-squares"], id="some"),
        *(pytest.param([name], [name], id=name, marks=pytest.mark.slow) for name in OF_A_LAYER),
    ],
)
def test_layers(plain: list[str], primary: list[str]) -> None:
    """Forward, backward and steps, for sizes that change, in one graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = Layers(plain, primary)
    twin, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    fast = compiled(twin, backend=counter, dynamic=True)
    # A compiler takes one block for another case than several; no layout goes from one to several.
    for rows in (80, 100):
        x = wide(rows, 70, sigma=1.0)
        assert_same(passes(fast, twin, x), passes(model, model, x))
        for module in (model, twin):
            torch.optim.SGD(module.parameters(), lr=1e-4).step()
        for one, two in zip(twin.primary, model.primary, strict=True):
            assert_same(inner(one.weight), inner(two.weight))
    assert counter.frame_count == 1
