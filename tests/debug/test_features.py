"""Features that change products: each product takes exactly what the configuration says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch

import ottava_debug
from ottava.debug import fake_quantize
from ottava_debug import Watch
from tests.debug.by_hand import (
    ROLES,
    TENSORS,
    Operands,
    assert_results,
    inputs,
    layer_of,
    passes,
    products,
    quantized,
)
from tests.debug.yaml_files import section

Initialize = Callable[..., Path]
Formats = dict[tuple[str, str], str]

# Options of FakeQuant -> (product, tensor) -> format.
FAKE_QUANT: dict[str, Formats] = {
    "gemms: [fprop, dgrad], tensors: [activation, weight], quant_format: FP8E4M3": {
        ("fprop", "activation"): "FP8E4M3",
        ("fprop", "weight"): "FP8E4M3",
        ("dgrad", "weight"): "FP8E4M3",
    },
    "gemms: all, tensors: [output, dgrad, wgrad], quant_format: MXFP8E5M2": {
        ("fprop", "output"): "MXFP8E5M2",
        ("dgrad", "dgrad"): "MXFP8E5M2",
        ("wgrad", "wgrad"): "MXFP8E5M2",
    },
    "gemms: wgrad, tensors: all, quant_format: MXFP8E4M3": {
        ("wgrad", "gradient"): "MXFP8E4M3",
        ("wgrad", "activation"): "MXFP8E4M3",
        ("wgrad", "wgrad"): "MXFP8E4M3",
    },
    # Options of an item take precedence over those around the list.
    """quant_format: FP8E4M3, gemms_struct: [
        {gemm: fprop, tensors: [activation, weight]},
        {gemm: dgrad, quant_format: FP8E5M2, tensors_struct: [
            {tensor: gradient}, {tensor: weight, quant_format: MXFP8E4M3}]}]""": {
        ("fprop", "activation"): "FP8E4M3",
        ("fprop", "weight"): "FP8E4M3",
        ("dgrad", "gradient"): "FP8E5M2",
        ("dgrad", "weight"): "MXFP8E4M3",
    },
    """gemms: [fprop, wgrad], tensors_struct: [
        {tensor: activation, quant_format: MXFP8E4M3},
        {tensor: weight, quant_format: FP8E4M3}]""": {
        ("fprop", "activation"): "MXFP8E4M3",
        ("fprop", "weight"): "FP8E4M3",
        ("wgrad", "activation"): "MXFP8E4M3",
    },
    "gemms: [], tensors: [weight], quant_format: FP8E4M3": {},
}
RECIPES = [
    ("current", torch.float32, "ottava"),
    ("mxfp8", torch.float32, "transformer_engine"),
    ("delayed", torch.bfloat16, "transformer_engine"),
]


def fake_quantized(recipe: str, formats: Formats) -> dict[str, Any]:
    """What products take and give if tensors are fake-quantized in these formats."""

    def changed(gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        if (gemm, tensor) in formats:
            return fake_quantize(values, formats[gemm, tensor])
        return values

    def operand(gemm: str, tensor: str, values: torch.Tensor) -> Any:
        if any(of == gemm for of, _ in formats):
            return changed(gemm, tensor, values)
        return quantized(recipe, gemm, tensor, values)

    return {"operand": operand, "result": changed}


@pytest.mark.parametrize(("recipe", "dtype", "namespace"), RECIPES)
def test_fake_quant(
    recipe: str, dtype: torch.dtype, namespace: str, initialize: Initialize
) -> None:
    x, dy = inputs(dtype)
    usual = products(layer_of(recipe, dtype=dtype), x, dy, partial(quantized, recipe))
    for options, formats in FAKE_QUANT.items():
        off = section("FakeQuant", options, name="off").replace("enabled: True", "enabled: False")
        off_feature = "    DisableFP8Layer: {enabled: False}\n"
        initialize(section("FakeQuant", options, namespace=namespace) + off_feature + off)
        layer = layer_of(recipe, dtype=dtype)
        found = passes(layer, x, dy)
        assert_results(found, products(layer, x, dy, **fake_quantized(recipe, formats)))
        is_changed = any(gemm == "fprop" for gemm, _ in formats)
        assert torch.equal(found["output"], usual["output"]) is not is_changed
        assert_results(passes(layer_of(recipe, "other", dtype=dtype), x, dy), usual)


def test_fake_quant_from_python() -> None:
    x, dy = inputs()
    layer = layer_of("current")
    every = {(gemm, tensor) for gemm, tensors in TENSORS.items() for tensor in tensors}
    for options, pairs in (
        ({}, {pair for pair in every if pair[1] in ROLES}),
        ({"tensors": sorted({tensor for _, tensor in every})}, every),
        ({"gemms": "fprop", "tensors": "weight"}, {("fprop", "weight")}),
    ):
        formats = dict.fromkeys(pairs, "FP8E5M2")
        with ottava_debug.fake_quant(layer, "FP8E5M2", **options):
            found = passes(layer, x, dy)
        assert_results(found, products(layer, x, dy, **fake_quantized("current", formats)))
    assert_results(passes(layer, x, dy), products(layer, x, dy, partial(quantized, "current")))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_switches_for_high_precision(recipe: str, initialize: Initialize) -> None:
    x, dy = inputs()
    layer = layer_of(recipe)
    plain = passes(layer_of(None), x, dy)
    usual = products(layer, x, dy, partial(quantized, recipe))
    for feature in ("DisableFP8GEMM", "DisableQuantizationGEMM"):
        initialize(section(feature, "gemms: [dgrad]"))
        assert_results(passes(layer_of(recipe), x, dy), usual | {"dgrad": plain["dgrad"]})
    for feature in ("DisableFP8Layer", "DisableQuantizationLayer"):
        initialize(section(feature))
        assert_results(passes(layer_of(recipe), x, dy), plain)
    debug_api.end_debug()
    with ottava_debug.high_precision(layer):
        assert_results(passes(layer, x, dy), plain)
        # A layer that is not the model's stays as it is.
        assert not torch.equal(layer_of(recipe)(x), plain["output"])


# Options of PerTensorScaling -> (product, operand) -> margin.
SCALED = {
    "gemms: [fprop, wgrad], tensors: [activation, gradient]": {
        ("fprop", "activation"): 0,
        ("wgrad", "activation"): 0,
        ("wgrad", "gradient"): 0,
    },
    "gemms: [fprop], tensors: [weight], margin: 3": {("fprop", "weight"): 3},
    """gemms_struct: [{gemm: dgrad, tensors_struct: [
        {tensor: gradient, margin: 2}, {tensor: weight, margin: -1}]}]""": {
        ("dgrad", "gradient"): 2,
        ("dgrad", "weight"): -1,
    },
}


def with_one_scale(values: torch.Tensor, element: torch.dtype, margin: int) -> torch.Tensor:
    """One scale for the tensor, of an amax times ``2^margin``, in float32."""
    largest = torch.tensor(torch.finfo(element).max)
    scale = largest / values.abs().max() * 2.0**-margin
    return (values * scale).clamp(-largest, largest).to(element).float() * (torch.ones(()) / scale)


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "rowwise"])
def test_per_tensor_scaling(recipe: str, initialize: Initialize) -> None:
    x, dy = inputs()
    layer = layer_of(recipe)
    values = {"activation": x, "weight": layer.weight.detach(), "gradient": dy}
    for options, margins in SCALED.items():
        initialize(section("PerTensorScaling", options))
        operands = Operands()
        with Watch(lambda layer, operands=operands: operands):
            found = passes(layer, x, dy)
        taken = {pair: operands.taken[pair][1] for pair in margins}
        for (gemm, tensor), margin in margins.items():
            usual = quantized(recipe, gemm, tensor, values[tensor])
            expected = with_one_scale(values[tensor], usual.grid_layout.element, margin)
            assert torch.equal(taken[gemm, tensor].dequantize(torch.float32), expected)

        def operand(gemm: str, tensor: str, values: torch.Tensor) -> Any:
            if (gemm, tensor) in taken:  # noqa: B023
                return taken[gemm, tensor]  # noqa: B023
            return quantized(recipe, gemm, tensor, values)

        assert_results(found, products(layer, x, dy, operand))
    text = section("PerTensorScaling", "gemms: all, tensors: [activation, weight, gradient]")
    initialize(text + "    DisableFP8Layer: {enabled: True}\n")
    assert_results(passes(layer, x, dy), passes(layer_of(None), x, dy))


# Options of steps, and the steps of eight in which a feature is active.
STEPS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ({"freq": 3}, [0, 3, 6]),
    ({"start_step": 5, "end_step": -1}, [5, 6, 7]),
    ({"start_step": 2, "end_step": 4}, [2, 3, 4]),
    ({"start_step": 1, "end_step": 5, "freq": 2}, [2, 4]),
    ({"start_end_list": [[1, 3], [5, 5]]}, [1, 2, 3, 5]),
    ({"start_end_list": [[0, 2], [2, 4]], "freq": 2}, [0, 2, 4]),
    ({"start_end_list": [[0, 0], [6, -1]]}, [0, 6, 7]),
]


def test_steps_in_which_a_feature_is_active(initialize: Initialize) -> None:
    layer = layer_of("current")
    x, _ = inputs()
    plain = layer_of(None)(x)

    def active(step: Callable[[], None]) -> list[int]:
        found = []
        for number in range(8):
            if torch.equal(layer(x), plain):
                found.append(number)
            step()
        return found

    for options, expected in STEPS:
        with ottava_debug.high_precision(layer, **options) as run:
            assert active(run.step) == expected
        given = ", ".join(f"{key}: {value}" for key, value in options.items())
        initialize(section("DisableFP8Layer", given))
        assert active(debug_api.step) == expected
        debug_api.end_debug()
    assert not torch.equal(layer(x), plain)
