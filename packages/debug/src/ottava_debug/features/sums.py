"""Statistics as functions of sums, so that several microbatches and ranks can be combined."""

import math
import operator
import re
from collections.abc import Callable, Iterable

import torch

from ottava.gemm import as_matrix
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.features.together import NEUTRAL, Numbers
from ottava_debug.measures import Comparison, exponents

_Sum = tuple[Callable[[torch.Tensor], torch.Tensor], str]

#: The histogram, the only statistic that is not a number.
EXPONENTS = "exponents"
# The exponents of all high-precision values: those of float32, with its subnormal numbers.
_EXPONENTS = range(-149, 128)


def _least(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else min(a, b)


def _most(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


# Operation -> the function that combines the numbers of two tensors.
_TOGETHER: dict[str, Callable[[float, float], float]] = {
    "sum": operator.add,
    "min": _least,
    "max": _most,
}


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    # An amax ignores NaN.
    return torch.where(x.isnan(), torch.zeros((), dtype=x.dtype, device=x.device), x.abs())


def _amax(x: torch.Tensor) -> torch.Tensor:
    amax = x.abs().max()
    return _magnitudes(x).max() if amax.isnan() else amax


def _smallest(x: torch.Tensor) -> torch.Tensor:
    magnitudes = _magnitudes(x)
    return torch.where(
        magnitudes == 0, torch.full((), math.inf, dtype=x.dtype, device=x.device), magnitudes
    ).min()


# Name -> the function of a tensor, and the operation that combines its values of two tensors.
_SUMS: dict[str, _Sum] = {
    "count": (lambda x: torch.full((), x.numel(), dtype=torch.float64, device=x.device), "sum"),
    "min": (torch.min, "min"),
    "max": (torch.max, "max"),
    "total": (lambda x: x.sum(dtype=torch.float64), "sum"),
    "squares": (lambda x: torch.linalg.vector_norm(x, dtype=torch.float64).square(), "sum"),
    "magnitudes": (lambda x: torch.linalg.vector_norm(x, 1, dtype=torch.float64), "sum"),
    "amax": (_amax, "max"),
    "smallest": (_smallest, "min"),
}


def _range(amax: float, smallest: float) -> float:
    return math.log2(amax / smallest) if 0 < smallest <= amax < math.inf else 0.0


def _std(count: float, total: float, squares: float) -> float:
    if count <= 1:
        return math.nan
    return math.sqrt(max(squares - total * total / count, 0.0) / (count - 1))


_Value = tuple[tuple[str, ...], Callable[..., float]]
#: Statistic of values -> the names of sums, and the function of these sums.
VALUES: dict[str, _Value] = {
    "min": (("min",), float),
    "max": (("max",), float),
    "mean": (("total", "count"), lambda total, count: total / count),
    "std": (("count", "total", "squares"), _std),
    "l1_norm": (("magnitudes",), float),
    "l2_norm": (("squares",), math.sqrt),
    "cur_amax": (("amax",), float),
    "amax": (("amax",), float),
    "dynamic_range": (("amax", "smallest"), _range),
}


# The extremes of ``scale_inv`` over a tensor's blocks: those of the factors that multiply elements,
# and those of the stored values, which are bytes for E8M0 and otherwise the factors.
_LEAST_FACTOR, _MOST_FACTOR = ("min", "least factor"), ("max", "most factor")
_LEAST_STORED, _MOST_STORED = ("min", "least stored"), ("max", "most stored")
_SCALES = (_LEAST_FACTOR, _MOST_FACTOR, _LEAST_STORED, _MOST_STORED)


def _overflows(lost: Comparison) -> float | None:
    if lost.measures().saturation is None:
        return None
    return 100 * lost.clamped / lost.count


def _mse(lost: Comparison) -> float:
    return math.inf if lost.broken else lost.noise / max(lost.count - lost.not_finite, 1)


# Statistic of a quantized tensor -> the function of the comparison with its original values.
_LOSSES: dict[str, Callable[[Comparison], float | None]] = {
    "underflows%": lambda lost: 100 * lost.zeroed / lost.count,
    "underflows_of_nonzero%": lambda lost: lost.measures().underflow,
    "overflows%": _overflows,
    "saturation%": lambda lost: lost.measures().saturation,
    "sqnr": lambda lost: lost.measures().sqnr,
    "cosine": lambda lost: lost.measures().cosine,
    "mse": _mse,
}
# Statistic of the scales -> the function of their extremes.
_OF_SCALES: dict[str, Callable[[Numbers], float]] = {
    "scale_inv_min": operator.itemgetter(_LEAST_STORED),
    "scale_inv_max": operator.itemgetter(_MOST_STORED),
    "scale_inv_value_min": operator.itemgetter(_LEAST_FACTOR),
    "scale_inv_value_max": operator.itemgetter(_MOST_FACTOR),
    "scale": lambda scales: 1 / scales[_LEAST_FACTOR] if scales[_LEAST_FACTOR] else math.inf,
}
#: Statistics of a quantized tensor.
QUANTIZED = (*_LOSSES, *_OF_SCALES)


#: The blockwise statistic's name in configurations, and the defaults of its options.
BLOCKWISE, BLOCK_SIZE, BLOCK_DIMS = "max_blockwise_dynamic_range", 32, 1
_BLOCKWISE = re.compile(rf"{BLOCKWISE}_block_size_([1-9][0-9]{{0,8}})_dims_([12])")


def blockwise_name(size: int, dims: int) -> str:
    """The name of the statistic for blocks of 1 × ``size`` (``dims`` 1) or ``size`` × ``size``
    (2)."""
    return f"{BLOCKWISE}_block_size_{size}_dims_{dims}"


def block_of(stat: str) -> tuple[int, int] | None:
    """The rows and columns of a block in a :func:`blockwise_name`; None for other names."""
    match = _BLOCKWISE.fullmatch(stat)
    if match is None:
        return None
    size = int(match[1])
    dims = int(match[2])
    return (1 if dims == 1 else size, size)


def block_range(matrix: torch.Tensor, block: tuple[int, int]) -> float:
    """The largest ``log2 max|x| - log2 min|x|`` of a block, over its finite nonzero values; 0
    without any. Blocks at ragged edges are smaller."""
    rows, columns = matrix.shape
    high, wide = min(block[0], rows), min(block[1], columns)
    magnitudes = matrix.abs()
    is_counted = magnitudes.isfinite() & (magnitudes > 0)
    padding = (0, -columns % wide, 0, -rows % high)
    shape = (-1, high, (columns + padding[1]) // wide, wide)
    largest, smallest = (
        torch.nn.functional.pad(magnitudes.masked_fill(~is_counted, fill), padding, value=fill)
        .view(shape)
        .transpose(1, 2)
        .flatten(2)
        for fill in (0.0, math.inf)
    )
    most, least = largest.amax(2).double(), smallest.amin(2).double()
    ranges = torch.where(most > 0, most.log2() - least.log2(), torch.zeros_like(most))
    return float(ranges.max())


def _add_to(numbers: Numbers, others: Numbers) -> None:
    """Combine ``numbers`` with those of another tensor."""
    for key, other in others.items():
        numbers[key] = _TOGETHER[key[0]](numbers[key], other)


def _neutral(keys: Iterable[tuple[str, str]]) -> Numbers:
    """The numbers of no tensor, with which those of other tensors and ranks can be combined."""
    return {key: NEUTRAL[key[0]] for key in keys}


class ValueSums:
    """Sums over high-precision tensors, for statistics over all of them together.

    With ``both_ways``, blocks are measured along rows and along columns. :attr:`numbers` are
    combined with those of other ranks, which may replace them.
    """

    def __init__(self, stats: Iterable[str], both_ways: bool = False) -> None:
        stats = list(stats)
        needed = (name for stat in stats if stat in VALUES for name in VALUES[stat][0])
        self._names = list(dict.fromkeys(["count", *needed]))
        self._blocks = {stat: block for stat in stats if (block := block_of(stat)) is not None}
        self._with_exponents = EXPONENTS in stats
        self._both_ways = both_ways
        keys = [*map(_key, self._names), *map(_key_of_blocks, self._blocks)]
        if self._with_exponents:
            # All possible exponents are included, so that ranks have numbers of the same names.
            keys += map(_key_of_exponent, _EXPONENTS)
        self.numbers = _neutral(keys)

    def add(self, values: torch.Tensor) -> None:
        """Add a tensor, with one transfer from its device, and another one for the histogram."""
        flat = values.detach().reshape(-1)
        if not flat.numel():
            return
        sums = torch.stack([_SUMS[name][0](flat).double() for name in self._names]).tolist()
        _add_to(self.numbers, dict(zip(map(_key, self._names), sums, strict=True)))
        for stat, block in self._blocks.items():
            largest = self._block_range(as_matrix(values.detach()), block)
            _add_to(self.numbers, {_key_of_blocks(stat): largest})
        if self._with_exponents:
            counts = exponents(flat)
            _add_to(self.numbers, {_key_of_exponent(e): count for e, count in counts.items()})

    def _block_range(self, matrix: torch.Tensor, block: tuple[int, int]) -> float:
        largest = block_range(matrix, block)
        if self._both_ways:
            largest = max(largest, block_range(matrix.t(), block))
        return largest

    def value(self, stat: str) -> float | dict[int, int] | None:
        """A statistic; None where there are no values."""
        if stat == EXPONENTS:
            counts = {e: int(self.numbers[_key_of_exponent(e)]) for e in _EXPONENTS}
            return {exponent: count for exponent, count in counts.items() if count}
        if not self.numbers[_key("count")]:
            return None
        if stat in self._blocks:
            return self.numbers[_key_of_blocks(stat)]
        names, function = VALUES[stat]
        return function(*(self.numbers[_key(name)] for name in names))


def _key(name: str) -> tuple[str, str]:
    return _SUMS[name][1], name


def _key_of_blocks(stat: str) -> tuple[str, str]:
    return "max", stat


def _key_of_exponent(exponent: int) -> tuple[str, str]:
    return "sum", f"exponent {exponent}"


class QuantizedSums:
    """Sums over tensors and their quantized values, of rowwise or of columnwise data."""

    def __init__(self, columnwise: bool) -> None:
        self._columnwise = columnwise
        self._comparison = Comparison()
        self._scales = _neutral(_SCALES)

    def add(self, values: torch.Tensor, quantized: QuantizedTensorStorage) -> None:
        """Add a tensor and its quantized values."""
        self._comparison.add(values, quantized, columnwise=self._columnwise)
        _add_to(self._scales, _scales(quantized, self._columnwise))

    @property
    def numbers(self) -> Numbers:
        """The numbers to combine with those of other ranks; setting them replaces this rank's."""
        return self._comparison.numbers() | self._scales

    @numbers.setter
    def numbers(self, numbers: Numbers) -> None:
        self._comparison.take(numbers)
        self._scales = {key: numbers[key] for key in _SCALES}

    def value(self, stat: str) -> float | None:
        """A statistic; None where there are no values, or the statistic is not known."""
        if not self._comparison.count:
            return None
        if stat in _LOSSES:
            return _LOSSES[stat](self._comparison)
        has_scales = self._scales != _neutral(_SCALES)
        return _OF_SCALES[stat](self._scales) if has_scales else None


def _scales(quantized: QuantizedTensorStorage, columnwise: bool) -> Numbers:
    """The extremes of the scales of one direction; empty where the storage declares no scales."""
    operand = quantized.grid_operand(columnwise=columnwise)
    layout = getattr(quantized, "grid_layout", None)
    if operand is None or layout is None or not operand[1].numel():
        return {}
    scales = operand[1]
    if scales.dtype == torch.uint8:
        scales = scales.view(layout.scale)
    factors = scales.float()
    # E8M0 scales are shown as bytes.
    stored = scales.view(torch.uint8) if layout.scale == torch.float8_e8m0fnu else factors
    extremes = torch.stack([end.double() for end in (*factors.aminmax(), *stored.aminmax())])
    return dict(zip(_SCALES, extremes.tolist(), strict=True))
