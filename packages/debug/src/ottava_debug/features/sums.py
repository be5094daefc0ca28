"""Statistics as functions of sums, so that those of several microbatches can be put together."""

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


# Of all values of high precision: float32 has the widest range, with its subnormal numbers.
_EXPONENTS = range(-149, 128)


def _least(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else min(a, b)


def _most(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


# How numbers of two tensors are put together.
_TOGETHER: dict[str, Callable[[float, float], float]] = {
    "sum": operator.add,
    "min": _least,
    "max": _most,
}


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    # An amax ignores NaN.
    return torch.where(x.isnan(), torch.zeros((), dtype=x.dtype, device=x.device), x.abs())


def _amax(x: torch.Tensor) -> torch.Tensor:
    found = x.abs().max()
    return _magnitudes(x).max() if found.isnan() else found


def _smallest(x: torch.Tensor) -> torch.Tensor:
    magnitudes = _magnitudes(x)
    return torch.where(
        magnitudes == 0, torch.full((), math.inf, dtype=x.dtype, device=x.device), magnitudes
    ).min()


# Name -> the number of a tensor, and how those of two are put together.
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
    return (
        math.sqrt(max(squares - total * total / count, 0.0) / (count - 1))
        if count > 1
        else math.nan
    )


_Value = tuple[tuple[str, ...], Callable[..., float]]
#: Statistic of values -> the sums that it is made of, and how.
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
    """The scales of a tensor's blocks.

    Attributes:
        smallest, largest: what elements are multiplied by.
        least, most: the same as they are stored: of E8M0 the bytes, of others the numbers.
    """

    smallest: float
    largest: float
    least: float
    most: float

    def with_those(self, other: "Scales") -> "Scales":
        """Those of both."""
        together = [_TOGETHER[how] for how in _OF_SCALES.values()]
        return Scales(*(put(a, b) for put, a, b in zip(together, self, other, strict=True)))


# Field of Scales -> how those of two tensors are put together.
_OF_SCALES = {"smallest": "min", "largest": "max", "least": "min", "most": "max"}
_NO_SCALES = Scales(*(NEUTRAL[how] for how in _OF_SCALES.values()))


def _overflows(lost: Comparison) -> float | None:
    known = lost.measures().saturation is not None
    return 100 * lost.clamped / lost.count if known else None


def _mse(lost: Comparison) -> float:
    return math.inf if lost.broken else lost.noise / max(lost.count - lost.not_finite, 1)


# Statistic of a quantized tensor -> how it is made of what was lost.
_LOSSES: dict[str, Callable[[Comparison], float | None]] = {
    "underflows%": lambda lost: 100 * lost.zeroed / lost.count,
    "underflows_of_nonzero%": lambda lost: lost.measures().underflow,
    "overflows%": _overflows,
    "saturation%": lambda lost: lost.measures().saturation,
    "sqnr": lambda lost: lost.measures().sqnr,
    "cosine": lambda lost: lost.measures().cosine,
    "mse": _mse,
}
# The same of scales.
_SCALES: dict[str, Callable[[Scales], float]] = {
    "scale_inv_min": lambda scales: scales.least,
    "scale_inv_max": lambda scales: scales.most,
    "scale_inv_value_min": lambda scales: scales.smallest,
    "scale_inv_value_max": lambda scales: scales.largest,
    "scale": lambda scales: 1 / scales.smallest if scales.smallest else math.inf,
}
#: Statistics of a quantized tensor.
QUANTIZED = (*_LOSSES, *_SCALES)


#: The statistic of blocks, as configurations call it, and what its options are if they are not
#: told.
BLOCKWISE, BLOCK_SIZE, BLOCK_DIMS = "max_blockwise_dynamic_range", 32, 1
_BLOCKWISE = re.compile(rf"{BLOCKWISE}_block_size_([1-9][0-9]{{0,8}})_dims_([12])")


def blockwise_name(size: int, dims: int) -> str:
    """The statistic of blocks of ``size`` elements (``dims`` 1), or of squares of ``size`` ×
    ``size`` (2)."""
    return f"{BLOCKWISE}_block_size_{size}_dims_{dims}"


def block_of(stat: str) -> tuple[int, int] | None:
    """Rows and columns of the blocks of :func:`blockwise_name`; None for other names."""
    found = _BLOCKWISE.fullmatch(stat)
    if found is None:
        return None
    size, dims = int(found[1]), int(found[2])
    return (1 if dims == 1 else size, size)


def block_range(matrix: torch.Tensor, block: tuple[int, int]) -> float:
    """The largest of the blocks' ``log2 max|x| - log2 min|x|``, of values that are finite and not
    zero.

    Args:
        matrix: ``[rows, columns]`` in high precision. Blocks at ragged edges are smaller.
        block: rows and columns of a block. One without such values counts as 0.
    """
    rows, columns = matrix.shape
    high, wide = min(block[0], rows), min(block[1], columns)
    magnitudes = matrix.abs()
    counted = magnitudes.isfinite() & (magnitudes > 0)
    padding = (0, -columns % wide, 0, -rows % high)
    shape = (-1, high, (columns + padding[1]) // wide, wide)
    largest, smallest = (
        torch.nn.functional.pad(magnitudes.masked_fill(~counted, fill), padding, value=fill)
        .view(shape)
        .transpose(1, 2)
        .flatten(2)
        for fill in (0.0, math.inf)
    )
    most, least = largest.amax(2).double(), smallest.amin(2).double()
    ranges = torch.where(most > 0, most.log2() - least.log2(), torch.zeros_like(most))
    return float(ranges.max())


class ValueSums:
    """Sums over tensors in high precision, for statistics of them taken together.

    Args:
        stats: the statistics that will be asked for.
        with_exponents: whether the histogram will be, too.
        both_ways: whether products take the tensors along rows and along columns: blocks are then
            looked at both ways.
    """

    def __init__(self, stats: Iterable[str], with_exponents: bool, both_ways: bool = False) -> None:
        stats = list(stats)
        needed = dict.fromkeys(name for stat in stats if stat in VALUES for name in VALUES[stat][0])
        self._names, self._with_exponents = (
            [name for name in needed if name in _SUMS],
            with_exponents,
        )
        self._blocks = {stat: block for stat in stats if (block := block_of(stat)) is not None}
        self._both_ways = both_ways
        # A rank that has no values has numbers all the same, for others to add theirs to.
        self._found: dict[str, float] = {name: NEUTRAL[_SUMS[name][1]] for name in self._names}
        self._found |= dict.fromkeys(self._blocks, NEUTRAL["max"])
        self._found["count"] = 0.0
        self._exponents: dict[int, int] = {}

    def add(self, values: torch.Tensor) -> None:
        """Add a tensor, with one transfer from its device; the histogram has one of its own."""
        flat = values.detach().reshape(-1)
        if not flat.numel():
            return
        made = [_SUMS[name][0](flat).double() for name in self._names]
        numbers = dict(zip(self._names, torch.stack(made).tolist() if made else [], strict=True))
        for name, number in numbers.items():
            self._found[name] = _TOGETHER[_SUMS[name][1]](self._found[name], number)
        for stat, block in self._blocks.items():
            found = self._block_range(as_matrix(values.detach()), block)
            self._found[stat] = _most(self._found[stat], found)
        self._found["count"] += flat.numel()
        for exponent, count in exponents(flat).items() if self._with_exponents else ():
            self._exponents[exponent] = self._exponents.get(exponent, 0) + count

    def _block_range(self, matrix: torch.Tensor, block: tuple[int, int]) -> float:
        found = block_range(matrix, block)
        return max(found, block_range(matrix.t(), block)) if self._both_ways else found

    def _how(self, name: str) -> str:
        """How a number is put together with that of another tensor."""
        if name in self._blocks:
            return "max"
        return "sum" if name == "count" else _SUMS[name][1]

    def numbers(self) -> Numbers:
        """What other ranks have to add theirs to."""
        found: Numbers = {(self._how(name), name): number for name, number in self._found.items()}
        for exponent in _EXPONENTS if self._with_exponents else ():
            # Of all that there can be, so that ranks have numbers of the same names.
            found["sum", f"exponent {exponent}"] = self._exponents.get(exponent, 0)
        return found

    def take(self, numbers: Numbers) -> None:
        """Have the numbers be these, of several ranks."""
        self._found = {name: numbers[self._how(name), name] for name in self._found}
        counts = {
            exponent: int(numbers.get(("sum", f"exponent {exponent}"), 0))
            for exponent in _EXPONENTS
        }
        self._exponents = {exponent: count for exponent, count in counts.items() if count}

    def value(self, stat: str) -> float | dict[int, int] | None:
        """A statistic; None where there are no values."""
        if stat in self._blocks:
            return self._found[stat] if self._found["count"] else None
        if stat not in VALUES:
            return dict(sorted(self._exponents.items()))
        needed, made = VALUES[stat]
        return made(*(self._found[name] for name in needed)) if self._found["count"] else None


class QuantizedSums:
    """Sums over tensors and what was made of them, along rows or along columns."""

    def __init__(self, columnwise: bool) -> None:
        self._columnwise, self._lost = columnwise, Comparison()
        self._scales: Scales | None = None

    def add(self, values: torch.Tensor, quantized: QuantizedTensorStorage) -> None:
        """Add a tensor and what was made of it."""
        self._lost.add(values, quantized, columnwise=self._columnwise)
        scales = _scales(quantized, self._columnwise)
        if scales is not None:
            self._scales = scales if self._scales is None else self._scales.with_those(scales)

    def numbers(self) -> Numbers:
        """What other ranks have to add theirs to."""
        lost = {
            (how, name): float(getattr(self._lost, name))
            for name, how in self._lost.together.items()
        }
        scales = self._scales or _NO_SCALES
        return lost | {
            (how, f"scales {name}"): getattr(scales, name) for name, how in _OF_SCALES.items()
        }

    def take(self, numbers: Numbers) -> None:
        """Have the numbers be these, of several ranks."""
        self._lost.take({name: numbers[how, name] for name, how in self._lost.together.items()})
        scales = Scales(
            **{name: numbers[how, f"scales {name}"] for name, how in _OF_SCALES.items()}
        )
        self._scales = None if scales == _NO_SCALES else scales

    def value(self, stat: str) -> float | None:
        """A statistic; None where there are no values, or it cannot be told."""
        if not self._lost.count:
            return None
        if stat in _LOSSES:
            return _LOSSES[stat](self._lost)
        return None if self._scales is None else _SCALES[stat](self._scales)


def _scales(quantized: QuantizedTensorStorage, columnwise: bool) -> Scales | None:
    """The scales of one direction; None where the storage has none, or does not say."""
    operand = quantized.grid_operand(columnwise=columnwise)
    layout = getattr(quantized, "grid_layout", None)
    if operand is None or layout is None or not operand[1].numel():
        return None
    stored = operand[1]
    values = (stored.view(layout.scale) if stored.dtype == torch.uint8 else stored).float()
    shown = stored.view(torch.uint8) if layout.scale == torch.float8_e8m0fnu else values
    ends = [*values.aminmax(), *shown.aminmax()]
    return Scales(*torch.stack([end.double() for end in ends]).tolist())
