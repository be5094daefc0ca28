"""``fake_quantize`` is quantize → dequantize of the recipe, bit for bit, for every format of every
installed recipe."""

import pytest
import torch

import ottava
from ottava.debug import fake_quantize
from ottava.errors import DeviceError, DTypeError, ShapeError

FORMATS = [(spec.name, name) for spec in ottava.list_recipes() for name in spec.fake_quant_formats]


def quantizer_of(recipe, name):
    """What a layer under the recipe uses for its inputs, in the element format that ends the
    name."""
    element = ottava.Format.E5M2 if name.endswith("E5M2") else ottava.Format.E4M3
    made = ottava.get_recipe(recipe, fp8_format=element)
    layer = ottava.nn.Linear(8, 8, recipe=made)
    return layer._binding.state.quantizer("input", rowwise=True, columnwise=False, recording=False)


def values(dtype, shape):
    random = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=random) * torch.exp2(
        torch.randint(-20, 8, shape, generator=random).float()
    )
    return x.to(dtype)


def special(dtype):
    x = values(dtype, (64, 96))
    x[0], x[1, :40], x[2, 3], x[40, 7] = 0.0, -0.0, float("inf"), float("nan")
    x[5] = torch.finfo(dtype).tiny
    return x


TENSORS = {
    "matrix": lambda dtype: values(dtype, (96, 160)),
    "ragged": lambda dtype: values(dtype, (33, 70)),
    "three dimensions": lambda dtype: values(dtype, (2, 5, 64)),
    "zeros": lambda dtype: torch.zeros(32, 64, dtype=dtype),
    "special": special,
    "not contiguous": lambda dtype: values(dtype, (64, 96)).t(),
}


def test_there_are_formats():
    assert {"current", "mxfp8", "blockwise", "rowwise"} <= {recipe for recipe, _ in FORMATS}


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize(("recipe", "name"), FORMATS)
def test_it_is_what_the_recipe_does(recipe, name, tensor):
    quantizer = quantizer_of(recipe, name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = TENSORS[tensor](dtype)
        expected = quantizer.quantize(x).dequantize(dtype)
        found = fake_quantize(x, name)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        assert torch.equal(
            found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        )
        out = torch.full_like(x, 7.0)
        assert fake_quantize(x, name, out) is out
        assert torch.equal(
            out.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        )


@pytest.mark.parametrize(("recipe", "name"), FORMATS)
def test_the_gradient_passes_straight_through(recipe, name):
    x = values(torch.float32, (33, 70)).requires_grad_()
    dy = values(torch.float32, (33, 70)) + 1
    y = fake_quantize(x, name)
    assert not torch.equal(y, x)
    y.backward(dy)
    assert torch.equal(x.grad, dy)


@pytest.mark.parametrize(("recipe", "name"), FORMATS)
def test_an_out_that_does_not_fit_is_refused_and_unchanged(recipe, name):
    x = torch.ones(32, 64)
    for out, error in (
        (torch.ones(64, 32), ShapeError),
        (torch.ones(32, 64, dtype=torch.float16), DTypeError),
        (torch.empty(32, 64, device="meta"), DeviceError),
    ):
        with pytest.raises(error):
            fake_quantize(x, name, out)
        assert out.device.type == "meta" or bool((out == 1).all())
