"""A matrix, quantized as a contract says."""

import copy
import math
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ottava.contract.contract import Contract
from ottava.contract.numbers import (
    FLT_MAX,
    below,
    format_of,
    magnitudes,
    mantissa_bits,
    nearest,
    numbers_of_codes,
    numbers_of_scales,
    power_of_two,
)
from ottava.contract.steps import Grid, Usage, check_given, steps_of
from ottava.errors import DTypeError
from ottava.formats import IntegerFormat

_DTYPES = torch.float32, torch.bfloat16, torch.float16
_MASK = (1 << 32) - 1


class Levels(NamedTuple):
    """Step 4 of each area that has one ``S``: its amax, ``S`` and ``S_inv``."""

    amax: Tensor
    scale: Tensor
    inverse: Tensor


class Chosen(NamedTuple):
    """The codes of all elements, the stored scale of each area, and what the elements are rounded
    from."""

    codes: Tensor
    scales: Tensor
    scaled: Tensor


class Interpretation:
    """One usage of a matrix, quantized as a contract says.

    Each attribute is a quantity of one of the contract's steps, in their order, and is computed
    when it is read. A subclass may define a quantity in another way, and leave the others as the
    contract says. Quantities of scales have a number for each area that shares an amax.

    Args:
        contract: states every choice of the usage.
        usage: "rowwise" or "columnwise".
        x: a matrix in float32, bfloat16 or float16.
        seed: of the random words, where elements are rounded at random.
        scale: a float32, where the scale comes from outside.

    Attributes:
        levels: the second level that is taken instead of the matrix's own; None for its own.

    Raises:
        DTypeError: x is no matrix of these dtypes.
        OptionError: a choice is not stated, or the seed or the scale is missing.
    """

    def __init__(
        self,
        contract: Contract,
        usage: Usage,
        x: Tensor,
        *,
        seed: int | None = None,
        scale: float | None = None,
    ) -> None:
        self.steps = steps_of(contract, usage)
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.dim() != 2:
            words = f"a {x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x)
            raise DTypeError(f"x is {words}", "a matrix in float32, bfloat16 or float16")
        check_given(self.steps, seed, scale)
        self.usage = usage
        self.x = x
        self.seed = seed or 0
        self.given = scale
        self.levels: Levels | None = None
        self.one = torch.ones(())
        self.maximum = torch.tensor(float(self.steps.scale.maximum))
        # That of a candidate.
        self.factor = self.one

    def take_scales(self, stored: Tensor) -> None:
        """Take these stored scales instead of those that follow from amaxes, one for each area."""
        if self.steps.scale.format == "float32":
            vars(self).update(inverse=stored, scale=self.one / stored)
        else:
            vars(self).update(code=stored.long())

    @property
    def parts(self) -> dict[str, Tensor]:
        """What is stored, by the names of :func:`~ottava.gemm.stored_tensors`."""
        codes, scales = self.chosen.codes, self.areas.on(self.blocks, self.chosen.scales)
        if self.steps.storage.held == "transpose":
            codes, scales = codes.t(), scales.t()
        if self.steps.scale.format != "float32":
            scales = scales.to(torch.uint8)
        parts = {"data": self.packed(codes).to(torch.uint8).contiguous()}
        parts["scales"] = scales.contiguous()
        if self.steps.second_level is not None:
            parts["amax"] = self.level_amax.reshape(-1)
        return parts

    # Steps 1 and 2.

    @cached_property
    def source(self) -> Tensor:
        """Step 1: the values in float32."""
        name = self.steps.source.rounded_to
        return (self.x if name == "none" else self.x.to(getattr(torch, name))).float()

    @cached_property
    def values(self) -> Tensor:
        """Step 2: the values after the transform, with its padding."""
        if self.steps.transform is None:
            return self.source
        if self.usage == "columnwise":
            return self.transformed(self.source.t(), self.steps.transform.size).t()
        return self.transformed(self.source, self.steps.transform.size)

    def transformed(self, values: Tensor, size: int) -> Tensor:
        """Step 2 for groups along rows."""
        padded = torch.nn.functional.pad(values, [0, -values.shape[1] % size])
        groups = padded.reshape(-1, size) * self.transform_signs
        stride = 1
        while stride < size:
            one, other = groups.view(-1, size // stride // 2, 2, stride).unbind(2)
            groups = torch.stack([one + other, one - other], 2).reshape(-1, size)
            stride *= 2
        groups = groups * self.transform_factor
        return groups.to(self.x.dtype).float().reshape(padded.shape)

    @cached_property
    def transform_signs(self) -> Tensor:
        """The signs of the elements of a group."""
        step = self.steps.transform
        assert step is not None
        return torch.tensor([1 - 2.0 * (int(step.signs, 16) >> i & 1) for i in range(step.size)])

    @cached_property
    def transform_factor(self) -> Tensor:
        """What sums of groups are multiplied by."""
        assert self.steps.transform is not None
        return torch.tensor(1 / math.sqrt(self.steps.transform.size))

    # Step 3.

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the values."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def blocks(self) -> Grid:
        """The blocks that have a stored scale each."""
        return Grid(self.steps.amax.block, self.shape)

    @property
    def areas(self) -> Grid:
        """The blocks, or the areas whose blocks share an amax."""
        return Grid(self.steps.amax.area or self.steps.amax.block, self.shape)

    @cached_property
    def magnitudes(self) -> Tensor:
        """What an amax is the largest of."""
        return self.values.abs()

    @cached_property
    def known_magnitudes(self) -> Tensor:
        """The magnitudes, with 0 for NaN."""
        return torch.where(self.magnitudes.isnan(), 0.0, self.magnitudes)

    @cached_property
    def amax(self) -> Tensor:
        """Step 3: the amaxes of areas."""
        propagates = self.steps.amax.nan == "propagates"
        return self.areas.largest(self.magnitudes if propagates else self.known_magnitudes)

    # Step 4. These quantities have a number for each area of `level_grid`, but S and S_inv.

    @property
    def level_grid(self) -> Grid:
        """The areas that have one ``S``."""
        step = self.steps.second_level
        return Grid((None, None) if step is None else step.over, self.shape)

    @cached_property
    def top(self) -> Tensor:
        """``bound * maximum`` of the second level."""
        step = self.steps.second_level
        assert step is not None
        return torch.tensor(float(step.bound * step.maximum))

    @cached_property
    def level_amax(self) -> Tensor:
        """Step 4: the amaxes of the second level."""
        if self.levels is not None:
            return self.levels.amax
        return self.level_grid.largest(self.known_magnitudes).clamp(max=FLT_MAX)

    @cached_property
    def level_scale(self) -> Tensor:
        """``S``."""
        if self.levels is not None:
            return self.levels.scale
        return (self.top / self.level_amax).clamp(max=FLT_MAX)

    @cached_property
    def level_inverse(self) -> Tensor:
        """``S_inv``."""
        if self.levels is not None:
            return self.levels.inverse
        return self.one / self.level_scale

    @cached_property
    def S(self) -> Tensor:
        """``S`` of each area that shares an amax; 1 without a second level."""
        if self.steps.second_level is None:
            return self.one
        return self.level_grid.on(self.areas, self.level_scale)

    @cached_property
    def S_inv(self) -> Tensor:
        """``S_inv`` of each area that shares an amax; 1 without a second level."""
        if self.steps.second_level is None:
            return self.one
        return self.level_grid.on(self.areas, self.level_inverse)

    # Step 5.

    @cached_property
    def raised(self) -> Tensor:
        """Step 5: the amaxes that scales are made of, which are not below epsilon."""
        amax, step = self.amax, self.steps.scale
        if step.rule != "rounded":
            amax = amax * self.factor
        epsilon = torch.tensor(float(step.epsilon))
        return torch.where(amax < epsilon, epsilon, amax)

    @cached_property
    def finite(self) -> Tensor:
        """The same, where infinity is the largest float32."""
        return self.raised.clamp(max=FLT_MAX)

    @cached_property
    def quotient(self) -> Tensor:
        """Float32 scales before any special case."""
        return self.maximum / self.raised

    @cached_property
    def scale(self) -> Tensor:
        """Float32 scales."""
        step, amax = self.steps.scale, self.raised
        if step.rule == "given":
            return torch.full_like(amax, self.given or 0.0)
        scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, self.quotient)
        if step.infinite != "none":
            dtype = torch.float32 if step.infinite == "float32" else self.x.dtype
            scale = torch.where(scale.isinf(), torch.finfo(dtype).max, scale)
        if step.rule == "quotient-floor":
            return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        return scale.clamp(max=self.given) if step.rule == "given-fitting" else scale

    @cached_property
    def inverse(self) -> Tensor:
        """Float32 scales as they are stored."""
        return self.one / self.scale

    @cached_property
    def exponent(self) -> Tensor:
        """Codes of E8M0, of amaxes that are finite."""
        step, amax = self.steps.scale, self.raised
        if step.rule in ("floor", "even"):
            bits = amax.view(torch.int32)
            if step.rule == "even":
                bits = bits + (1 << (22 - mantissa_bits(self.steps.element.format)))
            return (bits >> 23) - (math.frexp(step.maximum)[1] - 1)
        ratio = (amax * (self.one / self.maximum)).double()
        mantissa, exponent = torch.frexp(ratio)
        above = mantissa > 0.5 if step.rule == "up" else mantissa * mantissa > 0.5
        return torch.where(ratio == 0, 0, exponent - 1 + above + 127)

    @cached_property
    def exact(self) -> Tensor:
        """Scales before they are rounded to a byte."""
        if self.steps.candidates is None:
            return self.finite * (self.S * (self.one / self.maximum))
        return self.finite / self.maximum * self.S * self.factor

    @cached_property
    def limited(self) -> Tensor:
        """The same, which are at most the largest number of the byte's format."""
        return self.exact.clamp(max=format_of(self.steps.scale.format).max)

    @cached_property
    def byte(self) -> Tensor:
        """The codes of these."""
        return nearest(self.limited, self.steps.scale.format)

    @cached_property
    def code(self) -> Tensor:
        """Codes of scales in a byte, with those of NaN and infinity."""
        if self.steps.scale.format == "E8M0":
            code = torch.where(self.raised.isinf(), 254, self.exponent.clamp(0, 254))
            return torch.where(self.raised.isnan(), 255, code)
        # The code after that of the largest number is NaN.
        return torch.where(self.exact.isnan(), len(magnitudes(self.steps.scale.format)), self.byte)

    @cached_property
    def stored(self) -> Tensor:
        """Scales as they are stored: codes, or float32."""
        return self.inverse if self.steps.scale.format == "float32" else self.code

    @cached_property
    def number(self) -> Tensor:
        """The numbers that stored scales are."""
        if self.steps.scale.format == "float32":
            return self.inverse
        return numbers_of_scales(self.code.to(torch.uint8), self.steps.scale.format)

    @cached_property
    def multiplier(self) -> Tensor:
        """What values are multiplied by."""
        if self.steps.scale.format == "float32":
            return self.scale
        if self.steps.scale.format == "E8M0":
            return power_of_two(127 - self.code)
        return (self.one / (self.number * self.S_inv)).clamp(max=FLT_MAX)

    # Step 5, where the least error chooses among candidates.

    @cached_property
    def chosen(self) -> Chosen:
        """What is stored: of the candidate with the least error in each area, the first of
        equals."""
        step = self.steps.candidates
        if step is None:
            return Chosen(self.codes, self.stored, self.scaled)
        first, *others = map(self.tried, step.factors)
        least = first.error
        best = Chosen(first.codes, first.stored, first.scaled)
        for other in others:
            # A contract says "first"; "last" is a wrong turn.
            is_last = str(step.ties) == "last"
            better = other.error <= least if is_last else other.error < least
            least = torch.where(better, other.error, least)
            spread = self.areas.spread(better)
            best = Chosen(
                torch.where(spread, other.codes, best.codes),
                torch.where(better, other.stored, best.scales),
                torch.where(spread, other.scaled, best.scaled),
            )
        return best

    def tried(self, factor: float) -> Self:
        """A candidate, which shares the quantities that do not depend on the factor."""
        _ = self.amax, self.S, self.S_inv
        candidate = copy.copy(self)
        candidate.factor = torch.tensor(factor)
        return candidate

    @cached_property
    def error(self) -> Tensor:
        """The error of a candidate, summed over areas."""
        step = self.steps.candidates
        assert step is not None
        number = self.areas.spread(self.number)
        decoded = numbers_of_codes(self.steps.element.format)[self.codes] * number
        if step.decoded != "element*scale":
            amax = self.level_grid.on(self.areas, self.level_amax)
            decoded = decoded * self.areas.spread(amax) / self.top
        difference = decoded - self.values
        errors = difference.abs() if step.error == "MAE" else difference * difference
        if step.sums == "rows in order, columns by halves":
            return _sums(errors.t(), self.areas.transposed()).t()
        return _sums(errors, self.areas)

    # Step 6.

    @cached_property
    def product(self) -> Tensor:
        """Step 6: values times multipliers."""
        return self.values * self.areas.spread(self.multiplier)

    @cached_property
    def scaled(self) -> Tensor:
        """What elements are rounded from."""
        return self.product

    @cached_property
    def saturated(self) -> Tensor:
        """The same, within the limits of elements, and 0 for NaN."""
        step = self.steps.element
        return torch.where(self.scaled.isnan(), 0.0, self.scaled.clamp(step.least, step.maximum))

    @cached_property
    def places(self) -> Tensor:
        """The places of the elements among the magnitudes of their format."""
        name, numbers = self.steps.element.format, self.saturated.abs()
        if self.steps.random is None:
            return nearest(numbers, name)
        finite = magnitudes(name).double()
        low = below(numbers, name)
        gap = finite[(low + 1).clamp(max=len(finite) - 1)] - finite[low]
        share = torch.where(gap > 0, (numbers.double() - finite[low]) / gap, 0.0)
        words = _words(self.seed, self.steps.random.stream, self.shape)
        return low + (words < torch.floor(share * 2.0**32))

    @cached_property
    def codes(self) -> Tensor:
        """The codes of elements."""
        step, places, negative = self.steps.element, self.places, self.saturated.signbit()
        if isinstance(format_of(step.format), IntegerFormat):
            codes = torch.where(negative, -places % (1 << step.bits), places)
        else:
            if step.zero == "unsigned":
                negative = negative & (places != 0)
            codes = places | negative.long() << (step.bits - 1)
        return torch.where(self.scaled.isnan(), step.nan, codes)

    # Step 7.

    def packed(self, codes: Tensor) -> Tensor:
        """Step 7: the bytes of codes."""
        step = self.steps.storage
        if step.per_byte == 1:
            return codes
        padded = torch.nn.functional.pad(codes, [0, codes.shape[1] % 2])
        low, high = padded.unflatten(1, (-1, 2)).unbind(2)
        if step.first == "high":
            low, high = high, low
        packed: Tensor = low | high << self.steps.element.bits
        return packed


def _sums(errors: Tensor, areas: Grid) -> Tensor:
    """The sums over areas: columns in order, then rows by halves."""
    errors = areas.in_blocks(errors)
    rows = torch.zeros(errors.shape[:3])
    for column in errors.unbind(3):
        rows = rows + column
    height = errors.shape[1]
    half = 1 << (height - 1).bit_length()
    rows = torch.nn.functional.pad(rows, [0, 0, 0, half - height])
    while half > 1:
        half //= 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _words(seed: int, stream: int, shape: tuple[int, int]) -> Tensor:
    """The random word of each element, by Philox4x32-10 (Salmon and others, 2011)."""
    place = torch.arange(math.prod(shape)).view(shape)
    block, zero = place // 4, torch.zeros_like(place)
    words = [block & _MASK, block >> 32, zero + stream, zero]
    key = [seed & _MASK, seed >> 32]
    for _ in range(10):
        # The product wraps around, and has the right bits.
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second >> 32 & _MASK) ^ words[1] ^ key[0],
            second & _MASK,
            (first >> 32 & _MASK) ^ words[3] ^ key[1],
            first & _MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return torch.stack(words).gather(0, (place % 4).unsqueeze(0))[0]
