"""Products on CPUs without a fast one of bfloat16: float32 sums, one rounding, bfloat16 saved."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava.errors import BackendError
from ottava.gemm import gemm
from ottava.kernels import products, use_backend
from ottava.kernels.products import scaled_mm
from tests.choosing import cpu_products

GEMMS = {"fprop": ((5, 24), (7, 24)), "dgrad": ((5, 7), (7, 24)), "wgrad": ((5, 7), (5, 24))}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Products(TorchDispatchMode):
    """Notes the dtypes of the operands of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.matmul):
            self.dtypes += [x.dtype for x in args if isinstance(x, torch.Tensor) and x.dim() == 2]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def wide() -> Any:
    """A machine without a fast product of bfloat16."""
    with cpu_products(torch.float32):
        yield


# -- which one is chosen --


def test_torch_is_asked_and_a_variable_overrules_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(value: str | None) -> bool:
        monkeypatch.setattr(products, "_bfloat16_is_fast", None)
        if value is None:
            monkeypatch.delenv("OTTAVA_CPU_PRODUCT", raising=False)
        else:
            monkeypatch.setenv("OTTAVA_CPU_PRODUCT", value)
        return products.multiplies_bfloat16()

    assert asked(None) is bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert asked("") is asked(None)
    assert asked("bfloat16") is True
    assert asked("float32") is False
    with pytest.raises(BackendError, match=r"OTTAVA_CPU_PRODUCT='fp16'.*bfloat16, float32.*unset"):
        asked("fp16")
    # A wrong value is wrong each time.
    with pytest.raises(BackendError):
        products.multiplies_bfloat16()


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="AVX2 is of x86 processors"
)
def test_a_processor_without_avx512_is_seen() -> None:
    """torch and oneDNN held to AVX2, in a process of its own: there torch has no fast product."""
    code = "from ottava.kernels.products import multiplies_bfloat16; print(multiplies_bfloat16())"
    held = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "PATH": ""}
    held |= {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=held, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_other_devices_and_dtypes_are_left_as_they_are(wide: None) -> None:
    assert products.product_dtype(torch.bfloat16, torch.device("cpu")) is torch.float32
    assert products.product_dtype(torch.bfloat16, torch.device("cuda")) is torch.bfloat16
    assert products.product_dtype(torch.bfloat16, torch.device("meta")) is torch.bfloat16
    assert products.product_dtype(torch.float32, torch.device("cpu")) is torch.float32
    with cpu_products(torch.bfloat16):
        assert products.product_dtype(torch.bfloat16, torch.device("cpu")) is torch.bfloat16
    assert products.product_dtype(torch.bfloat16, torch.device("cpu")) is torch.float32


# -- quantized operands --


@pytest.mark.parametrize("kind", GEMMS)
def test_a_product_in_float32_is_the_references(
    wide: None, quantizer: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[torch.dtype] = []
    mm = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *operands: dtypes.extend(x.dtype for x in operands) or mm(*operands)
    )
    a, b = (quantizer.quantize(torch.randn(shape).bfloat16()) for shape in GEMMS[kind])
    columns = gemm(a, b, kind).shape[1]
    for bias in (None, torch.randn(columns), torch.randn(columns).bfloat16()):
        for dtype in DTYPES:
            made = gemm(a, b, kind, out_dtype=dtype, bias=bias)
            with use_backend("reference"):
                expected = gemm(a, b, kind, out_dtype=dtype, bias=bias)
            assert made.dtype == dtype
            assert torch.equal(made, expected)
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_and_bias_are_in_float32_and_the_result_is_rounded_once(
    wide: None, backend: str, dtype: torch.dtype, operands: torch.dtype
) -> None:
    """Of small integers, whose sums are exact: what is left are the operations that are written
    here."""
    a, b = torch.randint(-8, 9, (33, 20)), torch.randint(-8, 9, (20, 17))
    sums = (a @ b).to(torch.float32)
    one, other = torch.rand(()) + 0.5, torch.rand(()) * 7
    for bias in (None, torch.randn(17), torch.randn(17).bfloat16()):
        for scales in ((None, None), (one, None), (None, other), (one, other)):
            factor = (1.0 if scales[0] is None else scales[0]) * (
                1.0 if scales[1] is None else scales[1]
            )
            expected = sums * factor + (0.0 if bias is None else bias.to(torch.float32))
            with use_backend(backend):
                made = scaled_mm(a.to(operands), b.to(operands), *scales, bias, dtype)
            assert torch.equal(made, expected.to(dtype)), (scales, bias)


@pytest.mark.parametrize("products", [torch.bfloat16, torch.float32])
def test_a_wider_result_has_the_sums_of_float32(products: torch.dtype) -> None:
    """Whatever the machine multiplies fast: sums in the operands' dtype would round, or
    overflow."""
    with cpu_products(products):
        a, b = (
            torch.randint(-99, 99, (5, 64)).bfloat16(),
            torch.randint(-99, 99, (64, 3)).bfloat16(),
        )
        assert torch.equal(scaled_mm(a, b, None, None, None, torch.float32), a.float() @ b.float())
        large = torch.full((2, 64), 100.0).half()
        assert (
            scaled_mm(large, large.t(), None, None, None, torch.float32).unique().item()
            == 640_000.0
        )
        scale = torch.tensor(2.0**-10)
        assert (
            scaled_mm(large, large.t(), scale, None, None, torch.float16).unique().item() == 625.0
        )


def test_the_result_is_rounded_once(wide: None) -> None:
    """257 lies between bfloat16's 256 and 258: rounded before the scale of 3, the result is 768;
    once, 772."""
    a = torch.tensor([[256.0, 1.0]]).bfloat16()
    b, three, one = torch.ones(1, 2).bfloat16(), torch.tensor(3.0), torch.tensor(1.0)
    assert scaled_mm(a, b.t(), three, one, None, torch.bfloat16).item() == 772.0
    with cpu_products(torch.bfloat16):
        assert scaled_mm(a, b.t(), three, one, None, torch.bfloat16).item() == 772.0
        # torch has no product that adds a float32 bias before it rounds.
        assert scaled_mm(a, b.t(), three, one, torch.zeros(1), torch.bfloat16).item() == 768.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_read_by_its_strides(dtype: torch.dtype) -> None:
    a, b, three = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16(), torch.tensor(3.0)
    for bias in (torch.randn(5, 2)[:, 0], torch.randn(1).expand(5)):
        with cpu_products(dtype):
            made = [
                scaled_mm(a, b, three, None, b_, torch.bfloat16) for b_ in (bias, bias.contiguous())
            ]
        assert torch.equal(*made)


def test_scales_and_bias_of_fast_products_are_in_float32() -> None:
    """The factors' product first, and one rounding; with a float32 bias torch's product is rounded
    before."""
    torch.manual_seed(0)
    # Sums that any order gives.
    a, b = (torch.randint(-99, 100, shape).bfloat16() for shape in ((9, 16), (16, 5)))
    bias = torch.randn(5)
    one, other = torch.tensor(0.37), torch.tensor(1.9)
    exact = (a.double() @ b.double()).float()
    for scales in ((None, None), (one, None), (None, other), (one, other)):
        for given in (None, bias, bias.bfloat16()):
            expected = exact.bfloat16().float() if given is bias else exact
            if any(scale is not None for scale in scales):
                factors = [scale for scale in scales if scale is not None]
                expected = expected * (factors[0] * factors[1] if len(factors) == 2 else factors[0])
            expected = (expected if given is None else expected + given.float()).bfloat16()
            for backend in ("reference", "cpu"):
                with use_backend(backend), cpu_products(torch.bfloat16):
                    made = scaled_mm(a, b, *scales, given, torch.bfloat16)
                assert torch.equal(made, expected), (backend, scales, given)


def test_operands_are_not_written(wide: None) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    before = a.clone(), b.clone()
    scaled_mm(a, b, torch.tensor(2.0), None, torch.ones(5), torch.float32)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_bytes_of_quantized_operands_do_not_depend_on_the_product(recipe: Any) -> None:
    """What differs between machines is sums: what a layer saves is the same."""
    torch.manual_seed(0)
    layer = ottava.nn.Linear(24, 7, recipe=recipe).bfloat16()
    x = torch.randn(5, 24).bfloat16()

    def saved(dtype: torch.dtype) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with (
            cpu_products(dtype),
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        ):
            layer(x)
        return kept

    for one, other in zip(saved(torch.float32), saved(torch.bfloat16), strict=True):
        assert torch.equal(one, other)


# -- layers in high precision --


def layers(
    bias: bool = True, features: tuple[int, int] = (24, 7)
) -> tuple[ottava.nn.Linear, torch.nn.Linear]:
    """One of ours in bfloat16, and torch's of the same values in float32."""
    torch.manual_seed(0)
    ours = ottava.nn.Linear(*features, bias=bias).bfloat16()
    theirs = torch.nn.Linear(*features, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (24,), (2, 3, 24), (0, 24), (2, 0, 24)])
def test_a_layer_is_float32s_rounded_once(wide: None, shape: tuple[int, ...], bias: bool) -> None:
    ours, theirs = layers(bias)
    x = torch.randn(shape).bfloat16().requires_grad_()
    x32 = x.detach().float().requires_grad_()
    with Products() as seen:
        y = ours(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    y32 = theirs(x32)
    y32.backward(dy.float())
    assert set(seen.dtypes) <= {torch.float32}
    assert torch.equal(y, y32.bfloat16())
    pairs = [(x, x32), *zip(ours.parameters(), theirs.parameters(), strict=True)]
    for mine, other in pairs:
        assert mine.grad.dtype == torch.bfloat16
        # The order of a sum may be another one where torch folds dimensions otherwise.
        torch.testing.assert_close(mine.grad, other.grad.bfloat16(), rtol=2**-8, atol=1e-6)


def test_bfloat16_is_what_is_saved(wide: None) -> None:
    ours, _ = layers()
    kept: list[torch.dtype] = []
    for x in (
        torch.randn(5, 24).bfloat16().requires_grad_(),
        torch.nn.Parameter(torch.randn(5, 24).bfloat16()),
    ):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.dtype) or t, lambda t: t
        ):
            ours(x)
        assert kept == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize(
    "backend",
    ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_bfloat16_is_what_a_compiled_layer_saves(wide: None, backend: str) -> None:
    torch.compiler.reset()
    net = torch.nn.Sequential(
        ottava.nn.Linear(64, 64), torch.nn.GELU(), ottava.nn.Linear(64, 32)
    ).bfloat16()
    run, x = (
        torch.compile(net, backend=backend, fullgraph=True),
        torch.randn(16, 64).bfloat16().requires_grad_(),
    )
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        y = run(x)
    assert len(kept) >= 4
    assert set(kept) == {torch.bfloat16}
    made, expected = (
        torch.autograd.grad(out.float().square().sum(), [x, *net.parameters()])
        for out in (y, net(x))
    )
    for one, other in zip(made, expected, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_dual_numbers_see_a_layer_as_torchs(wide: None) -> None:
    ours, theirs = layers()
    x, tangent = torch.randn(5, 24).bfloat16(), torch.randn(5, 24).bfloat16()
    made = []
    for layer in (ours, theirs):
        with torch.autograd.forward_ad.dual_level():
            y = layer(
                torch.autograd.forward_ad.make_dual(
                    x.to(layer.weight.dtype), tangent.to(layer.weight.dtype)
                )
            )
            made.append(torch.autograd.forward_ad.unpack_dual(y).tangent)
    assert torch.allclose(made[0].float(), made[1].float(), rtol=1e-2, atol=1e-2)


def test_other_dtypes_keep_theirs(wide: None) -> None:
    """float64 is not narrowed, in a layer or by autocast, and what torch refuses is refused."""
    layer = ottava.nn.Linear(24, 7, dtype=torch.float64)
    x = torch.randn(5, 24, dtype=torch.float64)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected)
        plain = ottava.nn.Linear(24, 7)
        for wrong in (
            torch.ones(5, 24, dtype=torch.int64),
            torch.ones(5, 24, dtype=torch.complex64),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                plain(wrong)


def test_a_few_rows_do_not_convert_the_weight(wide: None) -> None:
    """Without gradients: the product of one row reads the weight once."""
    ours, theirs = layers()
    for rows, dtype in ((1, torch.bfloat16), (4, torch.bfloat16), (5, torch.float32)):
        x = torch.randn(rows, 24).bfloat16()
        with torch.no_grad(), Products() as seen:
            y = ours(x)
        assert set(seen.dtypes) == {dtype}
        assert torch.allclose(y.float(), theirs(x.float()), rtol=1e-2, atol=1e-2)


def test_nested_tensors_get_what_torch_gives(wide: None) -> None:
    ours, _ = layers()
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(
            [torch.randn(2, 24), torch.randn(3, 24)], dtype=torch.bfloat16, layout=layout
        )
        made, expected = ours(x), torch.nn.functional.linear(x, ours.weight, ours.bias)
        assert [
            torch.equal(a, b) for a, b in zip(made.unbind(), expected.unbind(), strict=True)
        ] == [True, True]


def test_only_gradients_that_are_asked_for_are_computed(wide: None) -> None:
    ours, _ = layers()
    for x_needs, w_needs in ((True, False), (False, True)):
        ours.weight.requires_grad_(w_needs)
        ours.weight.grad = None
        x = torch.randn(5, 24).bfloat16().requires_grad_(x_needs)
        y = ours(x)
        with Products() as seen:
            y.sum().backward()
        assert len(seen.dtypes) == 2  # one product
        assert (x.grad is None) is not x_needs
        assert (ours.weight.grad is None) is not w_needs


def test_second_derivatives(wide: None) -> None:
    ours, theirs = layers()

    def penalty(layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = torch.tanh(layer(x))
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), [x, *layer.parameters()]))

    x = torch.randn(5, 24).bfloat16()
    for mine, other in zip(penalty(ours, x), penalty(theirs, x.float()), strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=0.05, atol=0.02)


def test_transforms_see_a_layer_as_torchs(wide: None) -> None:
    ours, theirs = layers()
    x = torch.randn(5, 24).bfloat16()
    one = torch.func.grad(lambda v: ours(v).float().sum())(x)
    many = torch.func.vmap(lambda v: ours(v))(x)
    _, tangent = torch.func.jvp(ours, (x,), (torch.ones_like(x),))
    with torch.no_grad():
        torch.testing.assert_close(many, theirs(x.float()).bfloat16(), rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(
            one, theirs.weight.sum(0).expand(5, 24).bfloat16(), rtol=2**-7, atol=1e-3
        )
        expected = (theirs(x.float() + 1) - theirs(x.float())).bfloat16()
        torch.testing.assert_close(tangent, expected, rtol=0.02, atol=0.01)


def test_regions_without_a_recipe_get_the_same_product(wide: None, recipe: Any) -> None:
    ours, theirs = layers()
    x = torch.randn(5, 24).bfloat16()
    expected = theirs(x.float()).bfloat16()
    ours.bind(recipe)
    for region in (
        ottava.autocast(enabled=False),
        ottava.autocast(enabled=False, calibrating=True),
    ):
        with region, Products() as seen:
            y = ours(x)
        assert set(seen.dtypes) == {torch.float32}
        assert torch.equal(y, expected)


def test_autocast_rounds_operands_as_torch_does(wide: None) -> None:
    torch.manual_seed(0)
    ours = ottava.nn.Linear(24, 7)
    x = torch.randn(5, 24, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), Products() as seen:
        y = ours(x)
        # Within the region, where a product of torch's would be rounded again.
        y.float().square().sum().backward()
    assert set(seen.dtypes) == {torch.float32}
    rounded = [t.detach().bfloat16().float() for t in (x, ours.weight, ours.bias)]
    assert torch.equal(y, torch.nn.functional.linear(*rounded).bfloat16())
    dy = (2 * y.detach().float()).bfloat16()
    assert x.grad.dtype == ours.weight.grad.dtype == torch.float32
    assert torch.equal(x.grad, (dy.float() @ rounded[1]).bfloat16().float())
    assert torch.equal(ours.weight.grad, (dy.float().t() @ rounded[0]).bfloat16().float())


def test_main_grad_gets_the_gradient(wide: None) -> None:
    ours, theirs = layers()
    ours.fuse_wgrad_accumulation = True
    ours.weight.main_grad = torch.zeros(7, 24)
    x = torch.randn(5, 24).bfloat16()
    ours(x).sum().backward()
    theirs(x.float()).sum().backward()
    assert ours.weight.grad is None
    assert torch.equal(ours.weight.main_grad, theirs.weight.grad.bfloat16().float())


def test_compiled_layers_give_the_bytes_of_eager(wide: None) -> None:
    ours, _ = layers()
    x = torch.randn(5, 24).bfloat16()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    outcomes = []
    for call in (ours, compiled):
        ours.zero_grad()
        y = call(x)
        y.sum().backward()
        outcomes.append((y, ours.weight.grad, ours.bias.grad))
    for eager, traced in zip(*outcomes, strict=True):
        assert torch.equal(eager, traced)


def test_what_torch_refuses_is_refused(wide: None) -> None:
    ours, _ = layers()
    with pytest.raises(RuntimeError, match="dtype"):
        ours(torch.randn(5, 24))
    with pytest.raises(TypeError, match="Tensor"):
        ours([1.0] * 24)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        ours(torch.randn(5, 23).bfloat16())
