"""``MXFP8BlockScaling``: what it says, and ``Linear`` and FP8-primary weights under it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError
from ottava.formats import Format
from ottava.kernels.parts import mx_quantize_parts
from ottava.nn import Linear
from ottava.recipes.role import QuantizerRole
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Quantizer, MXFP8Tensor
from ottava_mxfp8 import quantizer as quantizer_module

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
RECIPES = {
    "default": MXFP8BlockScaling(),
    "squares": MXFP8BlockScaling(with_2d_quantization=True),
    "hybrid floor": MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rounding="floor"),
    "e5m2": MXFP8BlockScaling(fp8_format=Format.E5M2),
}


def spread(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, sigma: float = 3.0) -> torch.Tensor:
    """Rows and columns of its blocks keep different values."""
    random = torch.Generator().manual_seed(seed)
    sigma = min(sigma, 1.0) if dtype == torch.float16 else sigma
    return (torch.randn(shape, generator=random) * torch.exp(sigma * torch.randn(shape, generator=random))).to(dtype)


def layer_of(recipe: Any, n: int = 33, k: int = 70, dtype: torch.dtype = torch.float32, **options: Any) -> Linear:
    layer = Linear(k, n, dtype=dtype, recipe=recipe, **options)
    with torch.no_grad():
        layer.weight.copy_(spread(n, k, seed=11, sigma=1.0 if dtype == torch.float16 else 3.0))
        if layer.bias is not None:
            layer.bias.copy_(spread(n, seed=12, sigma=1.0))
    return layer


def direction(recipe: MXFP8BlockScaling, role: str, value: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """What a tensor is worth along rows or columns, as a float64 matrix; decoded by torch's own conversions."""
    quantizer = recipe.quantizer(role).with_usage(not columnwise, columnwise)
    matrix = value.detach().reshape(math.prod(value.shape[:-1]), value.shape[-1])
    q = quantizer(matrix)
    codes, scales = (
        (q._columnwise_data, q._columnwise_scale_inv) if columnwise else (q._rowwise_data, q._rowwise_scale_inv)
    )
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, 0 if columnwise else 1)
    return codes.view(quantizer.fp8_dtype).double() * powers[: matrix.shape[0], : matrix.shape[1]]


def close(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether ``got`` is ``a @ b + bias`` up to sums in float32 and two roundings to its dtype."""
    product = a @ b
    exact = product if bias is None else product + bias.detach().double()
    error = torch.finfo(got.dtype).eps * (product.abs() + exact.abs())
    error = error + (a.shape[1] + 2) * 2.0**-23 * (a.abs() @ b.abs() + exact.abs())
    smallest = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    return bool(((got.detach().double().reshape(exact.shape) - exact).abs() <= error + 2 * smallest).all())


# The recipe


def test_the_recipe_is_found_and_described() -> None:
    (spec,) = [spec for spec in ottava.list_recipes() if spec.name == "mxfp8"]
    assert spec.block_size == (1, 32)
    assert spec.formats == ("E4M3", "E5M2")
    assert spec.fake_quant_formats == ("MXFP8E4M3", "MXFP8E5M2")
    assert not spec.stateful
    assert not spec.needs_reduction
    assert "block 1x32" in spec.capabilities
    assert ottava.get_recipe("mxfp8") == MXFP8BlockScaling()
    made = ottava.get_recipe("mxfp8", fp8_format=Format.HYBRID, with_2d_quantization=True, scale_rounding="floor")
    assert made == MXFP8BlockScaling(Format.HYBRID, True, "floor")
    assert made.name == "mxfp8"
    assert not made.stateful
    defaults = {field.name: field.default for field in dataclasses.fields(MXFP8BlockScaling)}
    assert defaults == {"fp8_format": Format.E4M3, "with_2d_quantization": False, "scale_rounding": "up"}


def test_recipes_are_values() -> None:
    one, two = MXFP8BlockScaling(), MXFP8BlockScaling(scale_rounding="floor")
    assert one == MXFP8BlockScaling()
    assert hash(one) == hash(MXFP8BlockScaling())
    assert one != two
    assert copy.deepcopy(two) == two
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.scale_rounding = "floor"  # type: ignore[misc]


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("rounding", ["up", "floor"])
def test_quantizers_by_role(fmt: Format, square: bool, rounding: str) -> None:
    """Gradients have the format of the backward pass; weights alone have squares."""
    recipe = MXFP8BlockScaling(fp8_format=fmt, with_2d_quantization=square, scale_rounding=rounding)
    formats = {
        Format.E4M3: (E4M3, E4M3),
        Format.E5M2: (E5M2, E5M2),
        Format.HYBRID: (E4M3, E5M2),
    }[fmt]
    for role in ("input", "weight", "output", "grad_output", "grad_input"):
        for asked in (role, QuantizerRole("linear", role, "block.0")):
            quantizer = recipe.quantizer(asked)
            assert quantizer == MXFP8Quantizer(
                formats[role.startswith("grad")],
                with_2d_quantization=square and role == "weight",
                scale_rounding=rounding,
            )
    for name, fp8_dtype in (("MXFP8E4M3", E4M3), ("MXFP8E5M2", E5M2)):
        fake = recipe.fake_quantizer(name)
        assert isinstance(fake, MXFP8Quantizer)
        assert fake.fp8_dtype == fp8_dtype
        assert fake.scale_rounding == rounding
        assert fake.rowwise_usage
        assert not fake.with_2d_quantization
    for name in ("FP8E4M3", "mxfp8e4m3", "", "MXFP8"):
        assert recipe.fake_quantizer(name) is None


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "format text": (r"fp8_format is 'E4M3'.*Format.E4M3, Format.E5M2, Format.HYBRID", {"fp8_format": "E4M3"}),
    "format dtype": ("fp8_format is torch.float8_e4m3fn", {"fp8_format": E4M3}),
    "format None": ("fp8_format is None", {"fp8_format": None}),
    "squares": ("with_2d_quantization is 'yes'.*True or False", {"with_2d_quantization": "yes"}),
    "squares None": ("with_2d_quantization is None", {"with_2d_quantization": None}),
    "rounding": ("scale_rounding is 'nearest'.*'up' or 'floor'", {"scale_rounding": "nearest"}),
    "rounding None": ("scale_rounding is None", {"scale_rounding": None}),
    "rounding bool": ("scale_rounding is True", {"scale_rounding": True}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case: str) -> None:
    message, options = BAD[case]
    with pytest.raises(OptionError, match=message):
        MXFP8BlockScaling(**options)
    with pytest.raises(OptionError, match=message):
        ottava.get_recipe("mxfp8", **options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(OptionError, match=r"margin.*fp8_format"):
        ottava.get_recipe("mxfp8", margin=0)


# Linear


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead", [(), (1,), (70,), (3, 11), (2, 1, 4), (0,), (2, 0)])
def test_each_product_takes_the_direction_that_it_reduces(name: str, lead: Any, dtype: torch.dtype) -> None:
    recipe = RECIPES[name]
    layer = layer_of(recipe, dtype=dtype)
    x = spread(*lead, 70, dtype=dtype).requires_grad_()
    dy = spread(*lead, 33, dtype=dtype, seed=1, sigma=1.0)
    y = layer(x)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    assert y.shape == (*lead, 33)
    values = {"input": x, "weight": layer.weight, "grad_output": dy}
    rows = {role: direction(recipe, role, value, False) for role, value in values.items()}
    columns = {role: direction(recipe, role, value, True) for role, value in values.items()}
    assert close(y, rows["input"], rows["weight"].t(), layer.bias)
    assert close(x.grad, rows["grad_output"], columns["weight"])
    assert close(layer.weight.grad, columns["grad_output"].t(), columns["input"])
    total = dy.reshape(-1, 33).double().sum(0)
    slack = torch.finfo(dtype).eps * total.abs() + 2.0**-20 * dy.reshape(-1, 33).double().abs().sum(0)
    assert bool(((layer.bias.grad.double() - total).abs() <= slack).all())
    # E5M2 reaches so far down that what one direction loses does not count in the other.
    if dtype == torch.float32 and lead == (70,) and name != "e5m2":
        # The other directions give something else: the comparisons above tell them apart.
        assert not close(y, columns["input"], rows["weight"].t(), layer.bias)
        assert not close(x.grad, columns["grad_output"], columns["weight"])
        assert not close(layer.weight.grad, rows["grad_output"].t(), columns["input"])
        assert not close(layer.weight.grad, columns["grad_output"].t(), rows["input"])
        if name != "squares":
            assert not close(y, rows["input"], columns["weight"].t(), layer.bias)
            assert not close(x.grad, rows["grad_output"], rows["weight"])


def test_backward_quantizes_the_original_and_not_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first element of each row of blocks flushes the others to 0 along the row, but not along columns."""
    x = torch.full((32, 32), 2.0**-10)
    x[:, 0] = 2.0**10
    layer = Linear(32, 1, bias=False, recipe=MXFP8BlockScaling())
    with torch.no_grad():
        layer.weight.fill_(1.0)
    y = layer(x)
    assert torch.equal(y, torch.full((32, 1), 2.0**10))
    y.backward(torch.ones(32, 1))
    expected = torch.full((1, 32), 32 * 2.0**-10)
    expected[0, 0] = 32 * 2.0**10
    assert torch.equal(layer.weight.grad, expected)


def saved(run: Callable[[], Any]) -> list[torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return list(seen.values())


def size(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", RECIPES)
def test_only_codes_are_saved(name: str) -> None:
    layer, plain = layer_of(RECIPES[name], 96, 64, torch.bfloat16), torch.nn.Linear(64, 96, dtype=torch.bfloat16)
    x = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    ours, theirs = saved(lambda: layer(x)), saved(lambda: plain(x))
    assert {t.dtype for t in ours} == {torch.uint8}
    assert size(theirs) == 2 * (128 * 64 + 96 * 64)
    assert size(ours) <= 0.52 * size(theirs)
    # Columns of the input and of the weight: codes and their scales.
    assert sorted(tuple(t.shape) for t in ours) == [(3, 64), (4, 64), (96, 64), (128, 64)]


def test_what_needs_no_gradient_is_neither_quantized_nor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[tuple[int, ...], bool, bool]] = []
    quantize = mx_quantize_parts

    def counting(x: torch.Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, *options: Any) -> Any:
        made.append((tuple(x.shape), rowwise, columnwise))
        return quantize(x, fp8_dtype, rowwise, columnwise, *options)

    monkeypatch.setattr(quantizer_module, "mx_quantize_parts", counting)
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    for x_needs in (False, True):
        for w_needs in (False, True):
            layer = layer_of(MXFP8BlockScaling(), 32, 96, torch.bfloat16)
            layer.weight.requires_grad_(w_needs)
            made.clear()
            given = x.clone().requires_grad_(x_needs)
            outputs: list[torch.Tensor] = []
            kept = saved(lambda: outputs.append(layer(given)))  # noqa: B023
            assert made == [((64, 96), True, w_needs), ((32, 96), True, x_needs)]
            assert size(kept) == w_needs * (64 * 96 + 2 * 96) + x_needs * (32 * 96 + 96)
            made.clear()
            outputs[0].sum().backward()
            assert made == [((64, 32), x_needs, w_needs)] * (x_needs or w_needs)
            assert (given.grad is not None) is x_needs
            assert (layer.weight.grad is not None) is w_needs
            assert layer.bias.grad is not None
    made.clear()
    with torch.no_grad():
        assert saved(lambda: layer(x.requires_grad_())) == []
    assert made == [((64, 96), True, False), ((32, 96), True, False)]
    assert not layer.requires_grad_(False)(x.detach()).requires_grad


@pytest.mark.parametrize("bias", [False, True])
def test_accumulation_and_double_use_add_up(bias: bool) -> None:
    layer = layer_of(MXFP8BlockScaling(), 70, 70, bias=bias)
    a, b = spread(33, 70), spread(5, 70, seed=2)
    singles = []
    for batch in (a, b):
        layer.zero_grad()
        layer(batch).sum().backward()
        singles.append([p.grad.clone() for p in layer.parameters()])
    layer.zero_grad()
    layer(a).sum().backward()
    layer(b).sum().backward()
    assert all(torch.equal(p.grad, one + two) for p, one, two in zip(layer.parameters(), *singles, strict=True))
    layer.zero_grad()
    first, second = layer(a), layer(b)
    second.sum().backward()
    first.sum().backward()
    assert all(torch.equal(p.grad, two + one) for p, one, two in zip(layer.parameters(), *singles, strict=True))
    layer.zero_grad()
    layer(layer(a)).sum().backward()
    assert bool(layer.weight.grad.isfinite().all())
    assert bool(layer.weight.grad.any())


def test_first_microbatch_keeps_the_quantized_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(MXFP8BlockScaling()), spread(40, 70).requires_grad_()
    expected = layer(x)
    expected.sum().backward()
    grads = x.grad.clone(), layer.weight.grad.clone()
    for first in (True, False):
        x.grad = None
        layer.zero_grad()
        y = layer(x, is_first_microbatch=first)
        assert torch.equal(y, expected)
        if first:
            with torch.no_grad():
                layer.weight.add_(0.0).mul_(3.0)
        y.sum().backward()
        assert torch.equal(x.grad, grads[0])
        assert torch.equal(layer.weight.grad, grads[1])
    assert not torch.equal(layer(x, is_first_microbatch=True), expected)
    assert torch.equal(layer(x, is_first_microbatch=True), layer(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("region", [False, True])
def test_activation_checkpointing_equals_plain(use_reentrant: bool, primary: bool, region: bool) -> None:
    recipe = MXFP8BlockScaling(fp8_format=Format.HYBRID)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layer = layer_of(None if region else recipe, 70, 70)
    assert isinstance(layer.weight, MXFP8Tensor) is primary
    x = spread(33, 70).requires_grad_()

    def run(checkpointed: bool) -> list[torch.Tensor]:
        layer.zero_grad()
        x.grad = None
        with ottava.autocast(recipe) if region else ottava.autocast():
            y = checkpoint(layer, x, use_reentrant=use_reentrant) if checkpointed else layer(x)
        y.square().sum().backward()
        return [y, x.grad, layer.weight.grad, layer.bias.grad]

    for plain, again in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("primary", [False, True])
def test_torch_autocast(primary: bool) -> None:
    recipe = MXFP8BlockScaling()
    with ottava.quantized_model_init(recipe, enabled=primary):
        layer = layer_of(recipe)
    x = spread(40, 70).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    weight = layer.weight.detach()
    rows = recipe.quantizer("weight")(weight) if not primary else weight
    exact = rows.dequantize(torch.float64)
    assert close(y, direction(recipe, "input", x, False), exact.t(), layer.bias)


def test_regions_and_conversion() -> None:
    recipe = MXFP8BlockScaling(scale_rounding="floor")
    plain = torch.nn.Sequential(torch.nn.Linear(70, 64), torch.nn.GELU(), torch.nn.Linear(64, 33)).bfloat16()
    free = copy.deepcopy(plain)
    converted = ottava.convert(copy.deepcopy(plain), recipe)
    assert ottava.conversion_report(converted).swapped == ("0", "2")
    assert all(isinstance(converted[i], Linear) for i in (0, 2))
    x = spread(40, 70, dtype=torch.bfloat16)
    low = converted(x)
    assert not torch.equal(low, plain(x))
    for i in (0, 2):
        free[i] = Linear.from_linear(free[i])
    assert torch.equal(free(x), plain(x))
    with ottava.autocast(recipe):
        assert torch.equal(free(x), low)
        with ottava.autocast("mxfp8"):
            assert not torch.equal(free(x), low)
            assert torch.equal(free(x), ottava.convert(copy.deepcopy(plain), "mxfp8")(x))
        with ottava.autocast(enabled=False):
            assert torch.equal(converted(x), plain(x))
    assert torch.equal(free(x), plain(x))


def test_the_same_twice() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        net = ottava.convert(torch.nn.Sequential(torch.nn.Linear(70, 64), torch.nn.Linear(64, 33)), "mxfp8")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(40, 70)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    assert all(torch.equal(one, two) for one, two in zip(run(), run(), strict=True))


def train(recipe: Any, primary: bool) -> float:
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe or "mxfp8", enabled=primary):
        net = torch.nn.Sequential(Linear(32, 64, recipe=recipe), torch.nn.GELU(), Linear(64, 8, recipe=recipe))
    net = net.bfloat16()
    x = torch.randn(256, 32).bfloat16()
    y = torch.sin(x @ torch.randn(32, 8).bfloat16())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x).float(), y.float())
        loss.backward()
        optimizer.step()
    return loss.item()


def test_a_model_learns_as_in_bfloat16() -> None:
    # From about 0.5 at the start.
    assert train(None, False) < 0.06
    assert train(RECIPES["default"], False) < 0.08
    # Weights that are kept in 8 bits alone miss small updates.
    assert train(RECIPES["default"], True) < 0.2


BAD_INPUT: list[tuple[Any, type[OttavaError]]] = [
    (torch.zeros(4, 8), ShapeError),
    (torch.zeros(()), ShapeError),
    (torch.zeros(4, 70, dtype=torch.int64), DTypeError),
    (torch.zeros(4, 70, dtype=torch.float64), DTypeError),
    (torch.zeros(4, 70, dtype=torch.bfloat16), DTypeError),
    (torch.zeros(4, 70, device="meta"), DeviceError),
    ([1.0, 2.0], DTypeError),
]


@pytest.mark.parametrize("number", range(len(BAD_INPUT)))
@pytest.mark.parametrize("primary", [False, True])
def test_bad_input_is_named(number: int, primary: bool) -> None:
    value, error = BAD_INPUT[number]
    with ottava.quantized_model_init("mxfp8", enabled=primary):
        layer = layer_of(MXFP8BlockScaling(), name="block.0")
    with pytest.raises(error, match=r"(?s)Expected"):
        layer(value)


def test_a_quantized_input_is_taken_by_its_values() -> None:
    layer, x = layer_of(MXFP8BlockScaling()), spread(64, 70)
    q = MXFP8Quantizer(E4M3)(x)
    assert torch.equal(layer(q), layer(q.dequantize()))
    leaf = x.clone().requires_grad_()
    layer(MXFP8Quantizer(E4M3)(leaf)).sum().backward()
    other = q.dequantize().requires_grad_()
    layer(other).sum().backward()
    assert torch.equal(leaf.grad, other.grad)


# FP8-primary weights


def primary_net(recipe: Any = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Sequential:
    recipe = recipe or MXFP8BlockScaling()
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe):
        return torch.nn.Sequential(
            Linear(70, 64, dtype=dtype, recipe=recipe),
            torch.nn.ReLU(inplace=True),
            Linear(64, 33, dtype=dtype, recipe=recipe),
        )


def check_bytes(one: Any, two: Any) -> None:
    for name in INNER:
        assert torch.equal(getattr(one, name), getattr(two, name)), name


@pytest.mark.parametrize("name", RECIPES)
def test_primary_weights_hold_the_quantized_initial_values(name: str) -> None:
    recipe = RECIPES[name]
    net = primary_net(recipe)
    for layer in (net[0], net[2]):
        weight = layer.weight
        assert isinstance(weight, MXFP8Tensor)
        assert isinstance(weight, torch.nn.Parameter)
        assert weight.get_usages() == {"rowwise": True, "columnwise": True}
        initial = weight.get_high_precision_init_val()
        assert type(initial) is torch.Tensor
        check_bytes(weight, recipe.quantizer("weight")(initial))
        assert type(layer.bias) is torch.nn.Parameter
    # The same as quantizing the initial values in every step.
    twin = torch.nn.Sequential(Linear(70, 64, recipe=recipe), torch.nn.ReLU(), Linear(64, 33, recipe=recipe))
    with torch.no_grad():
        for i in (0, 2):
            twin[i].weight.copy_(net[i].weight.get_high_precision_init_val())
            twin[i].bias.copy_(net[i].bias)
    results = []
    for model in (net, twin):
        x = spread(40, 70).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert type(mine) is type(theirs)
        assert torch.equal(mine, theirs)
    net[0].weight.clear_high_precision_init_val()
    assert net[0].weight.get_high_precision_init_val() is None
    with ottava.autocast(enabled=False):
        assert torch.equal(net[0](x), torch.nn.functional.linear(x, net[0].weight.dequantize(), net[0].bias))


@pytest.mark.parametrize("name", ["default", "squares"])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}], ids=["foreach", "loop", "fused"])
def test_adamw_takes_the_steps_of_plain_weights(name: str, options: dict[str, bool]) -> None:
    """Each step: the update of the dequantized values, quantized."""
    net, x = primary_net(RECIPES[name]), torch.randn(64, 70)
    weight = net[0].weight
    twin = torch.nn.Parameter(weight.dequantize().detach().clone())
    # Weight decay would be an operation of its own, rounded by itself.
    mine, theirs = (torch.optim.AdamW([p], lr=0.01, weight_decay=0.0, **options) for p in (weight, twin))
    for _ in range(4):
        mine.zero_grad()
        net(x).pow(2).mean().backward()
        twin.grad = weight.grad.clone()
        mine.step()
        theirs.step()
        expected = RECIPES[name].quantizer("weight")(twin.detach())
        check_bytes(weight, expected)
        with torch.no_grad():
            twin.copy_(expected.dequantize())
        assert type(mine.state[weight]["exp_avg"]) is torch.Tensor
    state = copy.deepcopy(mine.state_dict())
    again = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.0, **options)
    again.load_state_dict(state)
    assert torch.equal(again.state[weight]["exp_avg"], mine.state[weight]["exp_avg"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_the_steps_of_plain_weights(momentum: float) -> None:
    net, x = primary_net(), torch.randn(64, 70)
    weight = net[2].weight
    twin = torch.nn.Parameter(weight.dequantize().detach().clone())
    mine, theirs = (torch.optim.SGD([p], lr=0.5, momentum=momentum) for p in (weight, twin))
    for _ in range(3):
        mine.zero_grad()
        net(x).pow(2).mean().backward()
        twin.grad = weight.grad.clone()
        mine.step()
        theirs.step()
        expected = MXFP8Quantizer(E4M3)(twin.detach())
        check_bytes(weight, expected)
        with torch.no_grad():
            twin.copy_(expected.dequantize())
    assert isinstance(net[2].weight, MXFP8Tensor)


def test_a_write_between_forward_and_backward_is_refused() -> None:
    for overwrite in (
        lambda w: w.add_(1.0),
        lambda w: w[32:].zero_(),
        lambda w: w.t().zero_(),
        lambda w: w.quantize_(torch.zeros(64, 70)),
        lambda w: w.copy_(MXFP8Quantizer(E4M3)(torch.zeros(64, 70))),
    ):
        net, x = primary_net(), torch.randn(4, 70, requires_grad=True)
        y = net(x).sum()
        with torch.no_grad():
            overwrite(net[0].weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_state_dicts() -> None:
    """From quantized weights bytes are copied; from others the values are quantized."""
    net, other = primary_net(), primary_net(seed=1)
    state = net.state_dict()
    assert isinstance(state["0.weight"], MXFP8Tensor)
    assert not torch.equal(other[0].weight._rowwise_data, net[0].weight._rowwise_data)
    other.load_state_dict(state, strict=True)
    for i in (0, 2):
        check_bytes(other[i].weight, net[i].weight)
        assert other[i].weight._rowwise_data.data_ptr() != net[i].weight._rowwise_data.data_ptr()
        assert isinstance(other[i].weight, torch.nn.Parameter)
    x = torch.randn(5, 70)
    assert torch.equal(other(x), net(x))
    for dtype in (torch.float32, torch.bfloat16):
        plain = torch.nn.Sequential(torch.nn.Linear(70, 64), torch.nn.ReLU(), torch.nn.Linear(64, 33)).to(dtype)
        other.load_state_dict(plain.state_dict())
        check_bytes(other[0].weight, MXFP8Quantizer(E4M3)(plain[0].weight.detach()))
        assert other[0].weight.dtype == torch.float32
        # And back: plain weights take the values.
        plain.load_state_dict(net.state_dict())
        assert torch.equal(plain[0].weight, net[0].weight.dequantize(dtype))
    rows = primary_net(seed=2)
    rows[0].weight.update_usage(columnwise_usage=False)
    expected = rows[0].weight.dequantize().detach()
    other.load_state_dict(rows.state_dict())
    check_bytes(other[0].weight, MXFP8Quantizer(E4M3)(expected))
    squares = primary_net(RECIPES["squares"], seed=3)
    other.load_state_dict(squares.state_dict())
    check_bytes(other[0].weight, squares[0].weight)
    squares.load_state_dict(net.state_dict())
    check_bytes(squares[0].weight, RECIPES["squares"].quantizer("weight")(net[0].weight.dequantize().detach()))
    assigned = primary_net(seed=4)
    assigned.load_state_dict(net.state_dict(), assign=True)
    assert isinstance(assigned[0].weight, MXFP8Tensor)
    assert torch.equal(assigned(x), net(x))


def test_copies_of_a_model() -> None:
    net = primary_net()
    twin = copy.deepcopy(net)
    check_bytes(twin[0].weight, net[0].weight)
    assert torch.equal(twin[0].weight.get_high_precision_init_val(), net[0].weight.get_high_precision_init_val())
    x = torch.randn(5, 70)
    expected = net(x)
    twin(x).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert torch.equal(net(x), expected)
    assert not torch.equal(twin(x), expected)
    assert net[0].weight.grad is None


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.to(dtype=torch.bfloat16)],
    ids=["half", "bfloat16", "to half", "to bfloat16"],
)
def test_conversion_keeps_the_codes(convert: Any) -> None:
    net = primary_net()
    before = copy.deepcopy(net[0].weight)
    initial = net[0].weight.get_high_precision_init_val()
    convert(net)
    weight = net[0].weight
    assert isinstance(weight, MXFP8Tensor)
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    assert weight.dtype == net[0].bias.dtype in (torch.float16, torch.bfloat16)
    check_bytes(weight, before)
    assert weight.get_high_precision_init_val() is initial
    net(torch.randn(3, 70).to(weight.dtype)).sum().backward()
    assert weight.grad.dtype == weight.dtype
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert isinstance(net[0].weight, MXFP8Tensor)


def test_made_on_meta_and_filled() -> None:
    recipe = RECIPES["squares"]
    with ottava.quantized_model_init(recipe):
        layer = Linear(70, 64, device="meta", recipe=recipe)
    assert layer(torch.empty(3, 70, device="meta")).shape == (3, 64)
    assert layer.weight.get_high_precision_init_val() is None
    layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    plain = torch.nn.Linear(70, 64)
    assert isinstance(layer.weight, MXFP8Tensor)
    check_bytes(layer.weight, recipe.quantizer("weight")(plain.weight.detach()))
    assert layer(torch.randn(2, 70)).shape == (2, 64)


def test_weights_in_one_direction_serve_what_they_can() -> None:
    """An evaluation needs rows only; squares serve both."""
    x = torch.randn(5, 70)
    net = primary_net()
    expected = net(x)
    net[0].weight.update_usage(columnwise_usage=False)
    assert torch.equal(net(x), expected)
    with pytest.raises(OttavaError, match=r"no columnwise data.*columnwise=True"):
        net(x.clone().requires_grad_()).sum().backward()
    net = primary_net(RECIPES["squares"])
    for usages in ({"columnwise_usage": False}, {"rowwise_usage": False, "columnwise_usage": True}):
        results = []
        for model in (primary_net(RECIPES["squares"]), net):
            given = x.clone().requires_grad_()
            model(given).sum().backward()
            results.append(given.grad)
            net[0].weight.update_usage(**usages)
        assert torch.equal(*results)


def test_parametrized_layer() -> None:
    layer = Linear(70, 33, recipe=MXFP8BlockScaling())
    torch.nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(4, 70)
    expected = Linear(70, 33, recipe=MXFP8BlockScaling())
    with torch.no_grad():
        expected.weight.copy_(layer.weight)
        expected.bias.copy_(layer.bias)
    assert torch.equal(layer(x), expected(x))
    layer(x).sum().backward()
    assert layer.parametrizations.weight.original1.grad is not None
