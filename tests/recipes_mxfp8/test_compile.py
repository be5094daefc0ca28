"""Compiled whole, bitwise equal to eager: layers, training, quantizing, dequantizing, views."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.formats import Format
from ottava.nn import Linear
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Quantizer, MXFP8Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
RECIPES = {
    "default": MXFP8BlockScaling(),
    "squares": MXFP8BlockScaling(
        with_2d_quantization=True, fp8_format=Format.HYBRID, scale_rounding="floor"
    ),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def wide(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=random) * torch.exp(3 * torch.randn(shape, generator=random))
    ).to(dtype)


def check_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    assert (one.shape, one.dtype) == (two.shape, two.dtype)
    if isinstance(one, MXFP8Tensor):
        for name in INNER:
            mine, theirs = getattr(one, name), getattr(two, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
        one, two = one.dequantize(), two.dequantize()
    assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(40, 70)
        self.second = torch.nn.Linear(70, 70)
        self.head = torch.nn.Linear(70, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.relu(self.first(x))
        return self.head(self.second(self.second(hidden)) + hidden)


def passes(run: Any, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("default", torch.bfloat16, marks=pytest.mark.slow),
        ("squares", torch.float32),
    ],
)
def test_forward_and_backward_equal_eager(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = ottava.convert(Net().to(dtype), RECIPES[name])
    fast = compiled(model)
    x = wide(2, 33, 40, dtype=dtype)
    for mine, theirs in zip(passes(fast, model, x), passes(model, model, x), strict=True):
        check_same(mine, theirs)
    with torch.no_grad():
        check_same(fast(x), model(x))


def test_no_rows_and_no_dimension_of_rows() -> None:
    layer = Linear(40, 70, recipe=RECIPES["default"])
    fast = compiled(layer)
    for lead in ((), (0,)):
        for mine, theirs in zip(
            passes(fast, layer, wide(*lead, 40)), passes(layer, layer, wide(*lead, 40)), strict=True
        ):
            check_same(mine, theirs)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_inductor_equals_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Linear(40, 70, dtype=dtype, recipe=RECIPES["squares"])
    x = wide(33, 40, dtype=dtype)
    *mine, bias = passes(compiled(layer, "inductor"), layer, x)
    *theirs, expected = passes(layer, layer, x)
    for one, two in zip(mine, theirs, strict=True):
        check_same(one, two)
    # The sum over rows is inductor's own.
    torch.testing.assert_close(
        bias, expected, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["converted", "region inside", "region outside"])
def test_steps_equal_eager(where: str) -> None:
    recipe = MXFP8BlockScaling(fp8_format=Format.HYBRID)
    torch.manual_seed(0)
    eager = ottava.convert(Net().bfloat16(), recipe)
    twin = copy.deepcopy(eager)

    def inside(module: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            with ottava.autocast(recipe):
                return module(x)

        return run

    runs = {
        "converted": (eager, compiled(twin)),
        "region inside": (inside(eager), compiled(inside(twin))),
        "region outside": (inside(eager), inside(compiled(twin))),
    }
    losses = []
    for model, run in zip((eager, twin), runs[where], strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = []
        for step in range(4):
            optimizer.zero_grad()
            loss = (
                run(torch.randn(24, 40, generator=torch.Generator().manual_seed(step)).bfloat16())
                .square()
                .mean()
            )
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


@pytest.mark.parametrize("name", [pytest.param("default", marks=pytest.mark.slow), "squares"])
def test_primary_weights(name: str) -> None:
    recipe = RECIPES[name]
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe):
        net = torch.nn.Sequential(
            Linear(40, 70, recipe=recipe), torch.nn.ReLU(), Linear(70, 33, recipe=recipe)
        )
    twin = copy.deepcopy(net)
    fast = compiled(twin)
    for step in range(3):
        x = wide(24, 40, seed=step)
        for mine, theirs in zip(passes(fast, twin, x), passes(net, net, x), strict=True):
            check_same(mine, theirs)
        for module in (net, twin):
            torch.optim.SGD(module.parameters(), lr=1e-4).step()
        check_same(twin[0].weight.detach(), net[0].weight.detach())


@pytest.mark.slow
def test_microbatches() -> None:
    torch.manual_seed(0)
    eager = Linear(40, 70, recipe=RECIPES["default"])
    twin = copy.deepcopy(eager)
    fast, gradients = compiled(twin), []
    for step in range(4):
        for layer in (eager, fast):
            # The gradient of the input reads the weight that is kept.
            x = wide(6, 40, seed=step).requires_grad_()
            layer(x, is_first_microbatch=step % 2 == 0).square().sum().backward()
            gradients.append(x.grad)
    assert torch.equal(eager.weight.grad, twin.weight.grad)
    assert all(map(torch.equal, gradients[::2], gradients[1::2]))


@pytest.mark.slow
def test_compiled_code_that_is_recomputed() -> None:
    torch.manual_seed(0)
    model = ottava.convert(Net(), RECIPES["default"])
    x, fast = wide(24, 40), compiled(model)
    again = passes(lambda x: checkpoint(fast, x, use_reentrant=False), model, x)
    for mine, theirs in zip(again, passes(model, model, x), strict=True):
        check_same(mine, theirs)


def test_sizes_that_change_are_compiled_once() -> None:
    layer = Linear(40, 70, recipe=RECIPES["default"])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for rows in (33, 70, 64, 97):
        x = wide(rows, 40)
        for mine, theirs in zip(passes(fast, layer, x), passes(layer, layer, x), strict=True):
            check_same(mine, theirs)
    assert counter.frame_count == 1


# Quantizing


def quantizer(kind: str, **options: Any) -> MXFP8Quantizer:
    return MXFP8Quantizer(
        options.pop("fp8_dtype", E4M3),
        rowwise=kind != "columnwise",
        columnwise=kind != "rowwise",
        with_2d_quantization=kind == "square",
        **options,
    )


KINDS = ("both", "rowwise", "columnwise", "square")


def test_quantize_and_dequantize() -> None:
    pairs = [
        (quantizer(kind), quantizer(kind, fp8_dtype=E5M2, scale_rounding="floor")) for kind in KINDS
    ]
    for make in itertools.chain(*pairs):
        make.internal = True

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for make, other in pairs:
            q, r = make(x), other(2 * x)
            made += [
                q.dequantize(),
                r.dequantize(torch.float64),
                q.dequantize(torch.float32) + 1,
                2 * r.dequantize(),
            ]
        return made

    fast = compiled(run)
    for shape in ((33, 70), ()):
        x = wide(*shape, dtype=torch.bfloat16)
        for mine, theirs in zip(fast(x), run(x), strict=True):
            check_same(mine, theirs)


@pytest.mark.slow
def test_quantize_and_dequantize_by_inductor() -> None:
    make = quantizer("both")
    make.internal = True

    def run(x: torch.Tensor) -> torch.Tensor:
        return make(x + 1).dequantize() * 2

    x = wide(33, 70)
    check_same(compiled(run, "inductor")(x), run(x))


def test_quantized_tensors_go_in() -> None:
    inputs = [quantizer(kind)(wide(64, 70)) for kind in KINDS]

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for q in inputs:
            made += [
                q.dequantize(),
                q * 2,
                q.to(torch.bfloat16),
                q.float(),
                q.dequantize(torch.float64),
            ]
        return made

    for mine, theirs in zip(compiled(run)(inputs), run(inputs), strict=True):
        check_same(mine, theirs)


def test_a_quantizer_that_gives_tensors_is_refused() -> None:
    make = quantizer("both")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="MXFP8Quantizer"):
        compiled(lambda x: make(x).dequantize())(wide(64, 70))
    torch._dynamo.reset()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda t: t[32:64],
    "rows off the boundary": lambda t: t[5:37],
    "columns": lambda t: t[:, 64:],
    "t": lambda t: t.t(),
    "rows of t": lambda t: t.t()[32:],
    "view": lambda t: t.view(2, 48, 128),
    "flat": lambda t: t.view(-1),
    "select": lambda t: t.view(3, 32, 128)[1],
    "split": lambda t: t.split(32)[2],
    "unsqueeze": lambda t: t.unsqueeze(0),
    "contiguous t": lambda t: t.t().contiguous(),
}


def test_views() -> None:
    q = quantizer("both")(wide(96, 128))

    def run(t: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {name: (op(t), op(t) + 1) for name, op in VIEWS.items()}

    mine, theirs, plain = compiled(run)(q), run(q), run(q.dequantize())
    for name in VIEWS:
        for one, two, three in zip(mine[name], theirs[name], plain[name], strict=True):
            assert isinstance(one, MXFP8Tensor) is isinstance(two, MXFP8Tensor), name
            values = [
                t.dequantize() if isinstance(t, MXFP8Tensor) else t for t in (one, two, three)
            ]
            assert torch.equal(values[0], values[1]), name
            assert torch.equal(values[0], values[2]), name


def test_in_place_updates() -> None:
    make = quantizer("both")

    def run(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q.copy_(x)
        q.mul_(2.0)
        return q.dequantize()

    one, two = make(wide(64, 70)), make(wide(64, 70))
    x = wide(64, 70, seed=1)
    check_same(compiled(run)(one, x), run(two, x))
    check_same(one, two)
