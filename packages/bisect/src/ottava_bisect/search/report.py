"""The findings of a search, for people and for programs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ottava.cli.output import plain
from ottava_bisect.search.measure import loss_of_operand
from ottava_bisect.search.operands import Comparison, Operand
from ottava_debug.measures import Measures


@dataclass(frozen=True)
class Finding:
    """An operand that is to blame, in one layer or in many.

    Attributes:
        layers: the layers that have the operand.
        gemm: the product that takes it: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        tensor: ``"activation"``, ``"weight"`` or ``"gradient"``.
        reason: the reason, as a sentence.
        alone: the distance with nothing else quantized.
        without: the distance with everything else quantized; None without the model.
        partners: operands without which this one does no harm.
        statistics: the loss of the operand while all findings are in high precision (without the
            model: of the operand alone), in the layer that loses most.
        follows: weights that are too large for their scale, and whose products give the values of
            this operand. With smaller weights these values would be within range.
    """

    layers: tuple[str, ...]
    gemm: str
    tensor: str
    reason: str
    alone: float
    without: float | None = None
    partners: tuple[str, ...] = ()
    statistics: Measures | None = None
    follows: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operand of each layer."""
        return tuple(Operand(layer, self.gemm, self.tensor) for layer in self.layers)

    @property
    def layer(self) -> str:
        """The layer; for several layers their number, and the first one."""
        first = self.layers[0] or "the model"
        return first if len(self.layers) == 1 else f"{len(self.layers)} layers, {first} ..."

    def row(self) -> tuple[str, ...]:
        """The finding as texts, by :data:`COLUMNS`."""
        without = "" if self.without is None else number(self.without)
        return self.layer, self.tensor, self.gemm, number(self.alone), without

    def sentence(self) -> str:
        """The finding as a sentence."""
        return f"{self.layer}, {self.tensor} in {self.gemm}: {self.reason}."


@dataclass
class Report:
    """The result of a search.

    Attributes:
        measure: ``"loss"``, ``"grad-norm"``, ``"grad-distance"``; ``"products"`` without the model.
        words: a description of the measure's distance.
        tolerance: the largest distance that counts as right.
        captured: the value of the measure in the captured step; None where it is not known.
        value, reference, kept: the value of the measure in the replay, in the replay in high
            precision, and in the replay with the findings in high precision.
        before, after: the distance of the replay, and with the findings in high precision.
        verified: the distance under the recipe file; None without a recipe file.
        findings: the findings, the heaviest first.
        operands: the numbers of operands that were captured and compared, and their differences.
        replays: the number of replays.
        seconds: the duration in seconds.
        recipe_file: the text of the recipe file that keeps the findings in high precision; empty
            for none.
        noisy: the parameters whose gradients are noise even in high precision, and do not count.
        notes: further information, as sentences.
    """

    measure: str
    words: str
    tolerance: float
    captured: float | None = None
    value: float = math.nan
    reference: float = math.nan
    kept: float = math.nan
    before: float = 0.0
    after: float = 0.0
    verified: float | None = None
    findings: list[Finding] = field(default_factory=list)
    operands: dict[str, Any] = field(default_factory=dict)
    replays: int = 0
    seconds: float = 0.0
    recipe_file: str = ""
    noisy: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def solved(self) -> bool:
        """Whether nothing was wrong, or the findings explain it."""
        return self.after <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        """The report as data for :func:`json.dumps`; numbers that are not finite become ``"nan"``,
        ``"inf"`` or ``"-inf"``."""
        return plain(asdict(self) | {"solved": self.solved})  # type: ignore[no-any-return]

    def rows(self) -> list[tuple[str, ...]]:
        """The findings as texts, by :data:`COLUMNS`."""
        return [finding.row() for finding in self.findings]

    def reasons(self) -> list[str]:
        """The findings as sentences."""
        return [finding.sentence() for finding in self.findings]

    def sentence(self) -> str:
        """The result as a sentence."""
        if self.measure == "products":
            return self._sentence_of_products()
        right = f"at most {number(self.tolerance)} is right"
        if self.before <= self.tolerance:
            return f"Nothing to find. {self._distance()} ({right})"
        rest = "nothing was found"
        if self.findings:
            rest = f"with the findings in high precision {number(self.after)}"
        return f"{self._distance()}; {rest} ({right})"

    def _distance(self) -> str:
        if self.measure == "grad-distance":
            return f"The gradients are at a distance of {number(self.before)}"
        return (
            f"The {self.measure} is {number(self.value)}, in high precision "
            f"{number(self.reference)}: a distance of {number(self.before)}"
        )

    def _sentence_of_products(self) -> str:
        operands = f"{len(self.findings)} operands move the result of their"
        if len(self.findings) == 1:
            operands = "1 operand moves the result of its"
        return f"{operands} product by more than {number(self.tolerance)} of it"


# 8-bit formats change values by a smaller share than this.
_OFF = 0.1
COLUMNS = ("layer", "tensor", "direction", "distance alone", "without it")


def number(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def reason(
    operands: Sequence[Operand], comparison: Comparison, partners: Sequence[str] = ()
) -> str:
    """The reason why these operands do harm, as far as their losses tell."""
    cause = _cause(worst_of(operands, comparison), comparison)
    if partners:
        return f"{cause}; only together with {', '.join(partners)}"
    return cause


def worst_of(operands: Sequence[Operand], comparison: Comparison) -> Operand:
    """The operand that loses most."""
    return max(operands, key=lambda operand: loss_of_operand(comparison.statistics[operand]))


def is_clamped(operand: Operand, comparison: Comparison) -> bool:
    """Whether an operand loses by values beyond the range, while its other values are right."""
    if abs(comparison.gains[operand] - 1) > _OFF:
        return False
    measures = comparison.statistics[operand]
    saturation = measures.saturation or 0.0
    return saturation > 1 or (saturation > 0 and measures.sqnr < 15)


def _cause(operand: Operand, comparison: Comparison) -> str:
    measures, gain = comparison.statistics[operand], comparison.gains[operand]
    if measures.not_finite:
        return (
            f"{measures.not_finite} of its {measures.count} values are NaN or infinite before they "
            f"are quantized"
        )
    sqnr, amax = f"SQNR {measures.sqnr:.1f} dB", f"{measures.amax:.3g}"
    is_initial = comparison.is_initial(operand)
    origin = ""
    if is_initial:
        origin = "the initial one, which no step has set yet, and "
    elif operand in comparison.stateful:
        origin = "of earlier steps, and "
    if is_clamped(operand, comparison):
        share = f"{measures.saturation:.3g} % of the values are clamped"
        return f"{share}, {sqnr}: the scale is {origin}too large (amax {amax})"
    zeros = f"{measures.underflow:.3g} % of the values become zero"
    if measures.underflow > 5 and (measures.sqnr < 1 or is_initial):
        return f"{zeros}, {sqnr}: the scale is {origin}too small (amax {amax})"
    if measures.underflow > 5:
        return f"{zeros}: an outlier, {amax}, takes the range ({sqnr})"
    if measures.sqnr < 15 and abs(gain - 1) > _OFF:
        return (
            f"{sqnr} at a cosine of {measures.cosine:.4f}: the quantizer gives the values times "
            f"{gain:.2g}"
        )
    if not measures.sqnr >= 15:
        return f"{sqnr}, and the values are within range: the quantizer gives others"
    return f"it loses little by itself ({sqnr}), which is too much here"
