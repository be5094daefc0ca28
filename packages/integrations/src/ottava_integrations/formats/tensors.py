"""A quantized weight as the tensors that a scheme has for it, and back. No value is rounded.

What a file cannot hold is refused, with the field that differs.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ottava.errors import CheckpointError, OptionError, ShapeError, UsageError
from ottava.gemm import Operand, side_of
from ottava.kernels.scales import second_scale, top_of
from ottava.layout import Block, Layout, Size
from ottava.recipes import Recipe
from ottava.recipes.role import QuantizerRole
from ottava.tensors import GridQuantizer, QuantizedTensor, QuantizedTensorStorage
from ottava.tensors.operand import Side
from ottava_integrations.formats.schemes import Scheme

Tensor = torch.Tensor
_E8M0 = torch.float8_e8m0fnu
_NAN_CODE = 255
_BIAS = 127
# A quotient and the inverse of the inverse quotient are neighbours at most.
_NEIGHBOURS = (0, 1, -1)


class PublishedLevel(NamedTuple):
    """The scale of a tensor as a file had it, which the amax of the weight may not tell exactly.

    Attributes:
        value: as the file had it, float32.
        multiplies: whether it multiplies when dequantizing, or divides.
    """

    value: Tensor
    multiplies: bool


# -- out --


def published_tensors(
    weight: QuantizedTensorStorage,
    scheme: Scheme,
    dtype: torch.dtype,
    level: PublishedLevel | None = None,
) -> dict[str, Tensor]:
    """The tensors of a scheme for a quantized weight: the same data, and scales with equal values.

    Args:
        weight: ``[out, in]``, with rowwise data.
        scheme: of the format.
        dtype: of the layer's values.
        level: with which the weight was loaded; written again if the weight still has its amax.

    Returns:
        Tensors by what follows the name of the layer and a dot. They may share memory with the
        weight.

    Raises:
        UsageError: the weight has no rowwise data on a grid.
        OptionError: the scheme cannot hold the weight; the error names the field that differs.
        ShapeError: the scheme has no such shapes.
    """
    side = side_of(weight, columnwise=False)
    if side is None or side.scales is None:
        raise UsageError(
            f"a {type(weight).__name__} says nothing of its elements and scales",
            expected="a weight with scales on a grid",
        )
    layout = Layout.of(side.layout)
    shape = _matrix_shape(weight)
    _check_layout(layout, scheme)
    _check_shape(shape, scheme)
    names = scheme.names
    data = side.values
    if isinstance(scheme.element, torch.dtype):
        data = data.view(scheme.element)
    tensors = {names.data: data, names.scales: _scales(side, layout, scheme, shape, dtype)}
    if names.level:
        assert side.amax is not None
        tensors[names.level] = _level(side.amax, layout, scheme, level)
    return tensors


def _matrix_shape(weight: QuantizedTensorStorage) -> Size:
    shape = tuple(weight.size())
    if len(shape) != 2:
        raise ShapeError(f"the weight has shape {shape}", expected="a matrix")
    return shape[0], shape[1]


def _check_layout(layout: Layout, scheme: Scheme) -> None:
    """Raises OptionError if the fields of a layout that no conversion changes do not fit."""
    level = "tensor" if scheme.names.level else "none"
    rotated = layout.rotation is not None and layout.rotation.turns(columnwise=False)
    differences = (
        ("element", layout.element, scheme.element),
        ("second_level", layout.second_level, level),
        ("rotation of rows", rotated, False),
    )
    for field, found, expected in differences:
        if found != expected:
            raise _different(scheme, field, str(found), str(expected))


def _different(scheme: Scheme, field: str, found: str, expected: str) -> OptionError:
    choice = scheme.exports_as
    options = "".join(f", {name}={value!r}" for name, value in choice.options)
    return OptionError(
        f"the format {scheme.format!r} with a scale for each {scheme.grain} cannot hold the "
        f"weight exactly: {field} is {found}",
        expected=expected,
        remedy=f"quantize the weight by ottava.get_recipe({choice.name!r}{options}), or export to "
        "another format",
    )


def _check_shape(shape: Size, scheme: Scheme) -> None:
    """Raises ShapeError if the blocks of a scheme do not divide a weight ``[out, in]``."""
    if not scheme.divides(shape):
        rows = f"rows in multiples of {scheme.block[0]}, " if scheme.whole_rows else ""
        raise ShapeError(
            f"the weight has shape {shape}, and blocks of {scheme.format!r} do not divide it",
            expected=f"{rows}columns in multiples of {scheme.block[1]}",
            remedy="leave the layer in high precision",
        )


def _scales(side: Side, layout: Layout, scheme: Scheme, shape: Size, dtype: torch.dtype) -> Tensor:
    """The scales of the scheme's blocks, in its shape and dtype."""
    assert side.scales is not None
    grid = side.scales.reshape(layout.grid(shape, columnwise=False))
    repeated = _repeated(grid, layout, scheme, shape)
    converted = _converted(repeated, layout, scheme, dtype)
    return converted.reshape(scheme.scale_shape(shape))


def _repeated(grid: Tensor, layout: Layout, scheme: Scheme, shape: Size) -> Tensor:
    """One scale for each of the scheme's blocks, which are parts of the layout's."""
    found, wanted = layout.block_of(columnwise=False), scheme.block
    for dim in (0, 1):
        outer, inner = (size or shape[dim] or 1 for size in (found[dim], wanted[dim]))
        if outer >= shape[dim]:
            # The block has all of this dimension.
            outer = -(-shape[dim] // inner) * inner
        if outer % inner:
            raise _different(scheme, "block", _in_words(found), _in_words(wanted))
        count = -(-shape[dim] // inner)
        if inner >= shape[dim]:
            count = 1
        grid = grid.repeat_interleave(outer // inner, dim).narrow(dim, 0, count)
    return grid


def _in_words(block: Block) -> str:
    return " x ".join("all" if side is None else str(side) for side in block)


def _converted(scales: Tensor, layout: Layout, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Scales of a layout in the dtype of a scheme."""
    wanted = scheme.scale_dtype or dtype
    if wanted is torch.float8_e4m3fn:
        if layout.scale is not torch.float8_e4m3fn:
            raise _different(scheme, "scale", str(layout.scale), str(wanted))
        return scales.view(wanted)
    if layout.scale not in (torch.float32, _E8M0):
        raise _different(scheme, "scale", str(layout.scale), str(wanted))
    codes = scales if layout.scale is _E8M0 else None
    if wanted in (torch.uint8, _E8M0):
        if codes is None:
            codes = _codes_of_powers(scales, scheme)
        return codes.view(wanted)
    numbers = scales if codes is None else powers_of_codes(codes)
    result = numbers.to(wanted)
    if not torch.equal(result.float(), numbers):
        place = int((result.float() != numbers).flatten().nonzero()[0])
        found = f"{float(numbers.flatten()[place])!r}"
        raise _different(scheme, "a scale", found, f"a number that {wanted} holds")
    return result


def _codes_of_powers(scales: Tensor, scheme: Scheme) -> Tensor:
    """Powers of two as codes of E8M0."""
    fractions, exponents = torch.frexp(scales)
    codes = exponents + (_BIAS - 1)
    fits = (fractions == 0.5) & (codes >= 0) & (codes < _NAN_CODE)
    if not bool(fits.all()):
        found = float(scales[~fits][0])
        raise _different(scheme, "a scale", repr(found), "a power of two")
    return codes.to(torch.uint8)


def powers_of_codes(codes: Tensor) -> Tensor:
    """Codes of E8M0 as float32 powers of two; NaN for 255."""
    return codes.view(_E8M0).float()


def _level(amax: Tensor, layout: Layout, scheme: Scheme, loaded: PublishedLevel | None) -> Tensor:
    """The scale of the tensor: that with which the weight was loaded, while it has this amax."""
    shape = () if scheme.level_multiplies else (1,)
    if loaded is not None and loaded.multiplies == scheme.level_multiplies:
        value = loaded.value.to(amax.device)
        if torch.equal(amax_of_level(value, layout, loaded.multiplies), amax):
            return value.reshape(shape)
    if scheme.level_multiplies:
        return _factor(amax, layout).reshape(shape)
    return second_scale(amax, layout, amax).reshape(shape)


# -- in --


def quantized_weight(
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    dtype: torch.dtype,
    *,
    name: str = "",
    recipe: Recipe | None = None,
) -> QuantizedTensor:
    """The weight that the tensors of a scheme are, with the same data and scales.

    A scale of the tensor becomes an amax. Where none gives exactly that scale, the nearest amax is
    taken, whose scale differs in the last bit of float32.

    Args:
        tensors: by what follows the name of the layer and a dot; others than the scheme's names are
            not read.
        scheme: of the format.
        dtype: of the layer's values.
        name: of the layer, for errors and recipes with rules.
        recipe: its quantizer of weights becomes that of the tensor; None for the scheme's own,
            which makes scales that a file can hold when the weight is written to.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape, or scales that are no
            positive numbers.
        OptionError: the recipe's weights have other elements, blocks or scales.
        RecipeNotFoundError: the package of the scheme's recipe is not installed.
    """
    names = scheme.names
    data = _tensor(tensors, names.data, name, _data_dtypes(scheme))
    if data.dim() != 2:
        raise _damaged(name, names.data, f"has shape {tuple(data.shape)}", "a matrix")
    rows, width = data.shape
    shape = rows, width * (2 if scheme.is_packed else 1)
    scales = _tensor(tensors, names.scales, name, _scale_dtypes(scheme))
    if not scheme.divides_columns(shape):
        raise _damaged(name, names.data, f"has shape {tuple(data.shape)}", "whole blocks")
    if scales.numel() != math.prod(scheme.scale_shape(shape)) or scales.dim() > 2:
        raise _damaged(
            name,
            names.scales,
            f"has shape {tuple(scales.shape)}",
            f"{scheme.scale_shape(shape)} for data of {tuple(data.shape)}",
        )
    later = recipe
    if recipe is None:
        recipe = (scheme.exports_as if _are_powers(scales) else scheme.loads_as).make()
        later = scheme.exports_as.make()
    quantizer = _quantizer_of(recipe, scheme, name)
    layout = quantizer.layout
    stored = _stored_scales(scales, layout, name, names.scales)
    stored = stored.reshape(layout.grid(shape, columnwise=False))
    if layout.one_buffer and layout.block == (None, None):
        stored = stored.reshape(())
    amax = None
    if names.level:
        amax = _amax(tensors, scheme, layout, name)
    values = data.contiguous().view(torch.uint8)
    side = Side(values, stored.contiguous(), layout.text, amax=amax)
    result = quantizer.storage_of(Operand(side, None, quantizer, dtype, torch.Size(shape)))
    assert isinstance(result, QuantizedTensor)
    assert later is not None
    # What an optimizer, or a merged adapter, makes of the weight has scales that the file can hold.
    result.update_quantizer(_quantizer_of(later, scheme, name))
    return result


def _are_powers(scales: Tensor) -> bool:
    """Whether numbers are powers of two. A weight with such scales then has the layout of one that
    is quantized for the export, so that products with both are the same."""
    if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return True
    return bool((torch.frexp(scales.float()).mantissa == 0.5).all())


def _tensor(
    tensors: Mapping[str, Tensor], name: str, layer: str, dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise _damaged(layer, name, "is missing", "a tensor of the format")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise _damaged(layer, name, f"has dtype {tensor.dtype}", expected)
    return tensor


def _damaged(layer: str, name: str, fault: str, expected: str) -> CheckpointError:
    full = f"{layer}.{name}" if layer else name
    return CheckpointError(f"tensor {full!r} {fault}", expected=expected)


def _data_dtypes(scheme: Scheme) -> tuple[torch.dtype, ...]:
    if scheme.is_packed:
        return (torch.uint8,)
    assert isinstance(scheme.element, torch.dtype)
    return (scheme.element,)


def _scale_dtypes(scheme: Scheme) -> tuple[torch.dtype, ...]:
    """The dtypes that scales in files have; those in the layer's dtype are also met in float32."""
    if scheme.scale_dtype in (None, torch.float32):
        return (torch.float32, torch.bfloat16, torch.float16)
    if scheme.scale_dtype is torch.float8_e4m3fn:
        return (torch.float8_e4m3fn,)
    return (torch.uint8, _E8M0)


def _quantizer_of(recipe: Recipe, scheme: Scheme, name: str) -> GridQuantizer:
    """A recipe's quantizer of weights, whose layout has to be that of the scheme."""
    quantizer = recipe.quantizer(QuantizerRole("linear", "weight", name)).copy()
    found = "on no grid"
    if isinstance(quantizer, GridQuantizer):
        layout = quantizer.layout
        if (
            layout.element == scheme.element
            and layout.block_of(columnwise=False) == scheme.block
            and (layout.second_level == "tensor") == bool(scheme.names.level)
            and not (layout.rotation is not None and layout.rotation.turns(columnwise=False))
        ):
            quantizer.set_usage(rowwise=True, columnwise=False)
            quantizer.internal = False
            return quantizer
        found = layout.text
    raise OptionError(
        f"weights of recipe {recipe._label!r} are {found}",
        expected=f"{scheme.element} with a scale for each {_in_words(scheme.block)}, as in "
        f"{scheme}",
    )


def _stored_scales(scales: Tensor, layout: Layout, layer: str, name: str) -> Tensor:
    """Scales of a file as a layout stores them."""
    if scales.dtype is torch.float8_e4m3fn:
        codes = scales.contiguous().view(torch.uint8)
        if bool((codes > 0x7E).any()):
            raise _damaged(layer, name, "has a negative scale or NaN", "numbers from 0 to 448")
        return codes
    if scales.dtype in (torch.uint8, _E8M0):
        codes = scales.contiguous().view(torch.uint8)
        if bool((codes == _NAN_CODE).any()):
            raise _damaged(layer, name, "has a scale that is NaN", "codes from 0 to 254")
        return codes if layout.scale is _E8M0 else powers_of_codes(codes)
    numbers = scales.float()
    if not bool((torch.isfinite(numbers) & (numbers >= 0)).all()):
        raise _damaged(layer, name, "has a scale that is negative or not finite", "numbers >= 0")
    return numbers


def _amax(tensors: Mapping[str, Tensor], scheme: Scheme, layout: Layout, layer: str) -> Tensor:
    """The amax of the tensor, from its scale."""
    name = scheme.names.level
    level = _tensor(tensors, name, layer, (torch.float32,))
    if level.numel() != 1:
        raise _damaged(layer, name, f"has shape {tuple(level.shape)}", "one number")
    number = float(level)
    least = 0.0 if scheme.level_multiplies else math.ulp(0.0)
    if not math.isfinite(number) or number < least:
        raise _damaged(layer, name, f"is {number!r}", "a positive number")
    return amax_of_level(level.reshape(()), layout, scheme.level_multiplies)


def amax_of_level(level: Tensor, layout: Layout, multiplies: bool) -> Tensor:
    """The amax whose scale of the tensor ``level`` is, or the nearest there is.

    Args:
        level: float32, one number.
        layout: of the weight.
        multiplies: whether the level is ``amax / top``, or ``top / amax``, where ``top`` is 2688 in
            NVFP4.
    """
    level = level.detach().reshape(())
    top = torch.full_like(level, top_of(layout))
    first = level * top if multiplies else torch.div(top, level)
    best, least = first, math.inf
    for step in _NEIGHBOURS:
        candidate = _neighbour(first, step)
        if multiplies:
            made = _factor(candidate, layout)
        else:
            made = second_scale(candidate, layout, candidate)
        distance = float((made - level).abs())
        if distance < least:
            best, least = candidate, distance
    return best


def _factor(amax: Tensor, layout: Layout) -> Tensor:
    """What multiplies when dequantizing, beside the scale of the block."""
    return torch.div(amax, torch.full_like(amax, top_of(layout)))


def _neighbour(number: Tensor, step: int) -> Tensor:
    """The float that lies ``step`` floats above a number that is not negative."""
    bits = number.view(torch.int32) + step
    return bits.clamp(0, 0x7F7FFFFF).to(torch.int32).view(torch.float32)
