"""What is lost between a tensor in high precision and what it becomes: exact sums in float64, in
one pass.

Definitions, for values ``x`` and what they become, ``q``:

- ``amax``: ``max |x|``.
- underflow: how many of the ``x`` that are not zero have ``q = 0``, in percent.
- saturation: how many of the ``x`` were clamped, in percent: ``q`` is the largest number of the
  format, with the scale of its block, and ``|x|`` is beyond it by more than half of the format's
  last step, so that rounding alone would not have given it. Underflow and saturation are the two
  ways out of a format's range (Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
  arXiv:2209.05433).
- SQNR, the signal-to-quantization-noise ratio: ``10 · log10(Σ x² / Σ (x - q)²)`` in dB (Widrow and
  Kollár, "Quantization Noise", 2008). 6.02 dB are one bit.
- cosine: ``Σ x·q / √(Σ x² · Σ q²)``, between -1 and 1.
- exponents: how many ``x`` have ``⌊log2 |x|⌋ = e``.

Values that are NaN or infinite are counted, and left out of everything else. Where nothing is left,
nothing is lost: amax, underflow and saturation are 0, the SQNR is infinite, the cosine 1; so it is
of zeros that stay zeros. A finite value that becomes NaN or infinite is noise without bound: the
SQNR is -inf and the cosine 0.
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

# Elements that are looked at together. On a CPU their float64 values fit its cache, and torch has
# one thread look at so few: threads that wait for each other after each sum take a hundred times
# longer where others use the processor.
_CHUNK = {"cpu": (1 << 15) - 64}
_CHUNK_ELSEWHERE = 1 << 23
# Of float64, whose bits tell the exponent of every float32: no subnormal stays one.
_MANTISSA_BITS, _BIAS, _EXPONENTS = 52, 1023, 2048
_Element = FloatFormat | IntegerFormat
# Bytes of elements, and their format.
_Elements = tuple[torch.Tensor, _Element]


@dataclass(frozen=True)
class Measures:
    """What one tensor loses; see the module for definitions.

    Attributes:
        count: elements.
        not_finite: how many of them are NaN or infinite: these are left out below.
        amax: largest magnitude.
        underflow: percent of the values that are not zero.
        saturation: percent of the values; None where the storage does not declare the format of its
            elements, so that nobody can tell.
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
    """What ``values`` lose by becoming ``quantized``.

    Args:
        values: float32, bfloat16 or float16, any shape.
        quantized: what they become, of their shape: a quantized tensor or storage; or a plain
            tensor, whose saturation is not known.
        columnwise: of a storage, the data of this direction; None: of rows where they are held.

    Raises:
        DTypeError: an argument is no tensor, or of another dtype.
        ShapeError: they have different shapes.
        UsageError: the storage does not hold the direction.
    """
    comparison = Comparison()
    comparison.add(values, quantized, columnwise=columnwise)
    return comparison.measures()


def exponents(values: torch.Tensor) -> dict[int, int]:
    """Exponent ``⌊log2 |x|⌋`` -> how many values have it, ascending, those that occur.

    Zeros, NaN and infinities have none and are left out.

    Raises:
        DTypeError: no tensor of high precision.
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
    """The exponents of values, biased as those of float64; 0 of zeros, the largest of what is not
    finite."""
    bits = (x.float().view(torch.int32) >> 23) & 0xFF
    least, most = bits.aminmax()
    if not least or most == 0xFF:
        # Zeros, subnormals and what is not finite need a look at more.
        return x.double().abs().view(torch.int64) >> _MANTISSA_BITS
    return bits + (_BIAS - 127)


class Comparison:
    """The sums behind :class:`Measures`, to which tensors are added one after the other, as if they
    were one."""

    #: Attribute -> how those of two comparisons are put together: by ``sum``, ``min`` or ``max``.
    together: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("count", "not_finite", "nonzero", "zeroed", "clamped"), "sum"),
        **dict.fromkeys(("signal", "made", "dot", "noise"), "sum"),
        **dict.fromkeys(("amax", "broken"), "max"),
        "known": "min",
    }

    def __init__(self) -> None:
        self.count = self.not_finite = self.nonzero = self.zeroed = self.clamped = 0
        self.amax = self.signal = self.made = self.dot = self.noise = 0.0
        self.broken, self.known = False, True

    def add(
        self,
        values: torch.Tensor,
        quantized: torch.Tensor | QuantizedTensorStorage,
        *,
        columnwise: bool | None = None,
    ) -> None:
        """Add what ``values`` become; arguments and errors as of :func:`compare`."""
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
        self.known &= elements is not None
        data = iter(()) if elements is None else _flat(elements[0])
        for x, q in zip(_flat(values), _flat(quantized), strict=True):
            self._add(x, q, next(data, None), elements[1] if elements else None)

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
        # All sums of products in one pass.
        (signal, dot, _), (_, made, _), (_, _, noise) = (rows @ rows.t()).tolist()
        self.broken |= not math.isfinite(made)
        nonzero = int(x.count_nonzero())
        self.nonzero += nonzero
        if data is not None and element is not None:
            self.clamped += _clamped(rows[0], rows[1], data, element)
        # No product of two float32 numbers underflows in float64.
        self.zeroed += nonzero - int(rows[0].mul_(rows[1]).count_nonzero())
        self.signal, self.made = self.signal + signal, self.made + made
        self.dot, self.noise = self.dot + dot, self.noise + noise

    def take(self, numbers: Mapping[str, float]) -> None:
        """Have the attributes of :attr:`together` be these numbers, each of the kind that it
        was."""
        for name, number in numbers.items():
            setattr(self, name, type(getattr(self, name))(number))

    def measures(self) -> Measures:
        """The measures of all that was added."""
        exact = not self.broken and self.noise == 0
        saturation = (
            100 * self.clamped / max(self.count - self.not_finite, 1)
            if self.known or exact
            else None
        )
        underflow = 100 * self.zeroed / max(self.nonzero, 1)
        sqnr, cosine = self._sqnr(exact), self._cosine(exact)
        return Measures(self.count, self.not_finite, self.amax, underflow, saturation, sqnr, cosine)

    def _sqnr(self, exact: bool) -> float:
        if exact:
            return math.inf
        return (
            -math.inf
            if self.broken or self.signal == 0
            else 10 * math.log10(self.signal / self.noise)
        )

    def _cosine(self, exact: bool) -> float:
        if exact:
            return 1.0
        if self.broken or self.signal == 0 or self.made == 0:
            return 0.0
        return min(1.0, max(-1.0, self.dot / (math.sqrt(self.signal) * math.sqrt(self.made))))


def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    size = _CHUNK.get(tensor.device.type, _CHUNK_ELSEWHERE)
    yield from tensor.detach().reshape(-1).split(size) if tensor.numel() else ()


def direction_of(
    quantized: QuantizedTensorStorage, columnwise: bool | None
) -> QuantizedTensorStorage:
    """The storage with the data of one direction; None: rows where they are held. UsageError: it is
    not held."""
    held = quantized.get_usages()
    if columnwise is None:
        columnwise = not held["rowwise"]
    if held == {"rowwise": not columnwise, "columnwise": columnwise}:
        return quantized
    tensors, spec = quantized.flatten_storage()
    with torch.no_grad():
        made: QuantizedTensorStorage = spec.build(tensors)
        made.update_usage(rowwise_usage=not columnwise, columnwise_usage=columnwise)
    return made


def _elements(quantized: QuantizedTensorStorage) -> _Elements | None:
    """The bytes of the elements in the order of the tensor, and their format; None where none are
    declared."""
    for inner in quantized.inner_tensors:
        held, dtype = getattr(quantized, inner.attribute), native_dtype(quantized, inner)
        if held is not None and dtype in ELEMENTS:
            data = inner.by_rows(held)
            return (data, ELEMENTS[dtype]) if data.shape == quantized.shape else None
    return None


def _clamped(x: torch.Tensor, q: torch.Tensor, data: torch.Tensor, element: _Element) -> int:
    """How many values became the largest number, and are beyond what rounding makes of it."""
    if not isinstance(element, IntegerFormat) and (data.view(torch.uint8) & 0x7F).max() < _largest(
        element, data.device
    ):
        return 0
    at = _is_largest(data, element).nonzero().squeeze(1)
    return int((x[at].abs() > q[at].abs() * (1 + _half_step(element))).count_nonzero())


def _half_step(element: _Element) -> float:
    """Half of the distance from the largest number to what would be the next, relative to the
    former."""
    bits = (
        element.mantissa_bits
        if isinstance(element, FloatFormat)
        else math.floor(math.log2(element.max))
    )
    return 2.0 ** (math.floor(math.log2(element.max)) - bits - 1) / element.max


def _is_largest(data: torch.Tensor, element: _Element) -> torch.Tensor:
    """Which elements are the largest number, or its negative."""
    if isinstance(element, IntegerFormat):
        return data.view(element.torch_dtype).abs() == int(element.max)
    return (data.view(torch.uint8) & 0x7F) == _largest(element, data.device)


def _largest(element: FloatFormat, device: torch.device) -> torch.Tensor:
    """The byte of a format's largest number."""
    return torch.tensor(element.max, device=device).to(element.torch_dtype).view(torch.uint8)
