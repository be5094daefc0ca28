"""The findings of a search, for people and for programs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ottava_debug.measures import Measures
from ottava_debug.output import plain
from ottava_debug.search.measure import loss_of_operand
from ottava_debug.search.operands import Comparison, Operand


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
        return [
            (
                f.layer,
                f.tensor,
                f.gemm,
                number(f.alone),
                "" if f.without is None else number(f.without),
            )
            for f in self.findings
        ]

    def reasons(self) -> list[str]:
        """The findings as sentences."""
        return [f"{f.layer}, {f.tensor} in {f.gemm}: {f.reason}." for f in self.findings]

    def sentence(self) -> str:
        """The result as a sentence."""
        if self.measure == "products":
            one = len(self.findings) == 1
            many = (
                "1 operand moves the result of its"
                if one
                else f"{len(self.findings)} operands move the result of their"
            )
            return f"{many} product by more than {number(self.tolerance)} of it"
        told = (
            f"The {self.measure} is {number(self.value)}, in high precision "
            f"{number(self.reference)}: a distance"
        )
        if self.measure == "grad-distance":
            told = "The gradients are at a distance"
        told, right = (
            f"{told} of {number(self.before)}",
            f"at most {number(self.tolerance)} is right",
        )
        if self.before <= self.tolerance:
            return f"Nothing to find. {told} ({right})"
        kept = (
            f"with the findings in high precision {number(self.after)}"
            if self.findings
            else "nothing was found"
        )
        return f"{told}; {kept} ({right})"


# 8-bit formats change values by a smaller share than this.
_OFF = 0.1
COLUMNS = ("layer", "tensor", "direction", "distance alone", "without it")


def number(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def reason(operands: Sequence[Operand], found: Comparison, partners: Sequence[str] = ()) -> str:
    """The reason why these operands do harm, as far as their losses tell."""
    told = _cause(worst_of(operands, found), found)
    return f"{told}; only together with {', '.join(partners)}" if partners else told


def worst_of(operands: Sequence[Operand], found: Comparison) -> Operand:
    """The operand that loses most."""
    return max(operands, key=lambda operand: loss_of_operand(found.statistics[operand]))


def is_clamped(operand: Operand, found: Comparison) -> bool:
    """Whether an operand loses by values beyond the range, while its other values are right."""
    saturation, sqnr = found.statistics[operand].saturation or 0.0, found.statistics[operand].sqnr
    return not abs(found.gains[operand] - 1) > _OFF and (
        saturation > 1 or (saturation > 0 and sqnr < 15)
    )


def _cause(operand: Operand, found: Comparison) -> str:
    made, gain = found.statistics[operand], found.gains[operand]
    lost, initial = f"SQNR {made.sqnr:.1f} dB", found.is_initial(operand)
    old = "of earlier steps, and " if operand in found.stateful else ""
    old = "the initial one, which no step has set yet, and " if initial else old
    if made.not_finite:
        return (
            f"{made.not_finite} of its {made.count} values are NaN or infinite before they are "
            f"quantized"
        )
    if is_clamped(operand, found):
        share = f"{made.saturation:.3g} % of the values are clamped"
        return f"{share}, {lost}: the scale is {old}too large (amax {made.amax:.3g})"
    zeros = f"{made.underflow:.3g} % of the values become zero"
    if made.underflow > 5 and (made.sqnr < 1 or initial):
        return f"{zeros}, {lost}: the scale is {old}too small (amax {made.amax:.3g})"
    if made.underflow > 5:
        return f"{zeros}: an outlier, {made.amax:.3g}, takes the range ({lost})"
    if made.sqnr < 15 and abs(gain - 1) > _OFF:
        return (
            f"{lost} at a cosine of {made.cosine:.4f}: the quantizer gives the values times "
            f"{gain:.2g}"
        )
    if not made.sqnr >= 15:
        return f"{lost}, and the values are within range: the quantizer gives others"
    return f"it loses little by itself ({lost}), which is too much here"
