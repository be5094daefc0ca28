"""The array twin of :mod:`ottava_verify.scalar`: the same steps for whole tensors.

Each step is a method of :class:`Interpreter`, so that a subclass may take one step another way, and
leave the others as the contract says.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.contract import Contract
from ottava_verify.numbers import FLT_MAX, format_of, rounded
from ottava_verify.steps import Grid, Steps, Usage, check_given, steps_of

_MASK = (1 << 32) - 1


class Level(NamedTuple):
    """Step 4: the amaxes, ``S`` and ``S_inv`` of areas; of elements or blocks once they are spread.

    Without a second level there are no amaxes, and ``S`` is 1.
    """

    amax: Tensor | None
    scale: Tensor
    inverse: Tensor


class Scales(NamedTuple):
    """Step 5: the stored scales, the numbers that they are, and the multipliers of values."""

    stored: Tensor
    number: Tensor
    multiplier: Tensor


class Chosen(NamedTuple):
    """Steps 5 and 6: the codes of elements, the stored scales of areas, and what the elements were
    made of: the values, and these times their multipliers."""

    codes: Tensor
    scales: Tensor
    values: Tensor
    scaled: Tensor


@cache
def magnitudes_of(name: str) -> Tensor:
    """The magnitudes of a format, which float32 has exactly."""
    return torch.tensor(format_of(name).magnitudes)


@cache
def middles_of(name: str) -> Tensor:
    """The numbers halfway between neighbouring magnitudes, which float32 has exactly, too."""
    magnitudes = magnitudes_of(name)
    return (magnitudes[:-1] + magnitudes[1:]) / 2


def nearest(numbers: Tensor, name: str) -> Tensor:
    """The place of the nearest magnitude of a format, of the even one of two."""
    middles, numbers = middles_of(name), numbers.contiguous()
    places = torch.bucketize(numbers, middles)
    tie = numbers == middles[places.clamp(max=len(middles) - 1)]
    return places + (tie & (places % 2 == 1))


def below(numbers: Tensor, name: str) -> Tensor:
    """The place of the largest magnitude of a format that is not larger."""
    return torch.bucketize(numbers.contiguous(), magnitudes_of(name), right=True) - 1


class Interpreter:
    """Quantizes one usage of matrices as a contract says.

    Args:
        contract: states every choice of the usage.
        usage: "rowwise" or "columnwise".
        seed: of the random words, where elements are rounded at random.
        scale: a float32, where the scale comes from outside.

    Attributes:
        level: of the last matrix.
        chosen: what the last matrix was quantized to, before it was stored.

    Raises:
        OptionError: a choice is not stated, or the seed or the scale is missing.
    """

    def __init__(
        self,
        contract: Contract,
        usage: Usage,
        *,
        seed: int | None = None,
        scale: float | None = None,
    ) -> None:
        self.steps: Steps = steps_of(contract, usage)
        self.usage = usage
        self.seed = seed
        self.scale = scale
        check_given(self.steps, seed, scale)

    def quantize(self, x: Tensor) -> dict[str, Tensor]:
        """What is stored of a matrix in float32, bfloat16 or float16, by the names of
        :func:`~ottava_verify.stored_tensors`."""
        values = self.transform(self.source(x), x.dtype)
        self.level = self.second_level(values)
        self.chosen = self.choice(values, self.amaxes(values), self.level, x.dtype)
        scales = self.of_blocks(self.chosen.scales, values)
        return self.storage(self.chosen.codes, scales, self.level.amax)

    # Steps 1 to 4.

    def source(self, x: Tensor) -> Tensor:
        """Step 1: the values in float32."""
        if self.steps.source.rounded_to != "none":
            x = x.to(getattr(torch, self.steps.source.rounded_to))
        return x.to(torch.float32)

    def transform(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Step 2: the values after the transform, with its padding."""
        if self.steps.transform is None:
            return values
        if self.usage == "columnwise":
            return self.transform_rows(values.t(), dtype).t()
        return self.transform_rows(values, dtype)

    def transform_rows(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Step 2 for groups along rows."""
        step = self.steps.transform
        assert step is not None
        padded = torch.nn.functional.pad(values, [0, -values.shape[1] % step.size])
        signs = [-1.0 if int(step.signs, 16) >> i & 1 else 1.0 for i in range(step.size)]
        groups = padded.reshape(-1, step.size) * torch.tensor(signs)
        stride = 1
        while stride < step.size:
            one, other = groups.view(-1, step.size // stride // 2, 2, stride).unbind(2)
            groups = torch.stack([one + other, one - other], 2).reshape(-1, step.size)
            stride *= 2
        groups = groups * self.factor(step.size)
        return groups.to(dtype).to(torch.float32).reshape(padded.shape)

    def factor(self, size: int) -> float:
        """What transformed groups of step 2 are multiplied by."""
        return rounded(1 / math.sqrt(size))

    def magnitudes(self, values: Tensor) -> Tensor:
        """What an amax is the largest one of."""
        return values.abs()

    def amaxes(self, values: Tensor) -> Tensor:
        """Step 3: the amax of each area, or of each block where blocks have scales of their own."""
        step = self.steps.amax
        return self.amaxes_on(self.areas(values), values, propagate=step.nan == "propagates")

    def amaxes_on(self, grid: Grid, values: Tensor, propagate: bool = False) -> Tensor:
        """The largest magnitudes on a grid; NaN counts as 0 unless it propagates."""
        magnitudes = self.magnitudes(values)
        if not propagate:
            magnitudes = torch.where(magnitudes.isnan(), 0.0, magnitudes)
        blocks = self.in_blocks(grid, magnitudes)
        return blocks.amax((1, 3)) if blocks.numel() else torch.zeros(grid.counts)

    def in_blocks(self, grid: Grid, numbers: Tensor) -> Tensor:
        """Numbers >= 0 as ``[blocks down, rows, blocks across, columns]``, with zeros at ragged
        edges."""
        down, across = grid.counts
        height, width = (
            side or max(size, 1) for side, size in zip(grid.block, grid.shape, strict=True)
        )
        missing = (down * height - grid.shape[0], across * width - grid.shape[1])
        padded = torch.nn.functional.pad(numbers, [0, missing[1], 0, missing[0]])
        return padded.reshape(down, height, across, width)

    def areas(self, values: Tensor) -> Grid:
        """The areas that have one scale."""
        step = self.steps.amax
        return Grid(step.area or step.block, (values.shape[0], values.shape[1]))

    def index(self, grid: Grid, dim: int) -> Tensor:
        """The block of each row, or of each column."""
        side = grid.block[dim]
        places = torch.arange(grid.shape[dim])
        return places // side if side is not None else torch.zeros_like(places)

    def spread(self, grid: Grid, numbers: Tensor) -> Tensor:
        """The number of each element's block."""
        return numbers[self.index(grid, 0)][:, self.index(grid, 1)]

    def second_level(self, values: Tensor) -> Level:
        """Step 4, for each of the areas that have one ``S``."""
        step = self.steps.second_level
        if step is None:
            return Level(None, torch.ones(1, 1), torch.ones(1, 1))
        amax = self.amaxes_on(self.level_grid(values), values).clamp(max=FLT_MAX)
        scale = torch.div(torch.full_like(amax, self.top()), amax).clamp(max=FLT_MAX)
        return Level(amax, scale, torch.ones_like(scale) / scale)

    def level_grid(self, values: Tensor) -> Grid:
        """The areas that have one ``S``."""
        step = self.steps.second_level
        over = (None, None) if step is None else step.over
        return Grid(over, (values.shape[0], values.shape[1]))

    def top(self) -> float:
        """``bound * maximum`` of the second level."""
        step = self.steps.second_level
        assert step is not None
        return rounded(step.bound * step.maximum)

    # Step 5.

    def scales(
        self, amax: Tensor, level: Level, dtype: torch.dtype, factor: float | None = None
    ) -> Scales:
        """Step 5: the scales of areas with these amaxes; ``factor`` is a candidate's."""
        step = self.steps.scale
        if step.rule == "rounded":
            return self.byte_scales(self.raised(amax), level, factor)
        if factor is not None:
            amax = amax * rounded(factor)
        amax = self.raised(amax)
        if step.format == "E8M0":
            codes = self.exponent_codes(amax)
            return Scales(codes, self.powers(codes - 127), self.powers(127 - codes))
        scale = self.float_scales(amax, dtype)
        inverse = self.inverses(scale, amax)
        return Scales(inverse, inverse, scale)

    def raised(self, amax: Tensor) -> Tensor:
        """Amaxes that are not below epsilon."""
        epsilon = rounded(self.steps.scale.epsilon)
        return torch.where(amax < epsilon, epsilon, amax)

    def quotients(self, amax: Tensor) -> Tensor:
        """Scales in float32 before any special case."""
        return torch.div(torch.full_like(amax, self.steps.scale.maximum), amax)

    def inverses(self, scale: Tensor, amax: Tensor) -> Tensor:
        """Float32 scales as they are stored."""
        return torch.ones_like(scale) / scale

    def powers(self, exponents: Tensor) -> Tensor:
        """Powers of two; NaN for the code 255."""
        powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents)
        return torch.where(exponents.abs() == 128, math.nan, powers).to(torch.float32)

    def float_scales(self, amax: Tensor, dtype: torch.dtype) -> Tensor:
        """Float32 scales."""
        step = self.steps.scale
        if step.rule == "given":
            assert self.scale is not None
            return torch.full_like(amax, self.scale)
        scale = self.quotients(amax)
        scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
        if step.infinite != "none":
            largest = FLT_MAX if step.infinite == "float32" else torch.finfo(dtype).max
            scale = torch.where(scale.isinf(), largest, scale)
        if step.rule == "quotient-floor":
            return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        if step.rule == "given-fitting":
            assert self.scale is not None
            return scale.clamp(max=self.scale)
        return scale

    def exponent_codes(self, amax: Tensor) -> Tensor:
        """The codes of E8M0."""
        step = self.steps.scale
        if step.rule in ("floor", "even"):
            bits = amax.view(torch.int32)
            if step.rule == "even":
                bits = bits + (1 << (22 - format_of(self.steps.element.format).mantissa_bits))
            codes = (bits >> 23) - (math.frexp(step.maximum)[1] - 1)
        else:
            ratio = (amax * rounded(1 / step.maximum)).double()
            mantissa, exponent = torch.frexp(ratio)
            above = mantissa > 0.5 if step.rule == "up" else mantissa * mantissa > 0.5
            codes = torch.where(ratio == 0, 0, exponent - 1 + above + 127)
        codes = torch.where(amax.isinf(), 254, codes.clamp(0, 254))
        return torch.where(amax.isnan(), 255, codes)

    def byte_scales(self, amax: Tensor, level: Level, factor: float | None) -> Scales:
        """Scales in a byte, whose multipliers undo the second level, too."""
        fmt = format_of(self.steps.scale.format)
        exact = self.exact_scales(amax.clamp(max=FLT_MAX), level, factor)
        codes = self.scale_codes(exact.clamp(max=fmt.magnitudes[-1]))
        # The code after that of the largest number is NaN.
        codes = torch.where(exact.isnan(), len(fmt.magnitudes), codes)
        number = torch.tensor([*fmt.magnitudes, math.nan])[codes]
        return Scales(codes, number, self.undone(number, level))

    def exact_scales(self, amax: Tensor, level: Level, factor: float | None) -> Tensor:
        """Scales before they are rounded to a byte."""
        maximum = self.steps.scale.maximum
        if factor is None:
            return amax * (level.scale * rounded(1 / maximum))
        return amax / torch.full_like(amax, maximum) * level.scale * rounded(factor)

    def scale_codes(self, exact: Tensor) -> Tensor:
        """The codes of scales in a byte."""
        return nearest(exact, self.steps.scale.format)

    def undone(self, number: Tensor, level: Level) -> Tensor:
        """The multipliers of scales in a byte."""
        product = number * level.inverse
        return (torch.ones_like(product) / product).clamp(max=FLT_MAX)

    def choice(self, values: Tensor, amax: Tensor, level: Level, dtype: torch.dtype) -> Chosen:
        """Step 5 with its candidates, and step 6: for each area the candidate with the least
        error."""
        areas = self.areas(values)
        if level.amax is not None:
            level = Level(*(self.of_areas(values, numbers) for numbers in level))
        step = self.steps.candidates
        best: Chosen | None = None
        least = amax
        for factor in step.factors if step is not None else (None,):
            scales = self.scales(amax, level, dtype, factor)
            scaled = self.multiplied(values, scales, areas)
            tried = Chosen(self.elements(scaled), scales.stored, values, scaled)
            if step is None:
                return tried
            error = self.errors(values, tried.codes, scales.number, level.amax)
            if best is None:
                best, least = tried, error
                continue
            better = self.is_better(error, least)
            least = torch.where(better, error, least)
            spread = self.spread(areas, better)
            best = Chosen(
                torch.where(spread, tried.codes, best.codes),
                torch.where(better, tried.scales, best.scales),
                values,
                torch.where(spread, tried.scaled, best.scaled),
            )
        assert best is not None
        return best

    def is_better(self, error: Tensor, least: Tensor) -> Tensor:
        """Whether a candidate takes the place of an earlier one."""
        return error < least

    def of_areas(self, values: Tensor, numbers: Tensor | None) -> Tensor:
        """The second level of each area, from that of its first element."""
        assert numbers is not None
        areas, grid = self.areas(values), self.level_grid(values)
        return numbers[self.firsts(areas, grid, 0)][:, self.firsts(areas, grid, 1)]

    def firsts(self, blocks: Grid, areas: Grid, dim: int) -> Tensor:
        """The area of the first element of each block, along one dimension."""
        starts = torch.arange(blocks.counts[dim]) * (blocks.block[dim] or 0)
        side = areas.block[dim]
        return starts // side if side is not None else torch.zeros_like(starts)

    def of_blocks(self, scales: Tensor, values: Tensor) -> Tensor:
        """The scale of each block's area."""
        areas = self.areas(values)
        blocks = Grid(self.steps.amax.block, areas.shape)
        return scales[self.firsts(blocks, areas, 0)][:, self.firsts(blocks, areas, 1)]

    def errors(self, values: Tensor, codes: Tensor, scale: Tensor, amax: Tensor | None) -> Tensor:
        """The errors of a candidate, summed over areas."""
        step, areas = self.steps.candidates, self.areas(values)
        assert step is not None
        decoded = self.numbers()[codes] * self.spread(areas, scale)
        if step.decoded != "element*scale":
            assert amax is not None
            whole = decoded * self.spread(areas, amax)
            decoded = whole / torch.full_like(whole, self.top())
        difference = decoded - values
        errors = difference.abs() if step.error == "MAE" else difference * difference
        if step.sums == "rows in order, columns by halves":
            turned = Grid(areas.block[::-1], areas.shape[::-1])
            return self.sums(errors.t(), turned).t()
        return self.sums(errors, areas)

    def sums(self, errors: Tensor, areas: Grid) -> Tensor:
        """The sums over areas: columns in order, then rows by halves."""
        errors = self.in_blocks(areas, errors)
        height = errors.shape[1]
        rows = torch.zeros(errors.shape[:3])
        for column in errors.unbind(3):
            rows = rows + column
        half = 1 << (height - 1).bit_length()
        rows = torch.nn.functional.pad(rows, [0, 0, 0, half - height])
        while half > 1:
            half //= 2
            rows = rows[:, :half] + rows[:, half:]
        return rows[:, 0]

    # Step 6.

    def multiplied(self, values: Tensor, scales: Scales, areas: Grid) -> Tensor:
        """Values times the multipliers of their areas."""
        return values * self.spread(areas, scales.multiplier)

    def elements(self, scaled: Tensor) -> Tensor:
        """Step 6: the codes of scaled values."""
        step = self.steps.element
        limited = torch.where(scaled.isnan(), 0.0, scaled.clamp(step.least, step.maximum))
        codes = self.signed(self.places(limited.abs(), step.format), limited.signbit())
        return torch.where(scaled.isnan(), step.nan, codes)

    def signed(self, places: Tensor, negative: Tensor) -> Tensor:
        """The codes of magnitudes with signs."""
        fmt = format_of(self.steps.element.format)
        if fmt.twos_complement:
            return torch.where(negative, -places % (1 << fmt.bits), places)
        return places | negative.to(torch.int64) << (fmt.bits - 1)

    def places(self, numbers: Tensor, name: str) -> Tensor:
        """The places of the magnitudes of a format that numbers are rounded to."""
        if self.steps.random is None:
            return nearest(numbers, name)
        magnitudes = magnitudes_of(name).double()
        low = below(numbers, name)
        high = magnitudes[(low + 1).clamp(max=len(magnitudes) - 1)]
        gap = high - magnitudes[low]
        share = torch.where(gap > 0, (numbers.double() - magnitudes[low]) / gap, 0.0)
        return low + (self.words(numbers) < torch.floor(share * 2.0**32))

    def words(self, values: Tensor) -> Tensor:
        """The random word of each element, by Philox4x32-10."""
        assert self.seed is not None
        assert self.steps.random is not None
        place = torch.arange(values.numel()).view(values.shape)
        block, zero = place // 4, torch.zeros_like(place)
        words = [block & _MASK, block >> 32, zero + self.steps.random.stream, zero]
        key = [self.seed & _MASK, self.seed >> 32]
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

    def numbers(self) -> Tensor:
        """The number of each code."""
        fmt, step = format_of(self.steps.element.format), self.steps.element
        numbers = torch.tensor([fmt.number(code) for code in range(1 << step.bits)])
        return numbers

    # Step 7.

    def storage(self, codes: Tensor, scales: Tensor, amax: Tensor | None) -> dict[str, Tensor]:
        """Step 7: the bytes and scales of the held matrix, and the amaxes of the second level."""
        if self.steps.storage.held == "transpose":
            codes, scales = codes.t(), scales.t()
        if self.steps.scale.format != "float32":
            scales = scales.to(torch.uint8)
        parts = {"data": self.packed(codes).to(torch.uint8).contiguous()}
        parts["scales"] = scales.contiguous()
        if amax is not None:
            parts["amax"] = amax.reshape(-1)
        return parts

    def packed(self, codes: Tensor) -> Tensor:
        """The bytes of codes."""
        step = self.steps.storage
        if step.per_byte == 1:
            return codes
        even, odd = (
            torch.nn.functional.pad(codes, [0, codes.shape[1] % 2]).unflatten(1, (-1, 2)).unbind(2)
        )
        low, high = (even, odd) if step.first == "low" else (odd, even)
        packed: Tensor = low | high << self.steps.element.bits
        return packed
