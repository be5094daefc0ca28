"""``ServedRecipe``: the forward pass of the exported bytes, the backward pass of a recipe."""

import pickle
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import OptionError
from ottava.gemm import stored_tensors
from ottava_custom import HybridQuantizer, IdentityQuantizer
from ottava_integrations import ServedRecipe, iter_exported
from ottava_integrations.formats import SCHEMES, Scheme, quantized_weight
from tests.integrations.files import published_parts

#: Recipes of the backward pass, of which "rowwise" has wgrad in high precision.
_TRAINING = (None, "mxfp8", "rowwise", "high_precision")


def recipe_of(scheme: Scheme, activations: str | None, training: str | None) -> ServedRecipe:
    chosen: Any = training
    if training == "high_precision":
        chosen = ottava.get_recipe("current", backward="high_precision")
    elif training == "rowwise":
        chosen = ottava.get_recipe("rowwise", wgrad_high_precision=True)
    return ServedRecipe(scheme.format, scheme.grain, activations, chosen)


def layer_of(recipe: ServedRecipe, dtype: torch.dtype) -> ottava.nn.Linear:
    torch.manual_seed(0)
    return ottava.nn.Linear(256, 128, dtype=dtype, recipe=recipe)


def exported(layer: ottava.nn.Linear, recipe: ServedRecipe) -> ottava.nn.Linear:
    """A layer with the bytes that an export of ``layer`` holds."""
    dtype, scheme = layer.weight.dtype, recipe.scheme
    tensors = published_parts(layer.weight, scheme)
    served = ServedRecipe(recipe.format, recipe.grain, recipe.activations)
    result = ottava.nn.Linear(256, 128, dtype=dtype, recipe=served)
    weight = quantized_weight(tensors, scheme, dtype)
    result.weight = torch.nn.Parameter(weight, requires_grad=False)
    result.bias = layer.bias
    return result


def recipes_of(scheme: Scheme) -> list[ServedRecipe]:
    """Recipes for each way to quantize inputs, and for each kind of backward pass."""
    words = ["none", "tensor", "token", "block", *(["group"] if scheme.grain == "group" else [])]
    recipes = [recipe_of(scheme, word, None) for word in words]
    return recipes + [recipe_of(scheme, None, training) for training in _TRAINING]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_training_computes_what_the_export_computes(scheme: Scheme, dtype: torch.dtype) -> None:
    for recipe in recipes_of(scheme):
        layer = layer_of(recipe, dtype)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        generator = torch.Generator().manual_seed(1)
        for rows in (33, 1):
            x = torch.randn(rows, 256, generator=generator).to(dtype)
            y = layer(x)
            assert torch.equal(y, exported(layer, recipe)(x)), recipe
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def read(recipe: ottava.Recipe, role: str, values: torch.Tensor, usage: str) -> torch.Tensor:
    """The values in float64 that a product reads of an operand, by rows or by columns."""
    quantizer = recipe.quantizer(role).copy()
    quantizer.set_usage(rowwise=usage == "rows", columnwise=usage == "columns")
    return quantizer(values.detach()).dequantize(dtype=torch.float32).double()


@pytest.mark.parametrize("training", [*_TRAINING, "current"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_are_those_of_the_values_that_the_backward_pass_reads(
    scheme: Scheme, training: str | None
) -> None:
    recipe = recipe_of(scheme, None, training)
    layer = layer_of(recipe, torch.float32)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gradient = torch.randn(32, 128, generator=torch.Generator().manual_seed(2))
    layer(x).backward(gradient)

    weight, value = layer.weight.detach().double(), x.detach().double()
    of_dgrad = of_wgrad = gradient.double()
    if training is None:
        weight = read(scheme.exports_as.make(), "weight", layer.weight, "rows")
        assert recipe.activations is not None
        if recipe.activations != "none":
            value = read(scheme.input_choice(recipe.activations).make(), "input", x, "rows")
    elif training != "high_precision":
        other = ottava.get_recipe(training)
        weight = read(other, "weight", layer.weight, "columns")
        of_dgrad = read(other, "grad_output", gradient, "rows")
        if training != "rowwise":
            value = read(other, "input", x, "columns")
            of_wgrad = read(other, "grad_output", gradient, "columns")
    assert x.grad is not None
    assert layer.weight.grad is not None
    expected = of_dgrad @ weight
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-4, atol=1e-5)
    expected = of_wgrad.T @ value
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("format", "of_powers"), [("fp8", False), ("float-quantized", False), ("fp8-ue8m0", True)]
)
def test_blocks_of_inputs_have_powers_of_two_where_servers_have_them(
    format: str, of_powers: bool
) -> None:
    quantizer = ServedRecipe(format, "block").quantizer("input")
    scales = stored_tensors(quantizer(torch.randn(4, 256)), "rowwise")["scales"]
    assert bool((scales.frexp().mantissa == 0.5).all()) is of_powers


def test_rows_and_columns_of_one_quantizer_need_no_hybrid() -> None:
    same = ServedRecipe("mxfp8-quantized", training="mxfp8")
    assert type(same.quantizer("weight")).__name__ == "MXFP8Quantizer"
    assert isinstance(ServedRecipe("fp8", training="mxfp8").quantizer("weight"), HybridQuantizer)
    assert isinstance(ServedRecipe("fp8", activations="none").quantizer("input"), IdentityQuantizer)


def test_recipes_are_values() -> None:
    recipe = ServedRecipe("float-quantized")
    assert recipe == ServedRecipe("float-quantized", "channel", "token")
    assert hash(recipe) == hash(ServedRecipe("float-quantized", "channel"))
    assert recipe != ServedRecipe("float-quantized", "block")
    assert recipe != ServedRecipe("float-quantized", activations="none")
    assert ServedRecipe("naive-quantized").activations == "none"
    assert pickle.loads(pickle.dumps(recipe)) == recipe


#: Arguments, and words of the error.
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"format": "gguf"}, "format 'gguf'"),
    ({"format": "fp8", "grain": "channel"}, "with a scale for each 'channel'"),
    ({"format": "fp8", "activations": "row"}, "activations 'row' of fp8, block"),
    ({"format": "fp8", "activations": "group"}, "one of token, tensor, block, none"),
    ({"format": "fp8", "training": "delayed"}, "'delayed', which keeps state"),
)


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_refusals(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ServedRecipe(**arguments)


def test_layers_that_no_file_can_hold() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 100))
    recipe = ServedRecipe("fp8")
    with pytest.raises(OptionError, match="'1' trains with the bytes of fp8, block") as error:
        list(iter_exported(ottava.convert(net, recipe), "fp8"))
    assert "include=recipe.holds" in str(error.value)
    held = ottava.convert(ottava.revert(net), recipe, include=recipe.holds)
    names = {name for name, _ in iter_exported(held, "fp8")}
    assert names == {"0.weight", "0.weight_scale_inv", "0.bias", "1.weight", "1.bias"}
