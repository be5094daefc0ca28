"""Linear: values against float64, what it saves, gradients, shapes, regions, checkpointing,
autocast, compile."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ottava
from ottava.errors import DeviceError, DTypeError, RecipeNotFoundError, ShapeError
from ottava.nn import Linear, plan
from ottava.tensors import columnwise_layout


def make(
    recipe: Any, n: int = 5, k: int = 7, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Linear:
    torch.manual_seed(0)
    return Linear(k, n, dtype=dtype, recipe=recipe, **options)


def quantized(layer: Linear, tensor_type: str, value: torch.Tensor) -> torch.Tensor:
    quantizer = layer.recipe.quantizer(tensor_type)
    return quantizer(value.detach()).dequantize(torch.float64)


@pytest.mark.parametrize("layout", ["shared", "transpose"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 4), (0,), (2, 0)])
def test_forward_and_backward_against_float64(
    recipe: Any, lead: Any, dtype: torch.dtype, layout: Any
) -> None:
    layer = make(recipe, dtype=dtype)
    x = torch.randn(*lead, 7, dtype=dtype, requires_grad=True)
    dy = torch.randn(*lead, 5, dtype=dtype)
    with columnwise_layout(layout):
        y = layer(x)
        y.backward(dy)
    qx, qw = quantized(layer, "input", x).reshape(-1, 7), quantized(layer, "weight", layer.weight)
    qdy = quantized(layer, "grad_output", dy).reshape(-1, 5)
    u = torch.finfo(dtype).eps
    # Two roundings at most on top of float32 accumulation; absolute terms for sums that cancel.
    tolerance = {"rtol": 3 * u, "atol": 3 * u * 8}
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    expected = (qx @ qw.t() + layer.bias.double()).view(*lead, 5)
    torch.testing.assert_close(y.double(), expected, **tolerance)
    torch.testing.assert_close(x.grad.double(), (qdy @ qw).view(*lead, 7), **tolerance)
    torch.testing.assert_close(layer.weight.grad.double(), qdy.t() @ qx, **tolerance)
    torch.testing.assert_close(
        layer.bias.grad.double(), dy.double().reshape(-1, 5).sum(0), **tolerance
    )


def saved_bytes(run: Any) -> tuple[int, set[torch.dtype]]:
    seen: dict[int, tuple[int, torch.dtype]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen[t.data_ptr()] = (t.numel() * t.element_size(), t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(size for size, _ in seen.values()), {dtype for _, dtype in seen.values()}


def test_only_quantized_tensors_are_saved(recipe: Any) -> None:
    layer = make(recipe, 64, 64)
    plain = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    x = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    ours, dtypes = saved_bytes(lambda: layer(x))
    theirs, _ = saved_bytes(lambda: plain(x))
    assert dtypes == {torch.uint8, torch.float32}
    assert ours <= 0.55 * theirs


def products_of(step: Callable[[], object]) -> float:
    """How many products of 4 x 7 by 7 x 5 a step computes, by the operations that torch counts."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / (2 * 4 * 7 * 5)


def test_what_needs_no_gradient_costs_nothing(recipe: Any) -> None:
    x = torch.randn(4, 7, dtype=torch.bfloat16)
    layer = make(recipe)
    assert products_of(lambda: layer(x).sum().backward()) == 2
    leaf = x.clone().requires_grad_()
    assert products_of(lambda: layer(leaf).sum().backward()) == 3
    layer.weight.requires_grad_(False)
    assert products_of(lambda: layer(leaf).sum().backward()) == 2
    assert products_of(lambda: layer(x).sum().backward()) == 1
    assert layer.bias.grad is not None
    size, _ = saved_bytes(lambda: make(recipe).requires_grad_(False)(x))
    assert size == 0


def test_sizes_that_never_repeat_make_no_more_plans_than_the_limit(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LIMIT", 3)
    layer = make(recipe)
    inputs = [torch.randn(rows, 7, dtype=torch.bfloat16) for rows in (1, 2, 3, 4, 5, 6, 1)]
    with torch.no_grad():
        outputs = [layer(x) for x in inputs]
        assert 0 < len(layer._binding.plans) <= 3
        for x, y in zip(inputs, outputs, strict=True):
            assert torch.equal(y, make(recipe)(x))


def test_double_use_and_accumulation_add_up(recipe: Any) -> None:
    layer = make(recipe, 7, 7)
    x = torch.randn(4, 7, dtype=torch.bfloat16)
    layer(layer(x)).sum().backward()
    twice = layer.weight.grad.clone()
    assert twice.abs().sum() > 0
    layer.zero_grad()
    a, b = torch.randn(4, 7, dtype=torch.bfloat16), torch.randn(6, 7, dtype=torch.bfloat16)
    singles = []
    for batch in (a, b):
        layer.zero_grad()
        layer(batch).sum().backward()
        singles.append(layer.weight.grad.clone())
    layer.zero_grad()
    first, second = layer(a), layer(b)
    second.sum().backward()
    first.sum().backward()
    torch.testing.assert_close(layer.weight.grad, singles[0] + singles[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("region", [False, True])
def test_activation_checkpointing_equals_plain(
    recipe: Any, use_reentrant: bool, region: bool
) -> None:
    layer = make(None if region else recipe, 7, 7)
    x = torch.randn(4, 7, dtype=torch.bfloat16, requires_grad=True)

    def run(checkpointed: bool) -> list[torch.Tensor]:
        layer.zero_grad()
        x.grad = None
        with ottava.autocast(recipe, enabled=True) if region else ottava.autocast():
            y = checkpoint(layer, x, use_reentrant=use_reentrant) if checkpointed else layer(x)
        # The recomputation happens here, outside the region.
        y.float().square().sum().backward()
        return [y, x.grad, layer.weight.grad, layer.bias.grad]

    for plain, again in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, again)


def test_torch_autocast(recipe: Any) -> None:
    layer = make(recipe, dtype=torch.float32)
    x = torch.randn(4, 7, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.abs().sum() > 0


def test_the_gradient_of_a_float32_bias_under_autocast_is_rounded_once(recipe: Any) -> None:
    """301 is no bfloat16: the sum of so many gradients of one is not rounded to one."""
    layer = make(recipe, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(301, 7))
    y.sum().backward()
    assert layer.bias.grad.tolist() == [301.0] * 5


def test_regions_override_bound_recipes(recipe: Any) -> None:
    x = torch.randn(4, 7, dtype=torch.bfloat16)
    bound, free = make(recipe), make(None)
    high = torch.nn.functional.linear(x, bound.weight, bound.bias)
    low = bound(x)
    assert not torch.equal(high, low)
    assert torch.equal(free(x), high)
    with ottava.autocast(recipe):
        assert torch.equal(free(x), low)
        with ottava.autocast(enabled=False):
            assert torch.equal(free(x), high)
            assert torch.equal(bound(x), high)
        with ottava.autocast():
            assert torch.equal(free(x), low)
    with ottava.autocast():
        assert torch.equal(free(x), high)
        assert torch.equal(bound(x), low)
    assert torch.equal(free(x), high)
    with pytest.raises(ZeroDivisionError), ottava.autocast(recipe):
        raise ZeroDivisionError
    assert torch.equal(free(x), high)


def test_first_microbatch_keeps_the_quantized_weight(recipe: Any) -> None:
    layer = make(recipe)
    x = torch.randn(4, 7, dtype=torch.bfloat16)
    first = layer(x, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(layer(x, is_first_microbatch=False), first)
    assert torch.equal(layer(x, is_first_microbatch=True), layer(x))
    layer(x, is_first_microbatch=True).sum().backward()
    assert layer.weight.grad is not None


def test_a_loss_that_is_kept_holds_no_quantized_weight(recipe: Any) -> None:
    """A training loop holds the loss of the last microbatch until the next one has run."""
    layer = make(recipe)
    loss = layer(
        torch.randn(4, 7, dtype=torch.bfloat16, requires_grad=True), is_first_microbatch=True
    ).sum()
    kept: Any = layer._binding.microbatch_weight
    data = weakref.ref(kept.storage._data)
    loss.backward()
    layer._binding.microbatch_weight = kept = None
    assert data() is None, loss


def test_primary_weights(recipe: Any) -> None:
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe):
        layer = Linear(7, 5, dtype=torch.bfloat16)
    weight = layer.weight
    assert isinstance(weight, ottava.Float8Tensor)
    assert isinstance(weight, torch.nn.Parameter)
    initial = weight.get_high_precision_init_val()
    assert torch.equal(recipe.quantizer("weight")(initial).dequantize(), weight.dequantize())
    x = torch.randn(4, 7, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight.dequantize(), layer.bias))
    with ottava.autocast(recipe):
        y = layer(x)
    y.sum().backward()
    assert weight.grad.shape == (5, 7)
    plain = make(recipe)
    with torch.no_grad():
        plain.weight.copy_(initial)
        plain.bias.copy_(layer.bias)
    assert torch.equal(plain(x), y)
    before = weight.dequantize()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert not torch.equal(weight.dequantize(), before)
    assert isinstance(layer.weight, ottava.Float8Tensor)
    clone = copy.deepcopy(layer)
    assert torch.equal(clone.weight.dequantize(), weight.dequantize())
    clone.load_state_dict(layer.state_dict())
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    assert not isinstance(Linear(7, 5).weight, ottava.Float8Tensor)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 16)
        self.second = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.first(x))
        return self.head(self.second(self.second(hidden)) + hidden)


@pytest.mark.parametrize(
    ("dtype", "layout", "leads"),
    [
        (torch.bfloat16, "shared", [(2, 5)]),
        pytest.param(torch.float32, "transpose", [(4,), (2, 5)], marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "transpose", [(4,), (2, 5)], marks=pytest.mark.slow),
        pytest.param(torch.float32, "shared", [(4,), (2, 5)], marks=pytest.mark.slow),
    ],
)
def test_compiled_equals_eager_bitwise(
    recipe: Any, dtype: torch.dtype, layout: Any, leads: list[tuple[int, ...]]
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ottava.convert(Net().to(dtype), recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with columnwise_layout(layout):
        for lead in leads:
            results = []
            for run in (model, compiled):
                model.zero_grad()
                x = (
                    torch.randn(*lead, 7, generator=torch.Generator().manual_seed(1))
                    .to(dtype)
                    .requires_grad_()
                )
                y = run(x)
                y.float().square().sum().backward()
                results.append([y, x.grad, *(p.grad for p in model.parameters())])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="2.11's compiler cannot trace how a layer gets its first state",
)
def test_a_region_inside_a_compiled_function(recipe: Any) -> None:
    torch._dynamo.reset()
    layer = make(None)
    x = torch.randn(4, 7, dtype=torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        with ottava.autocast(recipe):
            return layer(x)

    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


@pytest.mark.parametrize(
    ("input", "error"),
    [
        (torch.zeros(4, 8, dtype=torch.bfloat16), ShapeError),
        (torch.zeros((), dtype=torch.bfloat16), ShapeError),
        (torch.zeros(4, 7, dtype=torch.int64), DTypeError),
        (torch.zeros(4, 7, dtype=torch.complex64), DTypeError),
        (torch.zeros(4, 7, dtype=torch.float32), DTypeError),
        (torch.zeros(4, 7, dtype=torch.bfloat16, device="meta"), DeviceError),
        ([1.0, 2.0], DTypeError),
    ],
)
def test_bad_input_is_named(recipe: Any, input: Any, error: type[Exception]) -> None:
    layer = make(recipe, name="block.0")
    with pytest.raises(error, match=r"input of Linear 'block\.0'(?s:.*)Expected"):
        layer(input)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr", "to_sparse_bsr", "to_mkldnn"])
def test_other_layouts_are_named(recipe: Any, convert: str, grad: bool) -> None:
    layer, x = make(recipe, 16, 64, torch.float32, name="block.0"), torch.randn(16, 64)
    input = x.to_sparse_bsr((4, 4)) if convert == "to_sparse_bsr" else getattr(x, convert)()
    with pytest.raises(DTypeError, match=r"input of Linear 'block\.0' has layout .*\.to_dense\(\)"):
        layer(input.requires_grad_(grad))
    assert layer(input.detach().to_dense()).shape == (16, 16)


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("weight", torch.ones(5, 9), ShapeError, r"weight .* has shape \(5, 9\).*\[\*, 7\]"),
        ("weight", torch.ones(5, 3), ShapeError, r"weight .* has shape \(5, 3\)"),
        ("weight", torch.ones(7), ShapeError, r"weight .* has shape \(7,\)"),
        ("weight", torch.ones(2, 5, 7), ShapeError, r"weight .* has shape \(2, 5, 7\)"),
        ("weight", torch.ones(9, 7), ShapeError, r"bias .* has shape \(5,\).*\(9,\)"),
        ("bias", torch.ones(3), ShapeError, r"bias .* has shape \(3,\).*\(5,\)"),
        ("bias", torch.ones(5, 1), ShapeError, r"bias .* has shape \(5, 1\).*\(5,\)"),
        ("bias", torch.ones(1, 5), ShapeError, r"bias .* has shape \(1, 5\).*\(5,\)"),
        ("bias", torch.ones(()), ShapeError, r"bias .* has shape \(\)"),
        (
            "bias",
            torch.ones(5, device="meta"),
            DeviceError,
            r"bias .* is on meta, its weight on cpu",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_named(
    recipe: Any, name: str, value: torch.Tensor, error: type[Exception], words: str
) -> None:
    """Kernels, which read by addresses, would read beyond them, or multiply a part."""
    layer = make(recipe, dtype=torch.float32, name="block.0")
    setattr(layer, name, torch.nn.Parameter(value))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(error, match=words) as caught:
            layer(torch.randn(4, 7))
        assert "block.0" in str(caught.value)
    # Where they fit each other the numbers that a layer was made of say nothing.
    layer.weight, layer.bias = (
        torch.nn.Parameter(torch.ones(3, 9)),
        torch.nn.Parameter(torch.ones(3)),
    )
    torch.testing.assert_close(layer(torch.ones(4, 9)), torch.full((4, 3), 10.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "of_bias", [torch.float64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_a_bias_of_another_kind_is_refused(
    recipe: Any, dtype: torch.dtype, of_bias: torch.dtype
) -> None:
    layer = make(recipe, dtype=dtype, name="block.0")
    layer.bias = torch.nn.Parameter(torch.ones(5).to(of_bias), requires_grad=False)
    with pytest.raises(DTypeError, match=rf"bias of Linear 'block\.0' has dtype {of_bias}"):
        layer(torch.randn(4, 7, dtype=dtype))


def test_a_sparse_bias_is_refused(recipe: Any) -> None:
    layer = make(recipe, dtype=torch.float32, name="block.0")
    layer.bias = torch.nn.Parameter(torch.ones(5).to_sparse())
    with pytest.raises(
        DTypeError, match=r"bias of Linear 'block\.0' has layout torch.sparse_coo(?s:.*)to_dense"
    ):
        layer(torch.randn(4, 7))


def test_bad_recipes_are_named() -> None:
    with pytest.raises(DTypeError, match="recipe"):
        ottava.autocast(3)  # type: ignore[arg-type]
    with pytest.raises(
        RecipeNotFoundError, match="no installed package provides recipe 'nonesuch'"
    ):
        ottava.autocast("nonesuch")
    with pytest.raises(RecipeNotFoundError), ottava.quantized_model_init("nonesuch"):
        pass
