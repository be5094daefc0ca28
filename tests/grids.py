"""What the tests of recipes with float32 scales on a grid share: a scalar oracle of their bytes,
and checks of layers.

The oracle says in Python what quantizing is, one element after the other; it shares nothing with
the kernels.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ottava.gemm import gemm
from ottava.nn import Linear
from tests.comparing import assert_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# Mantissa bits and the exponent of the smallest normal number.
_FORMATS = {E4M3: (3, -6), E5M2: (2, -14)}
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def _magnitudes(fp8_dtype: torch.dtype) -> list[float]:
    """The values of the codes 0, 1, 2 … up to the largest."""
    bits, smallest = _FORMATS[fp8_dtype]
    values = [code * 2.0 ** (smallest - bits) for code in range(1 << bits)]
    exponent = smallest
    while values[-1] < LARGEST[fp8_dtype]:
        values += [(1 + step / (1 << bits)) * 2.0**exponent for step in range(1 << bits)]
        exponent += 1
    return values[: values.index(LARGEST[fp8_dtype]) + 1]


MAGNITUDES = {dtype: _magnitudes(dtype) for dtype in _FORMATS}


def element(value: np.float32, fp8_dtype: torch.dtype) -> int:
    """The byte of one scaled value: to nearest, ties to even, saturating; 0x7F for NaN."""
    if math.isnan(value):
        return 0x7F
    table, magnitude = MAGNITUDES[fp8_dtype], abs(float(value))
    above = bisect.bisect_left(table, magnitude)
    if above == len(table):
        code = len(table) - 1
    elif above == 0:
        code = 0
    else:
        below, middle = above - 1, (table[above - 1] + table[above]) / 2
        code = above if magnitude > middle or (magnitude == middle and above % 2 == 0) else below
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def scales(
    amax: np.float32, largest: float, epsilon: float, pow_2: bool, finite: float
) -> tuple[Any, Any]:
    """Scale and scale_inv of one block, in this order."""
    one = np.float32(1)
    if amax < np.float32(epsilon):
        amax = np.float32(epsilon)
    scale = one
    if math.isfinite(amax) and amax != 0:
        scale = np.float32(largest) / amax
        if math.isinf(scale):
            scale = np.float32(finite)
        if pow_2:
            scale = np.float32(2.0 ** (math.frexp(float(scale))[1] - 1))
    return scale, one / scale


def quantized(
    matrix: Any,
    block: tuple[int | None, int | None],
    fp8_dtype: torch.dtype,
    finite: float = _FLOAT32_MAX,
    **options: Any,
) -> tuple[Any, Any]:
    """Bytes and scales of blocks of a float32 matrix."""
    rows, columns = matrix.shape
    high, wide = (side or max(size, 1) for side, size in zip(block, matrix.shape, strict=True))
    grid = tuple(
        1 if side is None else -(-size // side)
        for side, size in zip(block, matrix.shape, strict=True)
    )
    data, inverses = np.zeros((rows, columns), np.uint8), np.zeros(grid, np.float32)
    epsilon, pow_2 = options.get("amax_epsilon", 0.0), options.get("force_pow_2_scales", False)
    with np.errstate(all="ignore"):
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
                seen = [abs(v) for v in matrix[part].flat if not math.isnan(v)]
                scale, inverses[i, j] = scales(
                    max(seen, default=np.float32(0)), LARGEST[fp8_dtype], epsilon, pow_2, finite
                )
                made = [element(value * scale, fp8_dtype) for value in matrix[part].flat]
                data[part] = np.array(made, np.uint8).reshape(matrix[part].shape)
    return data, inverses


def expected_bytes(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    block: Any,
    *,
    transposed: bool,
    finite_as_input: bool,
    **options: Any,
) -> list[torch.Tensor]:
    """What the four inner tensors of a quantized tensor hold."""
    matrix = (
        x.float().reshape(-1, x.shape[-1]).numpy()
        if x.numel()
        else np.zeros((math.prod(x.shape[:-1]), x.shape[-1]))
    )
    matrix = matrix.astype(np.float32)
    finite = torch.finfo(x.dtype).max if finite_as_input else _FLOAT32_MAX
    rows = quantized(matrix, block, fp8_dtype, finite, **options)
    columns = quantized(np.ascontiguousarray(matrix.T), block, fp8_dtype, finite, **options)
    if transposed:
        shapes = x.shape, (x.shape[-1], *x.shape[:-1])
    else:
        shapes, columns = (
            (x.shape, x.shape),
            tuple(np.ascontiguousarray(part.T) for part in columns),
        )
    return [
        torch.from_numpy(part.reshape(shape) if part.dtype == np.uint8 else part)
        for (data, own), shape in zip((rows, columns), shapes, strict=True)
        for part in (data, own)
    ]


def inner(q: Any) -> list[Any]:
    return [getattr(q, name) for name in INNER]


def wide(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, sigma: float = 3.0
) -> torch.Tensor:
    """Magnitudes so far apart that blocks, rows and columns keep different values."""
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=random)
        * torch.exp(sigma * torch.randn(shape, generator=random))
    ).to(dtype)


def special(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of 3 × 260 (blocks of 128, 128 and 4) with what is not an ordinary value
    somewhere."""
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    cases: dict[str, Any] = {
        "NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf, "minus zero": -0.0,
        "largest": largest, "tiny": tiny, "subnormal": tiny / 8,
    }  # fmt: skip
    for name, value in cases.items():
        x = wide(3, 260, dtype=dtype, sigma=1.0)
        x[0, 5] = x[1, 200] = x[2, 259] = value
        yield name, x
        yield f"all {name}", torch.full((3, 260), value, dtype=dtype)
    x = wide(3, 260, dtype=dtype, sigma=1.0)
    x[:, 128:256] = 0
    yield "a block of zeros", x
    # Below 448 / the largest of the dtype the quotient is infinite.
    yield "an infinite scale", (wide(3, 260, sigma=0.1) * tiny / 4).to(dtype)
    yield "ties", (torch.arange(3 * 260).reshape(3, 260) / 64 - 6).to(dtype)


def decoded(q: Any, block: Any, *, columnwise: bool, transposed: bool) -> torch.Tensor:
    """The values of one direction as a float64 matrix in the order of the tensor."""
    data, own = inner(q)[2:] if columnwise else inner(q)[:2]
    matrix = (
        data.reshape(data.shape[0], -1)
        if columnwise and transposed
        else data.reshape(-1, data.shape[-1])
    )
    turned = columnwise and not transposed
    elements = (matrix.t() if turned else matrix).contiguous().view(q._fp8_dtype).double()
    factors = (own.t() if turned else own).double()
    for dim, side in enumerate(block):
        size = elements.shape[dim]
        factors = factors.repeat_interleave(size if side is None else side, dim).narrow(
            dim, 0, size
        )
    values = elements * factors
    return values.t() if columnwise else values


_PRODUCTS = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}
_SHAPES = {
    "fprop": ((70, 300), (33, 300)),
    "dgrad": ((70, 300), (300, 33)),
    "wgrad": ((300, 70), (300, 33)),
}


def check_product(
    kind: Any,
    quantizers: Any,
    blocks: Any,
    transposed: bool,
    out_dtype: torch.dtype,
    sigma: float,
    roundings: int = 1,
) -> None:
    """A GEMM is as near to float64's of its decoded operands as float32's of the same is, rounded
    so often."""
    a, b = (wide(*shape, seed=seed, sigma=sigma) for seed, shape in enumerate(_SHAPES[kind]))
    qa, qb = (quantizer(x) for quantizer, x in zip(quantizers, (a, b), strict=True))
    left, right = (
        decoded(q, block, columnwise=columnwise, transposed=transposed)
        for q, block, columnwise in zip((qa, qb), blocks, _PRODUCTS[kind], strict=True)
    )
    pairs = {"fprop": (left, right.t()), "dgrad": (left, right), "wgrad": (left.t(), right)}
    left, right = pairs[kind]
    got = gemm(qa, qb, kind, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    exact, plain = left @ right, (left.float() @ right.float()).to(out_dtype)
    magnitudes = left.abs() @ right.abs()
    # Of sums of 300 float32 terms in any order, and of the roundings to the output.
    bound = (
        300 * 2.0**-24 * magnitudes
        + ((1 + torch.finfo(out_dtype).eps / 2) ** roundings - 1) * exact.abs()
    )
    assert ((got.double() - exact).abs() <= bound).all()
    # The root of the mean square, in units of what was summed: no worse but for luck.
    worse = [((x.double() - exact) / magnitudes).square().mean().sqrt() for x in (got, plain)]
    assert worse[0] <= 1.25 * roundings**0.5 * worse[1]


# -- layers --


def layer_of(
    recipe: Any, n: int = 140, k: int = 300, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Linear:
    layer = Linear(k, n, dtype=dtype, recipe=recipe, **options)
    with torch.no_grad():
        layer.weight.copy_(wide(n, k, seed=11, sigma=1.0) / 16)
        if layer.bias is not None:
            layer.bias.copy_(wide(n, seed=12, sigma=1.0))
    return layer


def close(
    got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """``got`` is ``a @ b + bias`` up to sums in float32 and two roundings to its dtype."""
    exact = a @ b if bias is None else a @ b + bias.detach().double()
    bound = torch.finfo(got.dtype).eps * ((a @ b).abs() + exact.abs())
    bound += (a.shape[1] + 2) * 2.0**-23 * (a.abs() @ b.abs() + exact.abs())
    assert ((got.detach().double().reshape(exact.shape) - exact).abs() <= bound).all()


def check_layer(
    recipe: Any,
    blocks: Any,
    transposed: bool,
    dtype: torch.dtype,
    wgrad_high_precision: bool = False,
) -> None:
    """Output and gradients of a layer are the three products of what its quantizers hold.

    Args:
        blocks: for each role the block of rowwise data.
    """

    def values(role: str, x: torch.Tensor, columnwise: bool) -> torch.Tensor:
        matrix = x.detach().reshape(-1, x.shape[-1])
        if wgrad_high_precision and columnwise and role != "weight":
            return matrix.double()
        return decoded(
            recipe.quantizer(role)(matrix),
            blocks[role],
            columnwise=columnwise,
            transposed=transposed,
        )

    layer = layer_of(recipe, dtype=dtype)
    x, dy = (
        wide(2, 65, 300, seed=1, dtype=dtype, sigma=1.0),
        wide(2, 65, 140, seed=2, dtype=dtype, sigma=1.0),
    )
    y = layer(x.requires_grad_())
    y.backward(dy)
    close(y, values("input", x, False), values("weight", layer.weight, False).t(), layer.bias)
    close(x.grad, values("grad_output", dy, False), values("weight", layer.weight, True))
    close(layer.weight.grad, values("grad_output", dy, True).t(), values("input", x, True))
    close(layer.bias.grad, torch.ones(1, 130).double(), dy.reshape(-1, 140).double())


def check_main_grad(recipe: Any) -> None:
    """Gradients of two microbatches are summed in main_grad as those of layers without it are."""
    plain = layer_of(recipe)
    fused = layer_of(recipe, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.full((140, 300), 0.5)
    summed = torch.full((140, 300), 0.5)
    for seed, first in ((1, True), (2, False)):
        x = wide(64, 300, seed=seed, dtype=torch.bfloat16, sigma=1.0)
        ys = [layer(x, is_first_microbatch=first) for layer in (plain, fused)]
        assert torch.equal(*ys)
        dy = wide(64, 140, seed=seed + 5, dtype=torch.bfloat16, sigma=1.0)
        plain.weight.grad = None
        for y in ys:
            y.backward(dy)
        summed += plain.weight.grad
    assert fused.weight.grad is None
    assert (fused.weight.main_grad - summed).norm() <= 0.01 * summed.norm()


def check_microbatches(recipe: Any) -> None:
    """A weight is quantized in the first microbatch, and kept until the next first one."""
    layer, x = layer_of(recipe), wide(64, 300, dtype=torch.bfloat16, sigma=1.0)
    first = layer(x, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.mul_(3)
    assert torch.equal(layer(x, is_first_microbatch=False), first)
    assert not torch.equal(layer(x, is_first_microbatch=True), first)
    layer(x, is_first_microbatch=False).sum().backward()


def train(net: torch.nn.Module, count: int = 20) -> list[float]:
    """The losses of a small regression, the same for every model."""
    random = torch.Generator().manual_seed(3)
    teacher = torch.randn(256, 32, generator=random) / 16
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    seen = []
    for _ in range(count):
        x = torch.randn(160, 256, generator=random)
        loss = torch.nn.functional.mse_loss(net(x.bfloat16()).float(), torch.tanh(x @ teacher))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 160),
        torch.nn.GELU(),
        torch.nn.Linear(160, 160),
        torch.nn.GELU(),
        torch.nn.Linear(160, 32),
    ).bfloat16()


def check_training(convert: Any) -> None:
    """20 steps end within a hundredth of BF16's loss, which has fallen."""
    plain, quantized = train(mlp()), train(convert(mlp()))
    assert plain[-1] < 0.8 * plain[0]
    assert quantized != plain
    assert abs(quantized[-1] / plain[-1] - 1) < 0.01, (quantized[-1], plain[-1])


def check_compiled(recipe: Any) -> None:
    """Forward and backward of a compiled layer have the bytes of eager ones."""
    torch._dynamo.reset()
    x, dy = (
        wide(70, 300, dtype=torch.bfloat16, sigma=1.0),
        wide(70, 140, seed=1, dtype=torch.bfloat16, sigma=1.0),
    )
    found = []
    for compiled in (False, True):
        layer, own = layer_of(recipe), x.clone().requires_grad_()
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        y = run(own)
        y.backward(dy)
        found.append([y, own.grad, layer.weight.grad, layer.bias.grad])
    for eager, graph in zip(*found, strict=True):
        assert_same(graph.float(), eager.float())
