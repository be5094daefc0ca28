"""Products, losses and statistics of tensors, computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ottava
from ottava.gemm import gemm
from ottava_debug import Inspection

#: Product -> its operands and its result, by the names of configurations.
TENSORS = {
    "fprop": ("activation", "weight", "output"),
    "dgrad": ("gradient", "weight", "dgrad"),
    "wgrad": ("gradient", "activation", "wgrad"),
}
ROLES = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
#: The operands that a product takes along columns.
BY_COLUMN = {("dgrad", "weight"), ("wgrad", "gradient"), ("wgrad", "activation")}


def layer_of(
    recipe: Any, name: str = "layer", *, dtype: torch.dtype = torch.float32, **options: Any
) -> ottava.nn.Linear:
    """A layer with the same parameters whatever its recipe and name."""
    torch.manual_seed(0)
    return ottava.nn.Linear(32, 48, dtype=dtype, recipe=recipe, name=name, **options)


def inputs(
    dtype: torch.dtype = torch.float32, seed: int = 1, rows: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of :func:`layer_of`, and the gradient of its output."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, n, generator=random).to(dtype) for n in (32, 48))


def passes(layer: ottava.nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The results of a layer's products, by their names, and the gradient of the bias."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    results = {"output": y.detach(), "dgrad": x.grad, "wgrad": layer.weight.grad}
    if layer.bias is not None:
        results["bias"] = layer.bias.grad
    results = {name: value.clone() for name, value in results.items()}
    layer.zero_grad()
    return results


def quantized(recipe: str, gemm_type: str, tensor: str, values: torch.Tensor) -> Any:
    """The operand that a product takes in the first step under a recipe."""
    quantizer = ottava.get_recipe(recipe).quantizer(ottava.QuantizerRole("linear", ROLES[tensor]))
    by_column = (gemm_type, tensor) in BY_COLUMN
    return quantizer.with_usage(not by_column, by_column).quantize(values)


def products(
    layer: ottava.nn.Linear,
    x: torch.Tensor,
    dy: torch.Tensor,
    operand: Callable[[str, str, torch.Tensor], Any],
    result: Callable[[str, str, torch.Tensor], torch.Tensor] = lambda gemm, name, values: values,
) -> dict[str, torch.Tensor]:
    """The results of products of ``operand(gemm, tensor, values)``, each through ``result``."""
    tensors = {"activation": x, "weight": layer.weight.detach(), "gradient": dy}
    results = {}
    for gemm_type, (left, right, name) in TENSORS.items():
        a, b = (operand(gemm_type, tensor, tensors[tensor]) for tensor in (left, right))
        bias = layer.bias.detach() if gemm_type == "fprop" else None
        product = gemm(a, b, gemm_type, out_dtype=x.dtype, bias=bias)
        results[name] = result(gemm_type, name, product)
    return results


def assert_results(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same bits for each result that is expected."""
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def losses(x: torch.Tensor, q: torch.Tensor) -> dict[str, float]:
    """What ``x`` loses by becoming ``q``, by the definitions in float64."""
    a, b = x.double().numpy().ravel(), q.double().numpy().ravel()
    size, finite = a.size, np.isfinite(a)
    a, b = a[finite], b[finite]
    noise = ((a - b) ** 2).sum()
    zeroed = ((b == 0) & (a != 0)).sum()
    return {
        "sqnr": 10 * np.log10((a**2).sum() / noise),
        "cosine": (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()),
        "mse": noise / a.size,
        "underflows%": 100 * zeroed / size,
        "underflows_of_nonzero%": 100 * zeroed / (a != 0).sum(),
    }


def statistics(x: torch.Tensor) -> dict[str, float]:
    """Statistics of values, in float64."""
    x = x.double()
    magnitudes = x.abs()
    values = {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(),
        "l1_norm": magnitudes.sum(),
        "l2_norm": x.norm(),
        "cur_amax": magnitudes.max(),
        "amax": magnitudes.max(),
        "dynamic_range": (magnitudes.max() / magnitudes[magnitudes > 0].min()).log2(),
    }
    return {name: value.item() for name, value in values.items()}


def exponents(x: torch.Tensor) -> dict[int, int]:
    """Exponent -> the number of values with it."""
    powers = torch.frexp(x[x != 0].double())[1] - 1
    return {e: int((powers == e).sum()) for e in sorted(set(powers.tolist()))}


def block_range(x: torch.Tensor, rows: int, columns: int) -> float:
    """The largest dynamic range of a block, one block after the other."""
    largest = 0.0
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            block = x[top : top + rows, left : left + columns].double().abs()
            block = block[block.isfinite() & (block > 0)]
            if block.numel():
                ends = block.max().item(), block.min().item()
                largest = max(largest, math.log2(ends[0]) - math.log2(ends[1]))
    return largest


class Operands(Inspection):
    """Keeps the tensors of products: the values, and what is quantized of them."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, str], tuple[torch.Tensor, Any]] = {}

    def observe(self, gemm: str, tensor: str, values: torch.Tensor, quantized: Any) -> None:
        self.taken[gemm, tensor] = values.clone(), quantized


class Writer:
    """A writer of TensorBoard, which keeps what it is given."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value


class FullDisk(Writer):
    """A writer that fails."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        raise OSError("disk full")
