"""``ServedRecipe``: the forward pass of the exported bytes, the backward pass of a recipe."""

import pickle
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import OptionError
from ottava_custom import HybridQuantizer, IdentityQuantizer
from ottava_integrations import ServedRecipe, iter_exported
from ottava_integrations.formats import SCHEMES, Scheme, published_tensors, quantized_weight

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
    quantizer = scheme.exports_as.make().quantizer("weight")
    quantizer.set_usage(rowwise=True, columnwise=False)
    tensors = published_tensors(quantizer(layer.weight.detach()), scheme, dtype)
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


def test_the_backward_pass_is_that_of_the_other_recipe() -> None:
    recipe = ServedRecipe("fp8", training="mxfp8")
    mxfp8 = ottava.get_recipe("mxfp8")
    for role in ("input", "weight"):
        quantizer = recipe.quantizer(role)
        assert isinstance(quantizer, HybridQuantizer)
        assert quantizer.contract.columnwise == mxfp8.quantizer(role).contract.columnwise
        own = ottava.get_recipe("blockwise", force_pow_2_scales=False).quantizer(role)
        assert quantizer.contract.rowwise == own.contract.rowwise
    gradient = recipe.quantizer("grad_output")
    assert gradient.contract == mxfp8.quantizer("grad_output").contract
    assert isinstance(ServedRecipe("fp8", activations="none").quantizer("input"), IdentityQuantizer)
    # Rows and columns of one quantizer need no hybrid.
    same = ServedRecipe("mxfp8-quantized", training="mxfp8")
    assert type(same.quantizer("weight")).__name__ == "MXFP8Quantizer"


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


def test_a_model_trains() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    net = ottava.convert(net, ServedRecipe("nvfp4-pack-quantized"))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    x = torch.randn(256, 64)
    target = x.roll(1, 1)
    losses = []
    for _ in range(60):
        loss = (net(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_it_compiles_and_recomputes() -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = []
    for run in ("eager", "compiled", "recomputed"):
        layer = layer_of(ServedRecipe("mxfp8-quantized"), torch.bfloat16)
        own = x.clone().requires_grad_()
        if run == "compiled":
            # Other tests of this process may have reached the compiler's limit for layers.
            torch.compiler.reset()
            y = torch.compile(layer, fullgraph=True, backend="aot_eager")(own)
        elif run == "recomputed":
            y = torch.utils.checkpoint.checkpoint(layer, own, use_reentrant=False)
        else:
            y = layer(own)
        y.float().square().mean().backward()
        assert own.grad is not None
        assert layer.weight.grad is not None
        gradients.append((own.grad, layer.weight.grad))
    for others in gradients[1:]:
        assert all(map(torch.equal, gradients[0], others))
