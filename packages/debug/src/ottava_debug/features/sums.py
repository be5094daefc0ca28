"""Statistics as functions of sums, so that those of several microbatches can be put together."""

import math
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ottava.tensors import QuantizedTensorStorage
from ottava_debug.measures import Comparison, exponents

_Sum = tuple[Callable[[torch.Tensor], torch.Tensor], str]


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
    return torch.where(magnitudes == 0, torch.full((), math.inf, dtype=x.dtype, device=x.device), magnitudes).min()


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
    return math.sqrt(max(squares - total * total / count, 0.0) / (count - 1)) if count > 1 else math.nan


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
        return Scales(
            _least(self.smallest, other.smallest),
            _most(self.largest, other.largest),
            _least(self.least, other.least),
            _most(self.most, other.most),
        )


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


class ValueSums:
    """Sums over tensors in high precision, for statistics of them taken together.

    Args:
        stats: the statistics that will be asked for.
        with_exponents: whether the histogram will be, too.
    """

    def __init__(self, stats: Iterable[str], with_exponents: bool) -> None:
        needed = dict.fromkeys(name for stat in stats if stat in VALUES for name in VALUES[stat][0])
        self._names, self._with_exponents = [name for name in needed if name in _SUMS], with_exponents
        self._found: dict[str, float] = {"count": 0.0}
        self._exponents: dict[int, int] = {}

    def add(self, values: torch.Tensor) -> None:
        """Add a tensor, with one transfer from its device; the histogram has one of its own."""
        flat = values.detach().reshape(-1)
        if not flat.numel():
            return
        made = [_SUMS[name][0](flat).double() for name in self._names]
        numbers = dict(zip(self._names, torch.stack(made).tolist() if made else [], strict=True))
        for name, number in numbers.items():
            if name in self._found:
                number = _TOGETHER[_SUMS[name][1]](self._found[name], number)
            self._found[name] = number
        self._found["count"] += flat.numel()
        for exponent, count in exponents(flat).items() if self._with_exponents else ():
            self._exponents[exponent] = self._exponents.get(exponent, 0) + count

    def value(self, stat: str) -> float | dict[int, int] | None:
        """A statistic; None where there are no values."""
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
