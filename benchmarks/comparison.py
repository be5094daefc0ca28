"""Compares recipes: errors, noise and bytes on the CPU, and times from the results of benchmarks.

Errors and bytes are measured with random tensors from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import ottava
from benchmarks.layers import saved_bytes
from benchmarks.markdown import markdown
from benchmarks.timing import Row

#: The recipes that are compared: those that need no options.
RECIPES = ("current", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4", "mx")
SIZE = 512
HEAVY_TAILED = "lognormal, σ = 2"
#: Column of the tables of noise -> the recipe, its options, and the role of the quantizer.
SCHEMES: Mapping[str, tuple[str, dict[str, object], str]] = {
    "current": ("current", {}, "input"),
    "rowwise": ("rowwise", {}, "input"),
    "blockwise 128 × 128": ("blockwise", {}, "weight"),
    "blockwise 1 × 128": ("blockwise", {}, "input"),
    "the same, any scale": ("blockwise", {"force_pow_2_scales": False}, "input"),
    "MXFP8 1 × 32": ("mxfp8", {}, "input"),
    "NVFP4 1 × 16": ("nvfp4", {}, "input"),
    "MXFP4 1 × 32": ("mx", {}, "input"),
}
# The size at which the table of CPUs shows large layers.
_LARGE = 2048


def tensors() -> dict[str, torch.Tensor]:
    """Random tensors by name, in bfloat16."""
    random = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(SIZE, SIZE, generator=random, dtype=torch.float64)

    signs = [normal().sign() for _ in range(2)]
    # Student's t with 3 degrees of freedom, whose tails fall with the fourth power.
    student = normal() / ((normal() ** 2 + normal() ** 2 + normal() ** 2) / 3).sqrt()
    outliers, rows = normal(), normal()
    outliers[:, 17::128] *= 1e5
    rows *= torch.exp(3 * torch.randn(SIZE, 1, generator=random, dtype=torch.float64))
    values = {
        "Gaussian": normal(),
        "Student's t, 3 degrees": student,
        "lognormal, σ = 1": normal().exp() * signs[0],
        HEAVY_TAILED: (2 * normal()).exp() * signs[1],
        "Gaussian, 4 columns 10⁵ times larger": outliers,
        "Gaussian, rows of lognormal size, σ = 3": rows,
    }
    return {name: tensor.bfloat16() for name, tensor in values.items()}


def _noise(x: torch.Tensor, scheme: str) -> tuple[float, float]:
    """SQNR in dB of the whole tensor, and of the mean square of relative errors."""
    recipe, options, role = SCHEMES[scheme]
    quantizer = ottava.get_recipe(recipe, **options).quantizer(role).with_usage(True, False)
    exact = x.double()
    squares, errors = exact**2, (quantizer(x).dequantize(torch.float32).double() - exact) ** 2
    ratios = errors.sum() / squares.sum(), (errors / squares)[squares > 0].mean()
    whole, alike = (-10 * torch.log10(ratio).item() for ratio in ratios)
    return whole, alike


def noise() -> str:
    """The noise of whole tensors, which their largest elements dominate, and of their elements."""
    pairs = {name: {s: _noise(x, s) for s in SCHEMES} for name, x in tensors().items()}
    whole, alike = (
        markdown(
            [{"tensor": name, **{s: pair[at] for s, pair in row.items()}}
             for name, row in pairs.items()],
            "{:.1f}",
        )
        for at in (0, 1)
    )  # fmt: skip
    return f"Of whole tensors:\n\n{whole}\n\nWhere every element counts alike:\n\n{alike}"


def _step(layer: ottava.nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output, the gradient of the input, and the gradient of the weight of one step."""
    operand = x.clone().requires_grad_()
    y = layer(operand)
    return [y.detach(), *torch.autograd.grad(y, [operand, layer.weight], dy)]


def _errors(recipe: str) -> list[float]:
    """Relative errors of the results of a step, in the Frobenius norm, for Gaussian operands.

    The second of two steps with the same operands is measured, because delayed scaling takes its
    scales from the first.
    """
    random = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(SIZE, SIZE, generator=random) for _ in range(3))
    layer = ottava.nn.Linear(SIZE, SIZE, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    exact = _step(layer, x, dy)
    layer.bind(recipe)
    torch.manual_seed(0)  # for recipes that round at random
    _step(layer, x, dy)
    pairs = zip(_step(layer, x, dy), exact, strict=True)
    return [((result - right).norm() / right.norm()).item() for result, right in pairs]


def _lost_elements(recipe: str, x: torch.Tensor) -> float:
    """The share of the elements of an input that become zero, in the second of two steps.

    Under the identity as weight the output has the elements of the quantized input.
    """
    layer = ottava.nn.Linear(SIZE, SIZE, bias=False, dtype=x.dtype, recipe=recipe)
    torch.nn.init.eye_(layer.weight)
    for _ in range(2):
        y = layer(x)
        y.sum().backward()
    return (y[x != 0] == 0).double().mean().item()


def _saved_bytes(recipe: ottava.Recipe | None) -> float:
    """Bytes that a bfloat16 layer saves for its backward pass, an element of input and weight."""
    layer = ottava.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    return saved_bytes(lambda: layer(x)) / (x.numel() + layer.weight.numel())


def _weight_bytes(recipe: ottava.Recipe) -> float:
    """Bytes of an FP8-primary weight, an element."""
    with ottava.quantized_model_init(recipe):
        weight = ottava.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16).weight
    return weight.nbytes / weight.numel()


def recipes() -> str:
    """Errors, lost elements and state of the recipes."""
    heavy = tensors()[HEAVY_TAILED]
    stateful = {spec.name for spec in ottava.list_recipes() if spec.stateful}
    rows = []
    for name in RECIPES:
        shares = (f"{100 * share:.1f} %" for share in (*_errors(name), _lost_elements(name, heavy)))
        columns = (
            "error of the output",
            "of the input's gradient",
            "of the weight's gradient",
            "heavy-tailed input: become zero",
        )
        rows.append(
            {
                "recipe": f"`{name}`",
                **dict(zip(columns, shares, strict=True)),
                "saved bytes": _saved_bytes(ottava.get_recipe(name)),
                "state": "yes" if name in stateful else "no",
            }
        )
    return markdown(rows)


def memory() -> str:
    """Bytes of what a layer saves and of FP8-primary weights."""
    variants: dict[str, ottava.Recipe | None] = {
        "none, bfloat16": None,
        **{name: ottava.get_recipe(name) for name in RECIPES},
        "rowwise, wgrad_high_precision": ottava.get_recipe("rowwise", wgrad_high_precision=True),
        "mxfp8, backward high_precision": ottava.get_recipe("mxfp8", backward="high_precision"),
        "mxfp8, backward dequantized": ottava.get_recipe("mxfp8", backward="dequantized"),
        "mxfp8, with_2d_quantization": ottava.get_recipe("mxfp8", with_2d_quantization=True),
        "nvfp4, backward dequantized": ottava.get_recipe("nvfp4", backward="dequantized"),
        "mx, element MXFP6E2M3": ottava.get_recipe("mx", element="MXFP6E2M3"),
    }
    return markdown(
        [
            {
                "recipe": name,
                "saved for backward": _saved_bytes(recipe),
                "weight, if FP8-primary": _weight_bytes(recipe) if recipe else None,
            }
            for name, recipe in variants.items()
        ]
    )


def _cpu_rows(results: Mapping[str, Any]) -> list[Row]:
    """Times of large and of small layers on the machines of the results with a fast BF16.

    Recipes that were not measured have no row.
    """
    rows: dict[str, Row] = {name: {"recipe": name} for name in RECIPES}
    for kind, result in results.items():
        if "no fast BF16" in kind:
            continue
        machine = result["cpu"].split(" ")[0].removesuffix("(R)")
        for title, section in result["sections"].items():
            for row in section:
                if title.startswith("Linear") and row["M = K = N"] == _LARGE:
                    column, name, ratio = "large layer, of BF16's time", "layer", "times bf16"
                elif title.startswith("Host") and row["step"] == "forward and backward":
                    column, name = "small layer, of nn.Linear's time", "recipe"
                    ratio = "times nn.Linear"
                else:
                    continue
                if row[name] in rows:
                    rows[row[name]][f"{machine}: {column}"] = row[ratio]
    return [row for row in rows.values() if len(row) > 1]


def _gpu_rows(results: Mapping[str, Any]) -> list[Row]:
    """Times of eager layers on the GPU of the results, as multiples of a bfloat16 layer's.

    Recipes that were not measured have no row.
    """
    rows = []
    for recipe in RECIPES:
        row: Row = {"recipe": recipe}
        for size in results["linear"]["rows"]:
            seconds = size["seconds"]
            ratio = seconds[recipe] / seconds["bf16"] if recipe in seconds else None
            row[f"M = K = N = {size['name']}"] = ratio
        if any(isinstance(ratio, float) for ratio in row.values()):
            rows.append(row)
    return rows


def speed(cpu_results: Mapping[str, Any], gpu_results: Mapping[str, Any]) -> str:
    """The tables of CPUs and of the GPU."""
    return (
        f"On CPUs (`python -m benchmarks`), forward and backward:\n\n"
        f"{markdown(_cpu_rows(cpu_results))}\n\n"
        f"On one H100 (`python benchmarks/gpu.py`), forward and backward, of BF16's time:\n\n"
        f"{markdown(_gpu_rows(gpu_results))}"
    )
