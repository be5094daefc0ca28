"""Linear under a recipe: values against float64, gradients, what it saves and costs, regions, what
surrounds it in a training script, and what it refuses."""

from __future__ import annotations

import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ottava
from ottava.errors import (
    DeviceError,
    DTypeError,
    OptionError,
    RecipeNotFoundError,
    ShapeError,
    UsageError,
)
from ottava.nn import Linear, plan
from ottava.tensors import columnwise_layout

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def layer_of(recipe: Any, k: int = 7, n: int = 5, dtype: torch.dtype = F32, **options: Any) -> Any:
    torch.manual_seed(0)
    return Linear(k, n, dtype=dtype, recipe=recipe, **options)


@pytest.mark.parametrize("layout", ["shared", "transpose"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 4), (0,), (2, 0)], ids=str)
def test_without_gradients_the_output_is_the_same(
    recipe: Any, lead: tuple[int, ...], layout: Any
) -> None:
    """tests/core/layouts/test_products.py compares it with the products of quantized operands."""
    for dtype in (F32, BF16, F16):
        layer = layer_of(recipe, dtype=dtype)
        x = torch.randn(*lead, 7, dtype=dtype, requires_grad=True)
        with columnwise_layout(layout):
            y = layer(x)
            y.sum().backward()
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    alone = layer(x)
                assert torch.equal(alone, y)
                assert not alone.requires_grad
                assert not alone._is_view()


def test_only_wanted_products_are_computed(recipe: Any) -> None:
    layer, x = layer_of(recipe, 64, 64, BF16), torch.randn(128, 64, dtype=BF16)
    for x_needs, w_needs, products in ((1, 1, 3), (0, 1, 2), (1, 0, 2), (0, 0, 1)):
        layer.weight.requires_grad_(bool(w_needs))
        with FlopCounterMode(display=False) as counter:
            layer(x.detach().requires_grad_(bool(x_needs))).sum().backward()
        assert counter.get_total_flops() == products * 2 * 128 * 64 * 64
    x.requires_grad_()
    # A hook may keep another form of what is saved.
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.numpy, torch.from_numpy):
        y = layer(x).float().square().sum()
    expected = torch.autograd.grad(layer(x).float().square().sum(), x)
    assert torch.equal(torch.autograd.grad(y, x)[0], expected[0])


def test_a_loss_that_is_kept_holds_no_quantized_weight(recipe: Any) -> None:
    """A training loop holds the loss of the last microbatch until the next one has run."""
    layer = layer_of(recipe)
    loss = layer(torch.randn(4, 7, requires_grad=True), is_first_microbatch=True).sum()
    data = weakref.ref(layer._binding.microbatch_weight.storage._data)
    loss.backward()
    assert data() is not None
    layer.half()
    assert data() is None, loss


def test_sizes_that_never_repeat_make_no_more_plans_than_the_limit(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LIMIT", 3)
    layer = layer_of(recipe)
    inputs = [torch.randn(rows, 7) for rows in (1, 2, 3, 4, 5, 6, 1)]
    with torch.no_grad():
        outputs = [layer(x) for x in inputs]
        assert 0 < len(layer._binding.plans) <= 3
        for x, y in zip(inputs, outputs, strict=True):
            assert torch.equal(y, layer_of(recipe)(x))


# -- regions --


def test_regions_override_bound_recipes(recipe: Any) -> None:
    x, bound, free = torch.randn(4, 7), layer_of(recipe), layer_of(None)
    high = torch.nn.functional.linear(x, bound.weight, bound.bias)
    low = bound(x)
    assert not torch.equal(high, low)

    @ottava.autocast(recipe)
    def decorated() -> torch.Tensor:
        return free(x)  # type: ignore[no-any-return]

    def results() -> list[bool]:
        """Whether the bound and the free layer compute in low precision."""
        outputs = [bound(x), free(x)]
        assert all(torch.equal(y, low) or torch.equal(y, high) for y in outputs)
        return [torch.equal(y, low) for y in outputs]

    assert results() == [True, False]
    with ottava.autocast():
        assert results() == [True, False]
    with ottava.autocast(recipe):
        assert results() == [True, True]
        with ottava.autocast(enabled=False):
            assert results() == [False, False]
        with ottava.autocast():
            assert results() == [True, True]
    with pytest.raises(ZeroDivisionError), ottava.autocast(recipe):
        raise ZeroDivisionError
    assert results() == [True, False]
    assert torch.equal(decorated(), low)
    region = ottava.autocast(recipe)

    def in_thread(_: int) -> list[bool]:
        with region:
            inside = results()
        return [*inside, *results()]

    with ThreadPoolExecutor(4) as pool, region:
        assert list(pool.map(in_thread, range(40))) == [[True, True, True, False]] * 40
        assert results() == [True, True]


def test_a_region_in_which_no_layer_runs_warns_once(recipe: Any) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    plain, layer = torch.nn.Linear(4, 4), Linear(4, 4, recipe=recipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with ottava.autocast(recipe):
                plain(x)
    (warning,) = caught
    assert "no layer of Ottava ran inside of ottava.autocast" in str(warning.message)
    assert "ottava.convert" in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ottava.autocast(recipe), ottava.autocast():
            y = checkpoint(layer, x, use_reentrant=False)
        with ottava.autocast(recipe):
            y.sum().backward()
        with ottava.autocast(enabled=False):
            plain(x)
        with pytest.raises(ZeroDivisionError), ottava.autocast(recipe):
            raise ZeroDivisionError


def test_wrong_arguments_of_a_region_and_of_a_layer_are_refused(recipe: Any) -> None:
    layer, x = layer_of(recipe), torch.ones(1, 7)
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: ottava.autocast(3), DTypeError, "recipe"),  # type: ignore[arg-type]
        (lambda: ottava.autocast("nonesuch"), RecipeNotFoundError, "recipe 'nonesuch'"),
        (lambda: ottava.autocast(recipe, enabled=1), OptionError, "enabled"),  # type: ignore[arg-type]
        (lambda: ottava.autocast(amax_reduction_group=3), OptionError, "group"),  # type: ignore[arg-type]
        (lambda: ottava.quantized_model_init("nonesuch").__enter__(), RecipeNotFoundError, "none"),
        (lambda: layer(x, is_first_microbatch=1), OptionError, "is_first_microbatch is 1"),
        (lambda: recipe.quantizer(5), DTypeError, "5|int"),
    ]
    for call, error, words in calls:
        with pytest.raises(error, match=words):
            call()


# -- what surrounds a layer --


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_repeats_the_forward_whatever_is_around_it(
    recipe: Any, reentrant: bool
) -> None:
    for region in (False, True):
        layer = layer_of(None if region else recipe, 7, 7)
        x, results = torch.randn(4, 7, requires_grad=True), []
        for checkpointed in (False, True):
            layer.zero_grad()
            x.grad = None
            with ottava.autocast(recipe) if region else nullcontext():
                y = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            # Another forward pass, and another region around the backward pass.
            layer.eval()
            with torch.no_grad(), ottava.autocast(enabled=False):
                layer(x)
            layer.train()
            with ottava.autocast(enabled=False):
                y.square().sum().backward()
            results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
        for plain, again in zip(*results, strict=True):
            assert torch.equal(plain, again)


def test_a_layer_may_run_first_inside_of_a_backward_pass(recipe: Any) -> None:
    layer, x, seen = layer_of(recipe), torch.randn(4, 7, requires_grad=True), []
    x.register_hook(lambda grad: seen.append(layer(grad).detach()))
    (2 * x).sum().backward()
    assert torch.equal(seen[0], layer(torch.full((4, 7), 2.0)))


@pytest.mark.parametrize("gradients", [False, True])
def test_torchs_autocast_says_the_dtype(recipe: Any, gradients: bool) -> None:
    """301 is no bfloat16: the gradient of a float32 bias is not rounded to one."""
    layer, x = layer_of(recipe), torch.randn(301, 7, requires_grad=True)
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", BF16):
        y = layer(x)
        assert y.dtype == BF16
        with torch.autocast("cpu", enabled=False):
            assert layer(x).dtype == F32
    assert y.requires_grad is gradients
    if gradients:
        y.sum().backward()
        assert x.grad.dtype == layer.weight.grad.dtype == F32
        assert layer.bias.grad.tolist() == [301.0] * 5


def test_the_output_may_be_modified_in_place(recipe: Any) -> None:
    layer = layer_of(recipe)
    for lead in ((), (3,), (2, 3), (0,)):
        x = torch.randn(*lead, 7)
        y, z = torch.nn.ReLU(inplace=True)(layer(x)), layer(x)
        z += 1
        (y.sum() + z.sum()).backward()
        assert torch.equal(y, torch.relu(layer(x)))
        assert torch.equal(z, layer(x) + 1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("k", "n"), [(0, 4), (4, 0), (0, 0)])
def test_layers_without_features(recipe: Any, k: int, n: int) -> None:
    layer, x = layer_of(recipe, k, n), torch.randn(3, k, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, layer.bias.expand(3, n))
    assert (x.grad.shape, layer.weight.grad.shape) == ((3, k), (n, k))


def test_second_derivatives_are_refused(recipe: Any) -> None:
    layer, x = layer_of(recipe), torch.randn(3, 7, requires_grad=True)
    # Of the second the incoming gradient is a constant, which its own gradient does not need.
    for loss in (layer(x).pow(2).sum(), layer(x).sum()):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(UsageError, match="differentiated again"):
            gradient.sum().backward()
    layer(x).sum().backward(create_graph=True)
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("gradients", [False, True])
def test_tensors_without_memory_and_tracing(recipe: Any, gradients: bool) -> None:
    layer, x = layer_of(recipe), torch.randn(4, 7)
    on_meta = Linear(7, 5, device="meta", recipe=recipe)
    with torch.set_grad_enabled(gradients):
        with FakeTensorMode():
            fake = layer_of(recipe)(torch.randn(2, 3, 7))
        assert (type(fake), fake.shape) == (FakeTensor, (2, 3, 5))
        assert on_meta(torch.empty(2, 3, 7, device="meta")).shape == (2, 3, 5)
    with torch.no_grad():
        graph = make_fx(layer)(x)
        assert sum("ottava." in str(node.target) for node in graph.graph.nodes) >= 3
        # What was looked up while the graph was made is no constant of it.
        assert torch.equal(graph(2 * x), layer(2 * x))


def test_a_layer_is_pickled_without_its_process_group(recipe: Any) -> None:
    class Group:
        group_name = "some group"

        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle a process group")

    layer, x = layer_of(recipe), torch.randn(2, 7)
    with ottava.autocast(amax_reduction_group=Group()):
        layer(x)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


# -- what is refused --

INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "features": (torch.zeros(4, 8), ShapeError, "last dimension of 7"),
    "no dimension": (torch.zeros(()), ShapeError, "last dimension of 7"),
    "int64": (torch.zeros(4, 7, dtype=torch.int64), DTypeError, r"dtype torch\.int64"),
    "complex64": (torch.zeros(4, 7, dtype=torch.complex64), DTypeError, "dtype"),
    "another dtype": (torch.zeros(4, 7, dtype=BF16), DTypeError, "one dtype"),
    "meta": (torch.zeros(4, 7, device="meta"), DeviceError, "one device"),
    "list": ([1.0], DTypeError, "is a list"),
    "sparse": (torch.zeros(4, 7).to_sparse(), DTypeError, r"layout (?s:.*)\.to_dense\(\)"),
    "csr": (torch.zeros(4, 7).to_sparse_csr(), DTypeError, r"layout (?s:.*)\.to_dense\(\)"),
    "mkldnn": (torch.zeros(4, 7).to_mkldnn(), DTypeError, r"layout (?s:.*)\.to_dense\(\)"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_does_not_fit_is_named(recipe: Any, name: str) -> None:
    value, error, words = INPUTS[name]
    layer = layer_of(recipe, name="block.0")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), pytest.raises(error, match=words) as caught:
            layer(value)
        assert "input of Linear 'block.0'" in str(caught.value)
        assert "Expected" in str(caught.value)


PARAMETERS: list[tuple[str, torch.Tensor, type[Exception], str]] = [
    ("weight", torch.ones(5, 9), ShapeError, r"weight .* has shape \(5, 9\).*\[\*, 7\]"),
    ("weight", torch.ones(7), ShapeError, r"weight .* has shape \(7,\)"),
    ("weight", torch.ones(2, 5, 7), ShapeError, r"weight .* has shape \(2, 5, 7\)"),
    ("weight", torch.ones(9, 7), ShapeError, r"bias .* has shape \(5,\).*\(9,\)"),
    ("weight", torch.ones(5, 7).double(), DTypeError, r"weight .* has dtype torch\.float64"),
    ("bias", torch.ones(3), ShapeError, r"bias .* has shape \(3,\).*\(5,\)"),
    ("bias", torch.ones(5, 1), ShapeError, r"bias .* has shape \(5, 1\).*\(5,\)"),
    ("bias", torch.ones(()), ShapeError, r"bias .* has shape \(\)"),
    ("bias", torch.ones(5, device="meta"), DeviceError, "bias .* is on meta, its weight on cpu"),
    ("bias", torch.ones(5).to_sparse(), DTypeError, r"bias .* layout torch.sparse(?s:.*)to_dense"),
    *(
        ("bias", torch.ones(5).to(dtype), DTypeError, f"bias .* has dtype {dtype}")
        for dtype in (torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "words"), PARAMETERS)
def test_parameters_that_do_not_fit_are_named(
    recipe: Any, name: str, value: torch.Tensor, error: type[Exception], words: str
) -> None:
    """Kernels, which read by addresses, would read beyond them, or multiply a part; also where the
    layer has run with parameters that fit."""
    layer = layer_of(recipe, name="block.0")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            layer(torch.randn(4, 7))
    setattr(layer, name, torch.nn.Parameter(value, requires_grad=value.is_floating_point()))
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), pytest.raises(error, match=words) as caught:
            layer(torch.randn(4, 7))
        assert "block.0" in str(caught.value)
    # Where they fit each other the numbers that a layer was made of say nothing.
    layer.weight, layer.bias = map(torch.nn.Parameter, (torch.ones(3, 9), torch.ones(3)))
    torch.testing.assert_close(layer(torch.ones(4, 9)), torch.full((4, 3), 10.0))
