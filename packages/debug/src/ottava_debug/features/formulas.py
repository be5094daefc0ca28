"""Statistics as functions of sums, so that several microbatches and ranks can be combined."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ottava.gemm import as_matrix
from ottava.kernels.scales import scale_values
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.measures import Measures, exponents, loss_sums, measures_of
from ottava_debug.sums import Sums, add, by_name

#: The histogram, the only statistic that is not a number.
EXPONENTS = "exponents"
# The exponents of all high-precision values: those of float32, with its subnormal numbers. The sums
# have all of them, so that ranks have sums of the same names.
_NO_EXPONENTS = dict.fromkeys(range(-149, 128), 0)
#: The blockwise statistic's name in configurations, and the defaults of its options.
BLOCKWISE, BLOCK_SIZE, BLOCK_DIMS = "max_blockwise_dynamic_range", 32, 1
_BLOCKWISE = re.compile(rf"{BLOCKWISE}_block_size_([1-9][0-9]{{0,8}})_dims_([12])")


# -- high-precision values --


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    # An amax ignores NaN.
    return x.abs().masked_fill(x.isnan(), 0)


def _amax(x: torch.Tensor) -> torch.Tensor:
    amax = x.abs().max()
    return _magnitudes(x).max() if amax.isnan() else amax


def _smallest(x: torch.Tensor) -> torch.Tensor:
    magnitudes = _magnitudes(x)
    return magnitudes.masked_fill(magnitudes == 0, math.inf).min()


# Name -> the operation that combines the sums of two tensors, and the function of a tensor.
_SUMS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "min": ("min", torch.min),
    "max": ("max", torch.max),
    "total": ("sum", lambda x: x.sum(dtype=torch.float64)),
    "squares": ("sum", lambda x: torch.linalg.vector_norm(x, dtype=torch.float64).square()),
    "magnitudes": ("sum", lambda x: torch.linalg.vector_norm(x, 1, dtype=torch.float64)),
    "amax": ("max", _amax),
    "smallest": ("min", _smallest),
}


def _range(amax: float, smallest: float) -> float:
    return math.log2(amax / smallest) if 0 < smallest <= amax < math.inf else 0.0


def _std(count: float, total: float, squares: float) -> float:
    if count <= 1:
        return math.nan
    return math.sqrt(max(squares - total * total / count, 0.0) / (count - 1))


#: Statistic of values -> the names of sums, and the function of these sums.
VALUES: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "min": (("min",), float),
    "max": (("max",), float),
    "mean": (("total", "count"), operator.truediv),
    "std": (("count", "total", "squares"), _std),
    "l1_norm": (("magnitudes",), float),
    "l2_norm": (("squares",), math.sqrt),
    "cur_amax": (("amax",), float),
    "amax": (("amax",), float),
    "dynamic_range": (("amax", "smallest"), _range),
}


def value_sums(values: torch.Tensor, stats: Iterable[str], *, both_ways: bool) -> Sums:
    """The sums of a tensor for statistics, with one transfer from its device, and more for
    histograms and blocks.

    With ``both_ways``, blocks are measured along rows and along columns.
    """
    stats = list(stats)
    values = values.detach()
    sums: Sums = {("sum", "count"): values.numel()}
    if not values.numel():
        return sums
    needed = [name for stat in stats if stat in VALUES for name in VALUES[stat][0]]
    names = [name for name in dict.fromkeys(needed) if name in _SUMS]
    if names:
        flat = values.reshape(-1)
        numbers = torch.stack([_SUMS[name][1](flat).double() for name in names]).tolist()
        add(sums, {(_SUMS[name][0], name): n for name, n in zip(names, numbers, strict=True)})
    if EXPONENTS in stats:
        counts = _NO_EXPONENTS | exponents(values)
        add(sums, {("sum", exponent): count for exponent, count in counts.items()})
    for stat in stats:
        block = block_of(stat)
        if block is not None:
            matrix = as_matrix(values)
            directions = (matrix, matrix.t()) if both_ways else (matrix,)
            sums["max", stat] = max(block_range(each, block) for each in directions)
    return sums


def of_values(stat: str, sums: Sums) -> float | dict[int, int] | None:
    """A statistic of :func:`value_sums`; None where there are no values."""
    numbers = by_name(sums)
    if not numbers["count"]:
        return None
    if stat == EXPONENTS:
        return {e: int(numbers[e]) for e in _NO_EXPONENTS if numbers[e]}
    if stat not in VALUES:
        return numbers[stat]
    names, function = VALUES[stat]
    return function(*(numbers[name] for name in names))


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
    return (1 if match[2] == "1" else size, size)


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


# -- quantized values --

_Numbers = Mapping[Any, float]


def _overflows(measures: Measures, numbers: _Numbers) -> float | None:
    if measures.saturation is None:
        return None
    return 100 * numbers["clamped"] / measures.count


def _mse(measures: Measures, numbers: _Numbers) -> float:
    if numbers["is_broken"]:
        return math.inf
    return numbers["noise"] / max(measures.count - measures.not_finite, 1)


# Statistic of a quantized tensor -> the function of its measures, and of the sums by name.
_LOSSES: dict[str, Callable[[Measures, _Numbers], float | None]] = {
    "underflows%": lambda measures, numbers: 100 * numbers["zeroed"] / measures.count,
    "underflows_of_nonzero%": lambda measures, numbers: measures.underflow,
    "overflows%": _overflows,
    "saturation%": lambda measures, numbers: measures.saturation,
    "sqnr": lambda measures, numbers: measures.sqnr,
    "cosine": lambda measures, numbers: measures.cosine,
    "mse": _mse,
}
# Statistics of the scales, and the operation that combines those of two tensors. The values are the
# factors that multiply elements; the others are scales as stored, which are bytes for E8M0.
_SCALES = (
    ("min", "scale_inv_value_min"),
    ("max", "scale_inv_value_max"),
    ("min", "scale_inv_min"),
    ("max", "scale_inv_max"),
)
_SCALE = "scale"
#: Statistics of a quantized tensor.
QUANTIZED = (*_LOSSES, *(name for _, name in _SCALES), _SCALE)


def quantized_sums(
    values: torch.Tensor, quantized: QuantizedTensorStorage, *, columnwise: bool
) -> Sums:
    """The sums of a tensor and its quantized values, of rowwise or of columnwise data."""
    return loss_sums(values, quantized, columnwise=columnwise) | _scales(quantized, columnwise)


def _scales(quantized: QuantizedTensorStorage, columnwise: bool) -> Sums:
    """The extremes of the scales of one direction; empty where the storage declares no scales."""
    operand = quantized.grid_operand(columnwise=columnwise)
    layout = getattr(quantized, "grid_layout", None)
    if operand is None or layout is None or not operand[1].numel():
        return {}
    stored = operand[1]
    factors = scale_values(stored, layout).float()
    extremes = torch.stack([end.double() for end in (*factors.aminmax(), *stored.aminmax())])
    return dict(zip(_SCALES, extremes.tolist(), strict=True))


def of_quantized(stat: str, sums: Sums) -> float | None:
    """A statistic of :func:`quantized_sums`; None where there are no values, or it is not known."""
    numbers = by_name(sums)
    if not numbers["count"]:
        return None
    if stat in _LOSSES:
        return _LOSSES[stat](measures_of(sums), numbers)
    if stat != _SCALE:
        return numbers.get(stat)
    least = numbers.get("scale_inv_value_min")
    if least is None:
        return None
    return 1 / least if least else math.inf
