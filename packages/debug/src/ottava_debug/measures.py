"""Measures of the loss between a high-precision tensor and its quantized values.

They are computed from sums in float64, in one pass. Definitions, for values ``x`` and quantized
values ``q``:

- ``amax``: ``max |x|``.
- underflow: the percentage of the nonzero ``x`` that have ``q = 0``.
- saturation: the percentage of the ``x`` that were clamped. An ``x`` was clamped if ``q`` is the
  largest number of the format, with the scale of its block, and ``|x|`` exceeds it by more than
  half of the format's last step, so that rounding alone would not have given this ``q``. Underflow
  and saturation are the two ways out of a format's range (Micikevicius et al., "FP8 Formats for
  Deep Learning", 2022, arXiv:2209.05433).
- SQNR, the signal-to-quantization-noise ratio: ``10 · log10(Σ x² / Σ (x - q)²)`` in dB (Widrow and
  Kollár, "Quantization Noise", 2008). 6.02 dB are one bit.
- cosine: ``Σ x·q / √(Σ x² · Σ q²)``, between -1 and 1.
- exponents: the number of ``x`` with ``⌊log2 |x|⌋ = e``.

Values ``x`` that are NaN or infinite are counted, and excluded from everything else. Where no
values are left, or all are zeros that stay zeros, nothing is lost: amax, underflow and saturation
are 0, the SQNR is infinite, and the cosine is 1. A finite value that becomes NaN or infinite is
unbounded noise: the SQNR is -inf and the cosine 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch

from ottava.errors import DTypeError, ShapeError
from ottava.formats import ELEMENTS, FloatFormat, IntegerFormat
from ottava.kernels.checks import check_high_precision
from ottava.kernels.elements import values_of_codes
from ottava.tensors import GridTensorStorage, QuantizedTensorStorage
from ottava.tensors.declaration import native_dtype
from ottava_debug.sums import Sums, add, by_name

# The number of elements that are processed together. On a CPU their float64 values fit its cache,
# and torch processes so few in one thread. Several threads would wait for each other after each
# sum, which takes a hundred times longer where other processes use the CPU.
_CHUNK = {"cpu": (1 << 15) - 64}
_CHUNK_ELSEWHERE = 1 << 23
# Properties of float64. Its bits show the exponent of every nonzero float32, because a subnormal
# float32 is a normal float64.
_MANTISSA_BITS, _BIAS, _EXPONENTS = 52, 1023, 2048
_Element = FloatFormat | IntegerFormat
# The data of elements, and their format.
_Elements = tuple[torch.Tensor, _Element]


@dataclass(frozen=True)
class Measures:
    """The loss of one tensor; the module defines the measures.

    Attributes:
        count: the number of elements.
        not_finite: the number of elements that are NaN or infinite, which are excluded below.
        amax: the largest magnitude.
        underflow: percent of the nonzero values.
        saturation: percent of the values; None where the storage does not declare the format of its
            elements, so that clamping cannot be recognized.
        sqnr: dB; ``inf`` where nothing is lost, ``-inf`` where a value becomes NaN or infinite.
        cosine: -1 to 1.
    """

    count: int
    not_finite: int
    amax: float
    underflow: float
    saturation: float | None
    sqnr: float
    cosine: float


def compare(
    values: torch.Tensor,
    quantized: torch.Tensor | QuantizedTensorStorage,
    *,
    columnwise: bool | None = None,
) -> Measures:
    """The loss of ``values`` through quantization to ``quantized``.

    Args:
        values: float32, bfloat16 or float16, any shape.
        quantized: a quantized tensor or storage of the same shape; or a plain tensor, whose
            saturation is not known.
        columnwise: whether to read the columnwise data of a storage; None reads rowwise data where
            the storage has it.

    Raises:
        DTypeError: an argument is not a tensor, or has another dtype.
        ShapeError: they have different shapes.
        UsageError: the storage does not hold the direction.
    """
    return measures_of(loss_sums(values, quantized, columnwise=columnwise))


def exponents(values: torch.Tensor) -> dict[int, int]:
    """Exponent ``⌊log2 |x|⌋`` -> the number of values with it, ascending, without those that do not
    occur.

    Zeros, NaN and infinities have no exponent and are excluded.
    """
    check_high_precision(values)
    counts = torch.zeros(_EXPONENTS, dtype=torch.int64, device=values.device)
    for x in _flat(values):
        bits = x.double().abs().view(torch.int64) >> _MANTISSA_BITS
        counts += torch.bincount(bits, minlength=_EXPONENTS)
    # The first bin has the zeros, the last one NaN and infinities.
    return {at - _BIAS: n for at, n in enumerate(counts.tolist()[:-1]) if n and at}


# What is added up, besides the number of elements.
_COUNTS = ("not_finite", "nonzero", "zeroed", "clamped")
_PRODUCTS = ("signal", "quantized_signal", "dot", "noise")
_EXTREMES: Sums = {("max", "amax"): 0.0, ("max", "is_broken"): 0.0}


def loss_sums(
    values: torch.Tensor,
    quantized: torch.Tensor | QuantizedTensorStorage,
    *,
    columnwise: bool | None = None,
) -> Sums:
    """The sums behind :class:`Measures`; arguments and errors are those of :func:`compare`."""
    check_high_precision(values)
    elements: _Elements | None = None
    if isinstance(quantized, QuantizedTensorStorage):
        direction = direction_of(quantized, columnwise)
        quantized, elements = direction.dequantize(torch.float32), _elements(direction)
    if not isinstance(quantized, torch.Tensor):
        raise DTypeError(
            f"quantized is a {type(quantized).__name__}", expected="a tensor or a storage"
        )
    if quantized.shape != values.shape:
        raise ShapeError(
            f"quantized has shape {tuple(quantized.shape)}", expected=f"{tuple(values.shape)}"
        )
    sums: Sums = {("sum", name): 0.0 for name in (*_COUNTS, *_PRODUCTS)} | _EXTREMES
    sums["sum", "count"] = values.numel()
    sums["min", "knows_elements"] = elements is not None
    data, element = (repeat(None), None) if elements is None else (_flat(elements[0]), elements[1])
    for x, q, chunk in zip(_flat(values), _flat(quantized), data, strict=False):
        _add_chunk(sums, x, q, chunk, element)
    return sums


def _add_chunk(
    sums: Sums,
    x: torch.Tensor,
    q: torch.Tensor,
    data: torch.Tensor | None,
    element: _Element | None,
) -> None:
    amax = x.abs().amax().item()
    if not math.isfinite(amax):
        finite = x.isfinite()
        count = int(finite.count_nonzero())
        sums["sum", "not_finite"] += x.numel() - count
        if count:
            _add_chunk(sums, x[finite], q[finite], None if data is None else data[finite], element)
        return
    rows = torch.empty(3, x.numel(), dtype=torch.float64, device=x.device)
    rows[0], rows[1] = x, q
    torch.sub(rows[0], rows[1], out=rows[2])
    # The matrix product computes all sums of products in one pass.
    (signal, dot, _), (_, quantized_signal, _), (_, _, noise) = (rows @ rows.t()).tolist()
    clamped = 0
    if data is not None and element is not None:
        clamped = _clamped(rows[0], rows[1], data, element)
    nonzero = int(x.count_nonzero())
    # No product of two float32 numbers underflows in float64.
    remaining = int(rows[0].mul_(rows[1]).count_nonzero())
    numbers = {
        ("max", "amax"): amax,
        ("max", "is_broken"): float(not math.isfinite(quantized_signal)),
        ("sum", "nonzero"): nonzero,
        ("sum", "zeroed"): nonzero - remaining,
        ("sum", "clamped"): clamped,
        ("sum", "signal"): signal,
        ("sum", "quantized_signal"): quantized_signal,
        ("sum", "dot"): dot,
        ("sum", "noise"): noise,
    }
    add(sums, numbers)


def measures_of(sums: Sums) -> Measures:
    """The measures of all tensors whose :func:`loss_sums` were combined."""
    of = by_name(sums)
    count, not_finite = int(of["count"]), int(of["not_finite"])
    is_exact = not of["is_broken"] and of["noise"] == 0
    saturation = None
    if of["knows_elements"] or is_exact:
        saturation = 100 * of["clamped"] / max(count - not_finite, 1)
    sqnr, cosine = -math.inf, 0.0
    if is_exact:
        sqnr, cosine = math.inf, 1.0
    elif not of["is_broken"] and of["signal"]:
        sqnr = 10 * math.log10(of["signal"] / of["noise"])
        size = math.sqrt(of["signal"]) * math.sqrt(of["quantized_signal"])
        cosine = min(1.0, max(-1.0, of["dot"] / size)) if size else 0.0
    return Measures(
        count=count,
        not_finite=not_finite,
        amax=of["amax"],
        underflow=100 * of["zeroed"] / max(of["nonzero"], 1),
        saturation=saturation,
        sqnr=sqnr,
        cosine=cosine,
    )


def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    size = _CHUNK.get(tensor.device.type, _CHUNK_ELSEWHERE)
    yield from tensor.detach().reshape(-1).split(size) if tensor.numel() else ()


def direction_of(
    quantized: QuantizedTensorStorage, columnwise: bool | None
) -> QuantizedTensorStorage:
    """The storage with the data of one direction only.

    ``columnwise`` None chooses rowwise data where the storage has it. A direction that the storage
    does not hold is a UsageError.
    """
    usages = quantized.get_usages()
    if columnwise is None:
        columnwise = not usages["rowwise"]
    if usages == {"rowwise": not columnwise, "columnwise": columnwise}:
        return quantized
    tensors, spec = quantized.flatten_storage()
    with torch.no_grad():
        direction: QuantizedTensorStorage = spec.build(tensors)
        direction.update_usage(rowwise_usage=not columnwise, columnwise_usage=columnwise)
    return direction


def _elements(quantized: QuantizedTensorStorage) -> _Elements | None:
    """The codes of the elements in the order of the tensor, and their format.

    None where the storage declares no such data, or holds only rotated ones.
    """
    if isinstance(quantized, GridTensorStorage):
        codes = quantized.codes()
        return None if codes is None else (codes, quantized.grid_layout.format)
    for inner in quantized.inner_tensors:
        tensor = getattr(quantized, inner.attribute)
        dtype = native_dtype(quantized, inner)
        if tensor is not None and dtype in ELEMENTS:
            data = inner.by_rows(tensor)
            if data.shape != quantized.shape:
                return None
            return data, ELEMENTS[dtype]
    return None


def _clamped(x: torch.Tensor, q: torch.Tensor, data: torch.Tensor, element: _Element) -> int:
    """The number of values that became the largest number, although rounding would not give it.

    Where the scale of a block underflows to 0, so does the largest number.
    """
    at = (_is_largest(data, element) & (q != 0)).nonzero().squeeze(1)
    return int((x[at].abs() > q[at].abs() * (1 + _half_step(element))).count_nonzero())


def _half_step(element: _Element) -> float:
    """Half of the step from the largest number to the next one that the format lacks, relative to
    the largest number."""
    if isinstance(element, IntegerFormat):
        return element.step / 2 / element.max
    exponent = math.floor(math.log2(element.max))
    return 2.0 ** (exponent - element.mantissa_bits - 1) / element.max


def _is_largest(data: torch.Tensor, element: _Element) -> torch.Tensor:
    """A mask of the elements that are the largest number, or its negative."""
    values = values_of_codes(element)
    codes = [code for code, value in enumerate(values) if abs(value) == element.max]
    largest = torch.tensor(codes, dtype=torch.uint8, device=data.device)
    return torch.isin(data.view(torch.uint8), largest)
