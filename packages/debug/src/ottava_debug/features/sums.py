"""Statistics as functions of sums, so that several microbatches and ranks can be combined."""

import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ottava.gemm import as_matrix
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.features.together import NEUTRAL, Numbers
from ottava_debug.measures import Comparison, exponents

_Sum = tuple[Callable[[torch.Tensor], torch.Tensor], str]


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


class Scales(NamedTuple):
    """The extremes of ``scale_inv`` over a tensor's blocks.

    Attributes:
        smallest, largest: the extremes of the factors that multiply elements.
        least, most: the extremes of the stored values: bytes for E8M0, otherwise the factors.
    """

    smallest: float
    largest: float
    least: float
    most: float

    def with_those(self, other: "Scales") -> "Scales":
        """The extremes over the blocks of both."""
        together = [_TOGETHER[how] for how in _OF_SCALES.values()]
        return Scales(*(put(a, b) for put, a, b in zip(together, self, other, strict=True)))


# Field of Scales -> the operation that combines those of two tensors.
_OF_SCALES = {"smallest": "min", "largest": "max", "least": "min", "most": "max"}
_NO_SCALES = Scales(*(NEUTRAL[how] for how in _OF_SCALES.values()))


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
_SCALES: dict[str, Callable[[Scales], float]] = {
    "scale_inv_min": lambda scales: scales.least,
    "scale_inv_max": lambda scales: scales.most,
    "scale_inv_value_min": lambda scales: scales.smallest,
    "scale_inv_value_max": lambda scales: scales.largest,
    "scale": lambda scales: 1 / scales.smallest if scales.smallest else math.inf,
}
#: Statistics of a quantized tensor.
QUANTIZED = (*_LOSSES, *_SCALES)


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
    """The largest ``log2 max|x| - log2 min|x|`` of a block, over its finite nonzero values.

    A block without such values counts as 0.

    Args:
        matrix: ``[rows, columns]`` in high precision. Blocks at ragged edges are smaller.
        block: the rows and columns of a block.
    """
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


class ValueSums:
    """Sums over high-precision tensors, for statistics over all of them together.

    Args:
        stats: the statistics that :meth:`value` will be called for.
        with_exponents: whether these include the histogram.
        both_ways: whether products take the tensors along rows and along columns; blocks are then
            measured in both directions.
    """

    def __init__(self, stats: Iterable[str], with_exponents: bool, both_ways: bool = False) -> None:
        stats = list(stats)
        needed = dict.fromkeys(name for stat in stats if stat in VALUES for name in VALUES[stat][0])
        self._names = [name for name in needed if name in _SUMS]
        self._with_exponents = with_exponents
        self._blocks = {stat: block for stat in stats if (block := block_of(stat)) is not None}
        self._both_ways = both_ways
        # A rank without values starts with neutral numbers, so that other ranks' can be combined
        # with them.
        self._numbers: dict[str, float] = {name: NEUTRAL[_SUMS[name][1]] for name in self._names}
        self._numbers |= dict.fromkeys(self._blocks, NEUTRAL["max"])
        self._numbers["count"] = 0.0
        self._exponents: dict[int, int] = {}

    def add(self, values: torch.Tensor) -> None:
        """Add a tensor, with one transfer from its device, and another one for the histogram."""
        flat = values.detach().reshape(-1)
        if not flat.numel():
            return
        sums = [_SUMS[name][0](flat).double() for name in self._names]
        numbers = dict(zip(self._names, torch.stack(sums).tolist() if sums else [], strict=True))
        for name, number in numbers.items():
            self._numbers[name] = _TOGETHER[_SUMS[name][1]](self._numbers[name], number)
        for stat, block in self._blocks.items():
            largest = self._block_range(as_matrix(values.detach()), block)
            self._numbers[stat] = _most(self._numbers[stat], largest)
        self._numbers["count"] += flat.numel()
        if self._with_exponents:
            for exponent, count in exponents(flat).items():
                self._exponents[exponent] = self._exponents.get(exponent, 0) + count

    def _block_range(self, matrix: torch.Tensor, block: tuple[int, int]) -> float:
        largest = block_range(matrix, block)
        if self._both_ways:
            largest = max(largest, block_range(matrix.t(), block))
        return largest

    def _operation(self, name: str) -> str:
        """The operation that combines a number with that of another tensor."""
        if name in self._blocks:
            return "max"
        return "sum" if name == "count" else _SUMS[name][1]

    def numbers(self) -> Numbers:
        """The numbers to combine with those of other ranks."""
        numbers: Numbers = {
            (self._operation(name), name): number for name, number in self._numbers.items()
        }
        if self._with_exponents:
            # All possible exponents are included, so that ranks have numbers of the same names.
            for exponent in _EXPONENTS:
                numbers["sum", f"exponent {exponent}"] = self._exponents.get(exponent, 0)
        return numbers

    def take(self, numbers: Numbers) -> None:
        """Replace the numbers by those that were combined over ranks."""
        self._numbers = {name: numbers[self._operation(name), name] for name in self._numbers}
        counts = {
            exponent: int(numbers.get(("sum", f"exponent {exponent}"), 0))
            for exponent in _EXPONENTS
        }
        self._exponents = {exponent: count for exponent, count in counts.items() if count}

    def value(self, stat: str) -> float | dict[int, int] | None:
        """A statistic; None where there are no values."""
        if stat not in VALUES and stat not in self._blocks:
            return dict(sorted(self._exponents.items()))
        if not self._numbers["count"]:
            return None
        if stat in self._blocks:
            return self._numbers[stat]
        names, function = VALUES[stat]
        return function(*(self._numbers[name] for name in names))


class QuantizedSums:
    """Sums over tensors and their quantized values, of rowwise or of columnwise data."""

    def __init__(self, columnwise: bool) -> None:
        self._columnwise = columnwise
        self._lost = Comparison()
        self._scales: Scales | None = None

    def add(self, values: torch.Tensor, quantized: QuantizedTensorStorage) -> None:
        """Add a tensor and its quantized values."""
        self._lost.add(values, quantized, columnwise=self._columnwise)
        scales = _scales(quantized, self._columnwise)
        if scales is not None:
            self._scales = scales if self._scales is None else self._scales.with_those(scales)

    def numbers(self) -> Numbers:
        """The numbers to combine with those of other ranks."""
        lost = {
            (how, name): float(getattr(self._lost, name))
            for name, how in self._lost.together.items()
        }
        scales = self._scales or _NO_SCALES
        return lost | {
            (how, f"scales {name}"): getattr(scales, name) for name, how in _OF_SCALES.items()
        }

    def take(self, numbers: Numbers) -> None:
        """Replace the numbers by those that were combined over ranks."""
        self._lost.take({name: numbers[how, name] for name, how in self._lost.together.items()})
        scales = Scales(
            **{name: numbers[how, f"scales {name}"] for name, how in _OF_SCALES.items()}
        )
        self._scales = None if scales == _NO_SCALES else scales

    def value(self, stat: str) -> float | None:
        """A statistic; None where there are no values, or the statistic is not known."""
        if not self._lost.count:
            return None
        if stat in _LOSSES:
            return _LOSSES[stat](self._lost)
        return None if self._scales is None else _SCALES[stat](self._scales)


def _scales(quantized: QuantizedTensorStorage, columnwise: bool) -> Scales | None:
    """The extremes of the scales of one direction; None where the storage declares no scales."""
    operand = quantized.grid_operand(columnwise=columnwise)
    layout = getattr(quantized, "grid_layout", None)
    if operand is None or layout is None or not operand[1].numel():
        return None
    scales = operand[1]
    if scales.dtype == torch.uint8:
        scales = scales.view(layout.scale)
    values = scales.float()
    # E8M0 scales are shown as bytes.
    bytes_or_values = scales.view(torch.uint8) if layout.scale == torch.float8_e8m0fnu else values
    ends = [*values.aminmax(), *bytes_or_values.aminmax()]
    return Scales(*torch.stack([end.double() for end in ends]).tolist())
