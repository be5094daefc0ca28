"""Statistics as functions of sums, so that those of several microbatches can be put together."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ottava.tensors import QuantizedTensorStorage
from ottava_debug.measures import compare, exponents

_Sum = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float, float], float]]


def _add(a: float, b: float) -> float:
    return a + b


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    # An amax ignores NaN.
    return torch.where(x.isnan(), torch.zeros((), dtype=x.dtype, device=x.device), x.abs())


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
    "amax": (lambda x: _magnitudes(x).max(), max),
    "smallest": (_smallest, min),
}
# Sums of quantized tensors, all of them of one pass; what is not added up has its own rule.
_RULES: dict[str, Callable[[float, float], float]] = {"scale_inv_min": min, "scale_inv_max": max}


def _range(amax: float, smallest: float) -> float:
    return math.log2(amax / smallest) if 0 < smallest <= amax < math.inf else 0.0


def _std(count: float, total: float, squares: float) -> float:
    return math.sqrt(max(squares - total * total / count, 0.0) / (count - 1)) if count > 1 else math.nan


def _sqnr(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 or noise == math.inf else 10 * math.log10(signal / noise)


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
#: The same of quantized tensors.
QUANTIZED: dict[str, _Value] = {
    "underflows%": (("zeroed", "nonzero"), lambda zeroed, nonzero: 100 * zeroed / max(nonzero, 1)),
    "saturation%": (("clamped", "finite"), lambda clamped, finite: 100 * clamped / max(finite, 1)),
    "overflows%": (("clamped", "finite"), lambda clamped, finite: 100 * clamped / max(finite, 1)),
    "sqnr": (("signal", "noise"), _sqnr),
    "cosine": (("cosines", "count"), lambda cosines, count: cosines / count),
    "mse": (("noise", "finite"), lambda noise, finite: noise / max(finite, 1)),
    "scale_inv_min": (("scale_inv_min",), float),
    "scale_inv_max": (("scale_inv_max",), float),
    "scale": (("scale_inv_min",), lambda smallest: 1 / smallest if smallest else math.inf),
}


@dataclass
class Sums:
    """Sums over a tensor, or over its parts."""

    found: dict[str, float]
    exponents: dict[int, int] = field(default_factory=dict)

    def merged(self, other: "Sums") -> "Sums":
        """Those of two parts."""
        rules = {name: rule for name, (_, rule) in _SUMS.items()} | _RULES
        found = {name: rules.get(name, _add)(a, other.found[name]) for name, a in self.found.items()}
        both = self.exponents.keys() | other.exponents.keys()
        counts = {e: self.exponents.get(e, 0) + other.exponents.get(e, 0) for e in sorted(both)}
        return Sums(found, counts)

    def value(self, stat: str) -> float | dict[int, int] | None:
        """A statistic; None where the sums that it needs are not known, or there are no values."""
        if stat not in VALUES and stat not in QUANTIZED:
            return self.exponents
        needed, made = VALUES.get(stat) or QUANTIZED[stat]
        if not self.found["count"] or any(name not in self.found for name in needed):
            return None
        return made(*(self.found[name] for name in needed))


def names_of_sums(stats: Iterable[str]) -> list[str]:
    """The sums that statistics of values are made of."""
    needed = dict.fromkeys(name for stat in stats if stat in VALUES for name in VALUES[stat][0])
    return [name for name in needed if name in _SUMS]


def sums_of(values: torch.Tensor, names: Iterable[str], with_exponents: bool) -> Sums:
    """Sums over a tensor in high precision, with one transfer from its device; the histogram has one of its own."""
    names, flat = list(names), values.detach().reshape(-1)
    if not flat.numel():
        return Sums({"count": 0.0} | dict.fromkeys(names, 0.0))
    found = [_SUMS[name][0](flat).double() for name in names]
    numbers = torch.stack(found).tolist() if found else []
    counts = exponents(flat) if with_exponents else {}
    return Sums({"count": float(flat.numel()), **dict(zip(names, numbers, strict=True))}, counts)


def sums_of_quantized(values: torch.Tensor, quantized: QuantizedTensorStorage, columnwise: bool) -> Sums:
    """Sums over a tensor and what was made of it along rows or along columns."""
    found = compare(values, quantized, columnwise=columnwise)
    finite, flat = float(found.count - found.not_finite), values.detach()
    if found.not_finite:
        flat = flat[flat.isfinite()]
    signal = float(torch.linalg.vector_norm(flat, dtype=torch.float64).square())
    nonzero = float(flat.count_nonzero())
    sums = {
        "count": float(found.count),
        "finite": finite,
        "nonzero": nonzero,
        "zeroed": found.underflow / 100 * nonzero,
        "cosines": found.cosine * found.count,
        "signal": signal,
        # What is lost where everything is lost has no ratio to a signal of zero.
        "noise": signal * 10 ** (-found.sqnr / 10) if found.sqnr > -math.inf else math.inf,
    }
    if found.saturation is not None:
        sums["clamped"] = found.saturation / 100 * finite
    scales = _scales(quantized, columnwise)
    if scales is not None and scales.numel():
        sums["scale_inv_min"], sums["scale_inv_max"] = torch.stack([scales.min(), scales.max()]).tolist()
    return Sums(sums)


def _scales(quantized: QuantizedTensorStorage, columnwise: bool) -> torch.Tensor | None:
    """What the elements are multiplied by, in float32; None where the storage does not say."""
    operand, layout = quantized.grid_operand(columnwise=columnwise), getattr(quantized, "grid_layout", None)
    if operand is None or layout is None:
        return None
    scales = operand[1]
    return (scales.view(layout.scale) if scales.dtype == torch.uint8 else scales).float()
