"""Layers in high precision on CPUs without a fast product of bfloat16: float32 sums, one rounding,
and bfloat16 saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from tests.choosing import cpu_products

BF16 = torch.bfloat16


class Products(TorchDispatchMode):
    """Notes the dtypes of the operands of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.matmul):
            self.dtypes += [x.dtype for x in args if isinstance(x, torch.Tensor) and x.dim() == 2]
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _without_fast_bfloat16() -> Iterator[None]:
    with cpu_products(torch.float32):
        yield


def layers(bias: bool = True) -> tuple[ottava.nn.Linear, torch.nn.Linear]:
    """One of ours in bfloat16, and torch's of the same values in float32."""
    ours = ottava.nn.Linear(24, 7, bias=bias).bfloat16()
    theirs = torch.nn.Linear(24, 7, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def saved_by(run: Any) -> list[torch.dtype]:
    dtypes: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: dtypes.append(t.dtype) or t, _same):
        run()
    return dtypes


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (24,), (2, 3, 24), (0, 24), (2, 0, 24)], ids=str)
def test_a_layer_is_that_of_float32_rounded_once(shape: tuple[int, ...], bias: bool) -> None:
    ours, theirs = layers(bias)
    x = torch.randn(shape).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    with Products() as seen:
        y = ours(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    expected = theirs(wide)
    expected.backward(dy.float())
    assert set(seen.dtypes) <= {torch.float32}
    assert torch.equal(y, expected.bfloat16())
    for mine, other in [(x, wide), *zip(ours.parameters(), theirs.parameters(), strict=True)]:
        assert mine.grad.dtype == BF16
        # torch may add in another order where it folds dimensions otherwise.
        torch.testing.assert_close(mine.grad, other.grad.bfloat16(), rtol=2**-8, atol=1e-6)
    assert set(saved_by(lambda: ours(x))) == {BF16}


def test_regions_without_a_recipe_and_main_grad_get_the_same_product(recipe: Any) -> None:
    ours, theirs = layers()
    x = torch.randn(5, 24).bfloat16()
    expected = theirs(x.float())
    expected.sum().backward()
    ours.bind(recipe)
    ours.fuse_wgrad_accumulation, ours.weight.main_grad = True, torch.zeros(7, 24)
    for calibrating in (False, True):
        ours.weight.main_grad.zero_()
        with ottava.autocast(enabled=False, calibrating=calibrating), Products() as seen:
            y = ours(x)
            y.sum().backward()
        assert set(seen.dtypes) == {torch.float32}
        assert torch.equal(y, expected.bfloat16())
        assert torch.equal(ours.weight.main_grad, theirs.weight.grad.bfloat16().float())
        assert ours.weight.grad is None


def test_autocast_rounds_operands_as_torch_does() -> None:
    ours, x = ottava.nn.Linear(24, 7), torch.randn(5, 24, requires_grad=True)
    with torch.autocast("cpu", dtype=BF16), Products() as seen:
        y = ours(x)
        # Within the region, where a product of torch's would be rounded again.
        y.float().square().sum().backward()
    assert set(seen.dtypes) == {torch.float32}
    rounded = [t.detach().bfloat16().float() for t in (x, ours.weight, ours.bias)]
    assert torch.equal(y, torch.nn.functional.linear(*rounded).bfloat16())
    dy = (2 * y.detach().float()).bfloat16().float()
    assert x.grad.dtype == ours.weight.grad.dtype == torch.float32
    assert torch.equal(x.grad, (dy @ rounded[1]).bfloat16().float())
    assert torch.equal(ours.weight.grad, (dy.t() @ rounded[0]).bfloat16().float())


def test_a_few_rows_without_gradients_do_not_convert_the_weight() -> None:
    ours, theirs = layers()
    for rows, dtype in ((1, BF16), (4, BF16), (5, torch.float32)):
        x = torch.randn(rows, 24).bfloat16()
        with torch.no_grad(), Products() as seen:
            y = ours(x)
        assert set(seen.dtypes) == {dtype}
        torch.testing.assert_close(y.float(), theirs(x.float()), rtol=1e-2, atol=1e-2)


def test_derivatives_of_every_kind_are_torchs() -> None:
    ours, theirs = layers()
    x, tangent = torch.randn(2, 5, 24).bfloat16()

    def penalty(layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(x).tanh().square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), [x, *layer.parameters()]))

    def dual(layer: torch.nn.Module, *operands: torch.Tensor) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            y = layer(torch.autograd.forward_ad.make_dual(*operands))
            result: torch.Tensor = torch.autograd.forward_ad.unpack_dual(y).tangent
            return result

    for mine, other in zip(penalty(ours, x), penalty(theirs, x.float()), strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=0.05, atol=0.02)
    mine, other = dual(ours, x, tangent), dual(theirs, x.float(), tangent.float())
    torch.testing.assert_close(mine.float(), other, rtol=1e-2, atol=1e-2)
    slope = torch.func.grad(lambda v: ours(v).float().sum())(x)
    with torch.no_grad():
        expected = theirs.weight.sum(0).expand(5, 24).bfloat16()
        torch.testing.assert_close(slope, expected, rtol=2**-7, atol=1e-3)
        mapped = torch.func.vmap(lambda v: ours(v))(x)
        torch.testing.assert_close(mapped, theirs(x.float()).bfloat16(), rtol=2**-6, atol=1e-3)


def test_other_dtypes_and_layouts_are_torchs() -> None:
    wide, x = ottava.nn.Linear(24, 7, dtype=torch.float64), torch.randn(5, 24, dtype=torch.float64)
    expected = torch.nn.functional.linear(x, wide.weight, wide.bias)
    plain, ours = ottava.nn.Linear(24, 7), layers()[0]
    assert torch.equal(wide(x), expected)
    with torch.autocast("cpu", BF16):
        assert torch.equal(wide(x), expected)
        for dtype in (torch.int64, torch.complex64):
            with pytest.raises((RuntimeError, TypeError)):
                plain(torch.ones(5, 24, dtype=dtype))
    nested = torch.nested.nested_tensor([torch.randn(rows, 24).bfloat16() for rows in (5, 6)])
    torchs = torch.nn.functional.linear(nested, ours.weight, ours.bias)
    assert all(map(torch.equal, ours(nested).unbind(), torchs.unbind()))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.randn(5, 24), RuntimeError, "dtype"),
        ([1.0] * 24, TypeError, "Tensor"),
        (torch.randn(5, 23).bfloat16(), RuntimeError, "shape|size"),
    ]
    for value, error, words in wrong:
        with pytest.raises(error, match=words):
            ours(value)


@pytest.mark.xdist_group("compiler")
def test_a_compiled_layer_saves_bfloat16_and_gives_the_bytes_of_eager() -> None:
    torch.compiler.reset()
    ours, results = layers()[0], []
    x = torch.randn(16, 24).bfloat16().requires_grad_()
    compiled = torch.compile(ours, backend="aot_eager_decomp_partition", fullgraph=True)
    dtypes = saved_by(lambda: results.append(compiled(x)))
    assert len(dtypes) >= 2
    assert set(dtypes) == {BF16}
    results.append(ours(x))
    gradients = [torch.autograd.grad(y.sum(), [x, *ours.parameters()]) for y in results]
    for mine, other in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        assert torch.equal(mine, other)
