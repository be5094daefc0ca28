"""The tables of products, compared with float64, and of layers and training, with the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, Literal

import torch

import ottava
from benchmarks.installed import recipes
from benchmarks.layers import saved_bytes
from benchmarks.on_gpu.runner import (
    FLOATS,
    FP8,
    Args,
    Case,
    Draw,
    Gpu,
    Rehearsal,
    Shape,
    Tensor,
    Tensors,
    within,
)
from ottava.gemm import gemm
from ottava_current import Float8CurrentScalingQuantizer
from ottava_delayed import Float8Quantizer
from ottava_demo.data import load_corpus
from ottava_demo.training import train
from ottava_mxfp8 import MXFP8Quantizer

Kind = Literal["fprop", "dgrad", "wgrad"]
#: Kind -> which of m, n and k are the dimensions of the two operands and of the result, and which
#: is summed over.
KINDS: dict[Kind, str] = {"fprop": "mk nk mn k", "dgrad": "mn nk mk n", "wgrad": "mn mk nk m"}
#: Recipe -> its quantizer, which clamps nothing. Passes of these recipes must not wait for the GPU,
#: so that graphs can capture them.
QUANTIZERS: dict[str, Callable[[torch.dtype, torch.device], Any]] = {
    "current": lambda fp8, _: Float8CurrentScalingQuantizer(fp8),
    "delayed": lambda fp8, at: Float8Quantizer(
        torch.full((1,), 16.0, device=at), torch.zeros(1, device=at), fp8
    ),
    "mxfp8": lambda fp8, _: MXFP8Quantizer(fp8),
}
OWN = tuple(QUANTIZERS)
#: Sizes of the forward product: rows, columns, and the dimension that is summed over.
SIZES = [
    (1, 1, 1), (3, 5, 7), (16, 16, 16), (17, 33, 65), (64, 48, 100), (128, 256, 512),
    (127, 129, 257), (1, 4097, 64), (512, 512, 1024), (0, 4, 3), (4, 0, 3), (4, 3, 0), (33, 32, 31),
]  # fmt: skip
# ||result - exact|| / ||exact||. Tensor cores add FP8 products in fewer bits than float32 has; with
# fast accumulation the whole sum stays in them, 32 products a step, each of which may cut off what
# is below 2^-13 of it. A bfloat16 result is rounded besides. MX blocks are multiplied as FP8 on
# some devices only.
_BOUND, _STEP, _ROUNDING = 2e-3, 2.0**-13, dict(zip(FLOATS, (0.0, 3e-3, 4e-4), strict=True))


def _product(
    recipe: str, kind: Kind, size: Shape, dtype: torch.dtype, integers: bool = False
) -> Case:
    """A case of products of quantized operands.

    They are plain, fast, with a bias in two dtypes, and added to a tensor. With ``integers`` the
    operands are small integers, whose sums are exact in any order and in few bits.
    """
    length = dict(zip("mnk", size, strict=True))
    *shapes, result, (summed,) = ([length[name] for name in names] for names in KINDS[kind].split())
    biases = (dtype, torch.float32)

    def make(d: Draw) -> Args:
        operands = [
            d.integers(-1, 2, shape).bfloat16() if integers else d.normal(shape, torch.float32)
            for shape in shapes
        ]
        bias = d.normal(result[1:], torch.float32)
        return {"operands": operands, "bias": bias, "out": d.normal(result)}

    def quantized(a: Args) -> list[Any]:
        formats = FP8[kind != "fprop"], FP8[0]
        return [
            QUANTIZERS[recipe](fp8, x.device)(x)
            for fp8, x in zip(formats, a["operands"], strict=True)
        ]

    def run(a: Args) -> Tensors:
        multiply = partial(gemm, *quantized(a), kind)
        return [
            *(multiply(out_dtype=dtype, use_split_accumulator=split) for split in (True, False)),
            *(multiply(out_dtype=dtype, bias=a["bias"].to(bias)) for bias in biases),
            multiply(out=a["out"].to(dtype, copy=True), accumulate=True),
        ]

    def exact(a: Args) -> Tensors:
        """The product of the operands' own values in float64."""
        x, y = (operand.dequantize(torch.float64) for operand in quantized(a))
        plain = (x.t() if kind == "wgrad" else x) @ (y.t() if kind == "fprop" else y)
        with_bias = [plain + a["bias"].to(bias).double() for bias in biases]
        return [plain, plain, *with_bias, plain + a["out"].to(dtype).double()]

    bound = _BOUND + _ROUNDING[dtype]
    fast = bound + -(-summed // 32) * _STEP
    first = (0.0, 0.0) if integers else (bound, fast)
    compare = within(*first, bound, bound, bound)
    return Case(f"{recipe} {kind} {size} {dtype}", make, run, exact, compare)


def product_cases(small: bool = False) -> dict[str, list[Case]]:
    """Cases of products of any values, and of small integers."""
    sizes = SIZES[:4] if small else SIZES
    cases = {
        f"products, {recipe}": [
            _product(recipe, *choice) for choice in product(KINDS, sizes, FLOATS)
        ]
        for recipe in OWN
    }
    integers = product(["delayed", "mxfp8"], KINDS, SIZES[2:6], FLOATS, [True])
    return cases | {"products of small integers": [_product(*choice) for choice in integers]}


# Data are the same on CPU and GPU, but products differ in their last bits, before and after they
# are rounded to bfloat16. In a tensor of few elements the rounding of one can be a large share.
# On one device results differ less.
_NEAR, _FEW, _SAME, _LOSS = 1e-2, 2e-2, 1e-3, 0.02
_EAGER = Rehearsal().capture
#: Shapes of inputs, and the features out.
_LAYERS = ((64, 48), 32), ((3, 7, 33), 65), ((0, 16), 16), ((128, 256), 512), ((1, 17), 1)


def layer(
    recipe: str | None, inner: int, outer: int, device: torch.device, bias: bool = True
) -> torch.nn.Module:
    """A bfloat16 layer, which is torch's own if there is no recipe."""
    torch.manual_seed(inner)
    kind: Any = torch.nn.Linear if recipe is None else partial(ottava.nn.Linear, recipe=recipe)
    module: torch.nn.Module = kind(inner, outer, bias=bias, dtype=torch.bfloat16).to(device)
    return module


def _pass(module: torch.nn.Module, x: Tensor, dy: Tensor) -> Tensors:
    """The output and the gradients of a pass."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def _passes(
    recipe: str,
    outer: int,
    a: Args,
    capture: Callable[..., Any] = _EAGER,
    compiler: str = "",
) -> Tensors:
    """Results of three steps, each with other inputs and another weight.

    ``capture`` captures one pass, and the steps replay it. The capture of a graph fails if anything
    waits for the GPU.
    """
    x, dy = (tensor.clone() for tensor in a["0"])
    # A layer with one output has no bias, because a sum with it could leave little more than
    # rounding errors.
    module, outputs = layer(recipe, x.shape[-1], outer, x.device, bias=outer > 1), Tensors()
    if compiler:
        torch.compiler.reset()
        module.compile(fullgraph=True, backend=compiler)
    results, replay = capture(lambda: _pass(module, x, dy))
    for step, (new_x, new_dy) in enumerate(a.values()):
        x.copy_(new_x * (step + 1))
        dy.copy_(new_dy)
        torch._foreach_mul_([weight.detach() for weight in module.parameters()], 1.25)
        replay()
        outputs += [result.clone() for result in results]
    return outputs


def _bytes_for_backward(place: Gpu, recipe: str | None, size: int, _: Args) -> Tensor:
    """The bytes that a forward pass keeps for the backward pass, if its caller drops the input."""
    layers = [layer(recipe, size, size, place.device, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    dy = torch.ones(4 * size, size, device=place.device, dtype=torch.bfloat16)
    with place.serving():
        model(torch.randn_like(dy)).backward(dy)  # what is made once
        model.zero_grad(set_to_none=True)
        return torch.tensor(saved_bytes(lambda: model(torch.randn_like(dy)), place.device))


def _fewer(actual: Tensors, bf16: Tensors) -> str | None:
    return None if actual[0] < bf16[0] else f"{actual[0]} bytes, bfloat16 {bf16[0]}"


def _losses(recipe: str, steps: int, a: Args) -> Tensor:
    """The losses of the demo's training, on the device of the arguments."""
    device = str(a[""].device)
    run = train(recipe, load_corpus(), size="tiny", steps=steps, device=device, seed=0)
    return torch.tensor(run.losses)


def _falls(actual: Tensors, expected: Tensors) -> str | None:
    """Check that losses follow the expected ones, and fall in a long training."""
    losses = actual[0].cpu()
    far = ((losses - expected[0]) / expected[0]).abs().max()
    if far <= _LOSS and (len(losses) < 30 or losses[-1] < 0.9 * losses[0]):
        return None
    return f"off by {far:.2e}, from {losses[0]} to {losses[-1]}"


def _linear(place: Gpu, recipe: str, shape: Shape, outer: int, **how: Any) -> Case:
    """Steps of a layer: eager against the CPU, captured or compiled against eager there."""

    def inputs(d: Draw) -> Args:
        return {str(n): (d.normal(shape), d.normal((*shape[:-1], outer))) for n in range(3)}

    eager = partial(_passes, recipe, outer)
    if not how:
        near = within(*[_NEAR] * 12, few=_FEW)
        return Case(f"{shape} to {outer}", inputs, eager, "cpu", near)

    def there(a: Args) -> Tensors:
        with place.serving():
            return eager(place.put(a))

    same = within(*[_SAME] * 12)
    return Case(f"{shape} to {outer}", inputs, partial(eager, **how), there, same)


def layer_cases(place: Gpu, small: bool = False) -> dict[str, list[Case]]:
    """Cases of layers: passes and losses follow the CPU's.

    Graphs and compiled code agree with eager mode, and less memory is kept than in bfloat16.
    """
    steps, size = (4, 32) if small else (30, 2048)
    cases: dict[str, list[Case]] = {}

    def nothing(_: Draw) -> Args:
        return {"": torch.empty(0)}

    for recipe in recipes():
        losses = partial(_losses, recipe, steps)
        cases[f"Linear, {recipe}"] = [_linear(place, recipe, *layer) for layer in _LAYERS]
        cases[f"training, {recipe}"] = [Case("losses", nothing, losses, "cpu", _falls)]
    for recipe in OWN:
        one = partial(_linear, place, recipe, (64, 128), 256)
        own, bf16 = (partial(_bytes_for_backward, place, r, size) for r in (recipe, None))
        cases[f"in a graph, {recipe}"] = [one(capture=place.capture)]
        cases[f"compiled whole, {recipe}"] = [one(compiler=place.compiler)]
        cases[f"memory kept for backward, {recipe}"] = [Case("bytes", nothing, own, bf16, _fewer)]
    return cases
