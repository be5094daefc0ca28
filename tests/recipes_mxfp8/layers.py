"""What the tests of layers under MXFP8 share: recipes, layers, and products up to the rounding of
sums."""

from __future__ import annotations

import math
from typing import Any

import torch

from ottava.formats import Format
from ottava.nn import Linear
from ottava_mxfp8 import MXFP8BlockScaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
RECIPES = {
    "default": MXFP8BlockScaling(),
    "squares": MXFP8BlockScaling(with_2d_quantization=True),
    "hybrid floor": MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rounding="floor"),
    "e5m2": MXFP8BlockScaling(fp8_format=Format.E5M2),
}


def spread(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, sigma: float = 3.0
) -> torch.Tensor:
    """Rows and columns of its blocks keep different values."""
    random = torch.Generator().manual_seed(seed)
    sigma = min(sigma, 1.0) if dtype == torch.float16 else sigma
    return (
        torch.randn(shape, generator=random)
        * torch.exp(sigma * torch.randn(shape, generator=random))
    ).to(dtype)


def layer_of(
    recipe: Any, n: int = 33, k: int = 70, dtype: torch.dtype = torch.float32, **options: Any
) -> Linear:
    layer = Linear(k, n, dtype=dtype, recipe=recipe, **options)
    with torch.no_grad():
        layer.weight.copy_(spread(n, k, seed=11, sigma=1.0 if dtype == torch.float16 else 3.0))
        if layer.bias is not None:
            layer.bias.copy_(spread(n, seed=12, sigma=1.0))
    return layer


def direction(
    recipe: MXFP8BlockScaling, role: str, value: torch.Tensor, columnwise: bool
) -> torch.Tensor:
    """What a tensor is worth along rows or columns, as a float64 matrix; decoded by torch's own
    conversions."""
    quantizer = recipe.quantizer(role).with_usage(not columnwise, columnwise)
    matrix = value.detach().reshape(math.prod(value.shape[:-1]), value.shape[-1])
    q = quantizer(matrix)
    data, scales = (
        (q._columnwise_data, q._columnwise_scale_inv)
        if columnwise
        else (q._rowwise_data, q._rowwise_scale_inv)
    )
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, 0 if columnwise else 1)
    return data.view(quantizer.fp8_dtype).double() * powers[: matrix.shape[0], : matrix.shape[1]]


def close(
    got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """Whether ``got`` is ``a @ b + bias`` up to sums in float32 and two roundings to its dtype."""
    product = a @ b
    exact = product if bias is None else product + bias.detach().double()
    error = torch.finfo(got.dtype).eps * (product.abs() + exact.abs())
    error = error + (a.shape[1] + 2) * 2.0**-23 * (a.abs() @ b.abs() + exact.abs())
    smallest = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    return bool(
        ((got.detach().double().reshape(exact.shape) - exact).abs() <= error + 2 * smallest).all()
    )
