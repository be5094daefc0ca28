"""Statistics as functions of sums, so that those of several microbatches can be put together."""

import math
from collections.abc import Callable, Iterable

import torch

from ottava.tensors import QuantizedTensorStorage
from ottava_debug.measures import Comparison, exponents

_Sum = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float, float], float]]


def _add(a: float, b: float) -> float:
    return a + b


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    # An amax ignores NaN.
    return torch.where(x.isnan(), torch.zeros((), dtype=x.dtype, device=x.device), x.abs())


def _amax(x: torch.Tensor) -> torch.Tensor:
    found = x.abs().max()
    return _magnitudes(x).max() if found.isnan() else found


def _smallest(x: torch.Tensor) -> torch.Tensor:
    magnitudes = _magnitudes(x)
    return torch.where(magnitudes == 0, torch.full((), math.inf, dtype=x.dtype, device=x.device), magnitudes).min()


# Name -> of a tensor, and of two parts of it.
_SUMS: dict[str, _Sum] = {
    "min": (torch.min, min),
    "max": (torch.max, max),
    "total": (lambda x: x.sum(dtype=torch.float64), _add),
    "squares": (lambda x: torch.linalg.vector_norm(x, dtype=torch.float64).square(), _add),
    "magnitudes": (lambda x: torch.linalg.vector_norm(x, 1, dtype=torch.float64), _add),
    "amax": (_amax, max),
    "smallest": (_smallest, min),
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
#: Statistic of a quantized tensor -> how it is made of what was lost, and of the smallest and the largest scale.
QUANTIZED: dict[str, Callable[[Comparison, float, float], float | None]] = {
    "underflows%": lambda lost, smallest, largest: lost.measures().underflow,
    "saturation%": lambda lost, smallest, largest: lost.measures().saturation,
    "overflows%": lambda lost, smallest, largest: lost.measures().saturation,
    "sqnr": lambda lost, smallest, largest: lost.measures().sqnr,
    "cosine": lambda lost, smallest, largest: lost.measures().cosine,
    "mse": lambda lost, smallest, largest: (
        math.inf if lost.broken else lost.noise / max(lost.count - lost.not_finite, 1)
    ),
    "scale_inv_min": lambda lost, smallest, largest: smallest,
    "scale_inv_max": lambda lost, smallest, largest: largest,
    "scale": lambda lost, smallest, largest: 1 / smallest if smallest else math.inf,
}


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
            self._found[name] = _SUMS[name][1](self._found[name], number) if name in self._found else number
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
        self._scales: tuple[float, float] | None = None

    def add(self, values: torch.Tensor, quantized: QuantizedTensorStorage) -> None:
        """Add a tensor and what was made of it."""
        self._lost.add(values, quantized, columnwise=self._columnwise)
        scales = _scales(quantized, self._columnwise)
        if scales is not None and scales.numel():
            smallest, largest = torch.stack([scales.min(), scales.max()]).tolist()
            old = self._scales or (smallest, largest)
            self._scales = min(old[0], smallest), max(old[1], largest)

    def value(self, stat: str) -> float | None:
        """A statistic; None where there are no values, or it cannot be told."""
        if not self._lost.count or (stat.startswith("scale") and self._scales is None):
            return None
        return QUANTIZED[stat](self._lost, *(self._scales or (math.nan, math.nan)))


def _scales(quantized: QuantizedTensorStorage, columnwise: bool) -> torch.Tensor | None:
    """What the elements are multiplied by, in float32; None where the storage does not say."""
    operand, layout = quantized.grid_operand(columnwise=columnwise), getattr(quantized, "grid_layout", None)
    if operand is None or layout is None:
        return None
    scales = operand[1]
    return (scales.view(layout.scale) if scales.dtype == torch.uint8 else scales).float()
