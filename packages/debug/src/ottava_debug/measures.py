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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ottava.errors import DTypeError, ShapeError
from ottava.formats import ELEMENTS, FloatFormat, IntegerFormat
from ottava.kernels.checks import check_high_precision
from ottava.tensors import QuantizedTensorStorage
from ottava.tensors.declaration import native_dtype

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
    comparison = Comparison()
    comparison.add(values, quantized, columnwise=columnwise)
    return comparison.measures()


def exponents(values: torch.Tensor) -> dict[int, int]:
    """Exponent ``⌊log2 |x|⌋`` -> the number of values with it, ascending, without those that do not
    occur.

    Zeros, NaN and infinities have no exponent and are excluded.

    Raises:
        DTypeError: ``values`` is not a tensor of high precision.
    """
    check_high_precision(values)
    counts = torch.zeros(_EXPONENTS, dtype=torch.int64, device=values.device)
    for x in _flat(values):
        counts += torch.bincount(_exponent_bits(x), minlength=_EXPONENTS)
    return {
        at - _BIAS: count
        for at, count in enumerate(counts.tolist())
        if count and 0 < at < _EXPONENTS - 1
    }


def _exponent_bits(x: torch.Tensor) -> torch.Tensor:
    """The exponents of values, with float64's bias; 0 for zeros, 2047 for NaN and infinities."""
    bits = (x.float().view(torch.int32) >> 23) & 0xFF
    least, most = bits.aminmax()
    if not least or most == 0xFF:
        # The exponent bits of float32 do not suffice for zeros, subnormals, NaN and infinities.
        return x.double().abs().view(torch.int64) >> _MANTISSA_BITS
    return bits + (_BIAS - 127)


class Comparison:
    """The sums behind :class:`Measures`, which accumulate over tensors as if they were one."""

    #: Attribute -> the operation that combines two comparisons: ``sum``, ``min`` or ``max``.
    together: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("count", "not_finite", "nonzero", "zeroed", "clamped"), "sum"),
        **dict.fromkeys(("signal", "quantized_signal", "dot", "noise"), "sum"),
        **dict.fromkeys(("amax", "broken"), "max"),
        "knows_elements": "min",
    }

    def __init__(self) -> None:
        self.count = self.not_finite = self.nonzero = self.zeroed = self.clamped = 0
        self.amax = self.signal = self.quantized_signal = self.dot = self.noise = 0.0
        self.broken, self.knows_elements = False, True

    def add(
        self,
        values: torch.Tensor,
        quantized: torch.Tensor | QuantizedTensorStorage,
        *,
        columnwise: bool | None = None,
    ) -> None:
        """Add a tensor and its quantized values; arguments and errors are those of
        :func:`compare`."""
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
        self.count += values.numel()
        self.knows_elements &= elements is not None
        pairs = zip(_flat(values), _flat(quantized), strict=True)
        if elements is None:
            for x, q in pairs:
                self._add(x, q, None, None)
        else:
            for (x, q), data in zip(pairs, _flat(elements[0]), strict=True):
                self._add(x, q, data, elements[1])

    def _add(
        self, x: torch.Tensor, q: torch.Tensor, data: torch.Tensor | None, element: _Element | None
    ) -> None:
        if not x.numel():
            return
        amax = x.abs().amax().item()
        if not math.isfinite(amax):
            finite = x.isfinite()
            self.not_finite += int(finite.numel() - finite.count_nonzero())
            self._add(x[finite], q[finite], None if data is None else data[finite], element)
            return
        self.amax = max(self.amax, amax)
        rows = torch.empty(3, x.numel(), dtype=torch.float64, device=x.device)
        rows[0], rows[1] = x, q
        torch.sub(rows[0], rows[1], out=rows[2])
        # The matrix product computes all sums of products in one pass.
        (signal, dot, _), (_, quantized_signal, _), (_, _, noise) = (rows @ rows.t()).tolist()
        self.broken |= not math.isfinite(quantized_signal)
        nonzero = int(x.count_nonzero())
        self.nonzero += nonzero
        if data is not None and element is not None:
            self.clamped += _clamped(rows[0], rows[1], data, element)
        # No product of two float32 numbers underflows in float64.
        self.zeroed += nonzero - int(rows[0].mul_(rows[1]).count_nonzero())
        self.signal += signal
        self.quantized_signal += quantized_signal
        self.dot += dot
        self.noise += noise

    def numbers(self) -> dict[tuple[str, str], float]:
        """``(operation, attribute)`` -> the number, by :attr:`together`."""
        return {(how, name): float(getattr(self, name)) for name, how in self.together.items()}

    def take(self, numbers: Mapping[tuple[str, str], float]) -> None:
        """Set the attributes to the numbers of another comparison, each converted to its own
        type."""
        for name, how in self.together.items():
            setattr(self, name, type(getattr(self, name))(numbers[how, name]))

    def measures(self) -> Measures:
        """The measures of all tensors that were added."""
        exact = not self.broken and self.noise == 0
        saturation = None
        if self.knows_elements or exact:
            saturation = 100 * self.clamped / max(self.count - self.not_finite, 1)
        return Measures(
            count=self.count,
            not_finite=self.not_finite,
            amax=self.amax,
            underflow=100 * self.zeroed / max(self.nonzero, 1),
            saturation=saturation,
            sqnr=self._sqnr(exact),
            cosine=self._cosine(exact),
        )

    def _sqnr(self, exact: bool) -> float:
        if exact:
            return math.inf
        if self.broken or self.signal == 0:
            return -math.inf
        return 10 * math.log10(self.signal / self.noise)

    def _cosine(self, exact: bool) -> float:
        if exact:
            return 1.0
        if self.broken or self.signal == 0 or self.quantized_signal == 0:
            return 0.0
        cosine = self.dot / (math.sqrt(self.signal) * math.sqrt(self.quantized_signal))
        return min(1.0, max(-1.0, cosine))


def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    size = _CHUNK.get(tensor.device.type, _CHUNK_ELSEWHERE)
    yield from tensor.detach().reshape(-1).split(size) if tensor.numel() else ()


def direction_of(
    quantized: QuantizedTensorStorage, columnwise: bool | None
) -> QuantizedTensorStorage:
    """The storage with the data of one direction only.

    ``columnwise`` None chooses rowwise data where the storage has it.

    Raises:
        UsageError: the storage does not hold the direction.
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
    """The data of the elements in the order of the tensor, and their format; None where the storage
    declares no such data."""
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
    """The number of values that became the largest number, although rounding would not give it."""
    if not isinstance(element, IntegerFormat):
        magnitudes = data.view(torch.uint8) & 0x7F
        if magnitudes.max() < _largest(element, data.device):
            return 0
    at = _is_largest(data, element).nonzero().squeeze(1)
    return int((x[at].abs() > q[at].abs() * (1 + _half_step(element))).count_nonzero())


def _half_step(element: _Element) -> float:
    """Half of the step from the largest number to the next one that the format lacks, relative to
    the largest number."""
    exponent = math.floor(math.log2(element.max))
    bits = element.mantissa_bits if isinstance(element, FloatFormat) else exponent
    return 2.0 ** (exponent - bits - 1) / element.max


def _is_largest(data: torch.Tensor, element: _Element) -> torch.Tensor:
    """A mask of the elements that are the largest number, or its negative."""
    if isinstance(element, IntegerFormat):
        return data.view(element.torch_dtype).abs() == int(element.max)
    return (data.view(torch.uint8) & 0x7F) == _largest(element, data.device)


def _largest(element: FloatFormat, device: torch.device) -> torch.Tensor:
    """The byte of a format's largest number."""
    return torch.tensor(element.max, device=device).to(element.torch_dtype).view(torch.uint8)
