"""Quantized weights as the tensors of each scheme, and back."""

import math

import pytest
import torch

import ottava
from ottava.errors import CheckpointError, OptionError, ShapeError
from ottava_integrations.formats import (
    SCHEMES,
    PublishedLevel,
    Scheme,
    published_tensors,
    quantized_weight,
)

SHAPE = (256, 384)
WEIGHT = ottava.QuantizerRole("linear", "weight", "layer")


def values(shape: tuple[int, int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.exp(torch.randn(shape[0], 1, generator=generator))
    return (torch.randn(shape, generator=generator) * 0.02 * rows).to(dtype)


def quantized(recipe: ottava.Recipe, x: torch.Tensor) -> ottava.QuantizedTensor:
    quantizer = recipe.quantizer(WEIGHT)
    quantizer.set_usage(rowwise=True, columnwise=False)
    result = quantizer(x)
    assert isinstance(result, ottava.QuantizedTensor)
    return result


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def decoded(tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The values by the definition of the format, in float64."""
    data, scales = tensors[scheme.names.data], tensors[scheme.names.scales]
    if scheme.is_packed:
        codes = torch.stack([data & 15, data >> 4], -1).flatten(1).int()
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        elements = numbers[codes & 7] * (1 - 2 * (codes >> 3))
    else:
        elements = data.double()
    if scales.dtype is torch.uint8:
        factors = torch.pow(2.0, scales.double() - 127)
    else:
        factors = scales.to(torch.float32).double()
    factors = factors.reshape(factors.shape if factors.dim() == 2 else (1, 1))
    rows, columns = elements.shape
    down, across = rows // factors.shape[0], columns // factors.shape[1]
    factors = factors.repeat_interleave(down, 0).repeat_interleave(across, 1)
    if scheme.names.level:
        level = tensors[scheme.names.level].double()
        factors = factors * level if scheme.level_multiplies else factors / level
    return elements * factors


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_weights_leave_and_return_with_their_bytes(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = quantized(scheme.exports_as.make(), values(dtype=dtype))
    tensors = published_tensors(weight, scheme, dtype)
    assert tuple(tensors[scheme.names.data].shape) == scheme.data_shape(SHAPE)
    assert tuple(tensors[scheme.names.scales].shape) == scheme.scale_shape(SHAPE)
    assert tensors[scheme.names.scales].dtype == (scheme.scale_dtype or dtype)

    # Two roundings to float32 lie between the float64 values and these.
    torch.testing.assert_close(
        weight.dequantize(dtype=torch.float32).double(), decoded(tensors, scheme), rtol=2e-7, atol=0
    )
    again = quantized_weight(tensors, scheme, dtype)
    assert type(again) is type(weight)
    assert again.dtype == dtype
    assert torch.equal(again.dequantize(), weight.dequantize())
    returned = published_tensors(again, scheme, dtype)
    for name, tensor in tensors.items():
        assert torch.equal(as_bytes(returned[name]), as_bytes(tensor)), name


#: A recipe with options, a format, and the field that the format cannot hold; none if it can.
FITS = (
    ("nvfp4", {}, "nvfp4-pack-quantized", ""),
    ("nvfp4", {"four_over_six": "weights"}, "modelopt-nvfp4", ""),
    ("mxfp8", {"with_2d_quantization": True}, "mxfp8-quantized", ""),
    ("current", {"force_pow_2_scales": True}, "mxfp8-quantized", ""),
    ("current", {}, "fp8", ""),
    ("mxfp8", {}, "fp8", "block"),
    ("current", {}, "float-quantized", "a scale"),
    ("current", {}, "mxfp8-quantized", "a scale"),
    ("mxfp8", {"fp8_format": "E5M2"}, "mxfp8-quantized", "element"),
    ("mx", {}, "nvfp4-pack-quantized", "second_level"),
    ("nvfp4", {}, "mxfp4-pack-quantized", "second_level"),
    ("mx", {"element": "MXFP6E2M3"}, "mxfp4-pack-quantized", "element"),
)


@pytest.mark.parametrize(("name", "options", "format", "field"), FITS)
def test_what_a_format_cannot_hold_is_refused_by_its_field(
    name: str, options: dict[str, object], format: str, field: str
) -> None:
    weight = quantized(ottava.get_recipe(name, **options), values())
    scheme = next(scheme for scheme in SCHEMES if scheme.format == format)
    if field:
        with pytest.raises(OptionError, match=f"exactly: {field} is"):
            published_tensors(weight, scheme, torch.bfloat16)
        return
    tensors = published_tensors(weight, scheme, torch.bfloat16)
    torch.testing.assert_close(
        weight.dequantize(dtype=torch.float32).double(), decoded(tensors, scheme), rtol=2e-7, atol=0
    )


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.names.level], ids=str)
def test_any_scale_of_a_tensor_returns_as_it_came(scheme: Scheme) -> None:
    weight = quantized(scheme.exports_as.make(), values())
    tensors = published_tensors(weight, scheme, torch.bfloat16)
    level = tensors[scheme.names.level]
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        other = torch.exp(torch.randn(level.shape, generator=generator))
        loaded = quantized_weight(tensors | {scheme.names.level: other}, scheme, torch.bfloat16)
        published = PublishedLevel(other, scheme.level_multiplies)
        returned = published_tensors(loaded, scheme, torch.bfloat16, published)
        assert torch.equal(returned[scheme.names.level], other)
        # Without it, the last bit may differ.
        near = published_tensors(loaded, scheme, torch.bfloat16)[scheme.names.level]
        torch.testing.assert_close(near, other, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_damaged_tensors_are_refused(scheme: Scheme) -> None:
    weight = quantized(scheme.exports_as.make(), values())
    tensors = published_tensors(weight, scheme, torch.bfloat16)
    names = scheme.names
    data, scales = tensors[names.data], tensors[names.scales]
    wrong = [
        {names.data: data[0]},
        {names.data: data.view(torch.int8)},
        {names.data: data[:, :-1]} if scheme.block[1] is not None else {names.data: data[None]},
        {names.scales: scales.to(torch.int32)},
        {names.scales: torch.cat([scales.reshape(-1)] * 2)},
    ]
    if scales.dtype in (torch.float32, torch.bfloat16):
        wrong += [{names.scales: scales * number} for number in (-1, math.inf, math.nan)]
    else:
        wrong.append(
            {names.scales: torch.full_like(scales.view(torch.uint8), 255).view(scales.dtype)}
        )
    if names.level:
        wrong += [
            {names.level: tensors[names.level] * number} for number in (-1, math.inf, math.nan)
        ]
        wrong.append({names.level: tensors[names.level].to(torch.bfloat16)})
    for fault in wrong:
        with pytest.raises(CheckpointError, match="tensor 'layer"):
            quantized_weight(tensors | fault, scheme, torch.bfloat16, name="layer")
    for name in tensors:
        with pytest.raises(CheckpointError, match="is missing"):
            rest = {key: tensor for key, tensor in tensors.items() if key != name}
            quantized_weight(rest, scheme, torch.bfloat16)


def test_shapes_that_blocks_do_not_divide_are_refused() -> None:
    for scheme in SCHEMES:
        if scheme.block[1] is not None:
            weight = quantized(scheme.exports_as.make(), values((128, 200)))
            with pytest.raises(ShapeError, match="columns in multiples of"):
                published_tensors(weight, scheme, torch.bfloat16)
        if scheme.format in ("fp8", "fp8-ue8m0") and scheme.grain == "block":
            weight = quantized(scheme.exports_as.make(), values((130, 256)))
            with pytest.raises(ShapeError, match="rows in multiples of 128"):
                published_tensors(weight, scheme, torch.bfloat16)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.names.level], ids=str)
def test_a_scale_of_the_tensor_becomes_an_amax_and_returns(scheme: Scheme) -> None:
    """Of amaxes of every exponent, the least of which have the largest scale there is."""
    for exponent in range(-148, 128, 3):
        x = torch.full((1, 32), 1.3 * 2.0**exponent)
        written = published_tensors(quantized(scheme.exports_as.make(), x), scheme, x.dtype)
        weight = quantized_weight(written, scheme, x.dtype)
        again = published_tensors(weight, scheme, x.dtype)
        assert torch.equal(again[scheme.names.level], written[scheme.names.level])
