"""The report of ``ottava analyze`` as data: losses of tensors under recipes, and the layers that
need high precision."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist, median
from typing import Any

from ottava.cli.output import plain
from ottava.errors import OptionError
from ottava_debug.measures import Measures
from ottava_debug.recipe_file import Keep

#: Decibels. Rounding alone leaves normally distributed values 31.5 dB in E4M3 and 25.5 dB in E5M2.
#: Below 20 dB, an error of a tenth, more than two thirds of the noise comes from what does not fit
#: the range of the format.
THRESHOLD = 20.0


def most_underflow(threshold: float) -> float:
    """The percentage of underflow that corresponds to an SQNR of ``threshold`` dB.

    The SQNR hides the loss of small values, because a few large values dominate the sum of squares.
    Therefore underflow has a threshold of its own, derived from that of the SQNR: where the step
    between numbers near zero is ``2t``, values below ``t`` become zero, and the noise is ``t²/3``.
    The share ``erf(t / (√2·σ))`` of a normal distribution with this noise becomes zero.
    """
    return 100 * math.erf(math.sqrt(1.5 * 10 ** (-threshold / 10)))


def _of_underflow(percent: float) -> float:
    """The SQNR in dB that corresponds to an underflow: the inverse of :func:`most_underflow`."""
    if percent <= 0 or percent >= 100:
        return -math.inf if percent > 0 else math.inf
    return 10 * math.log10(3 / NormalDist().inv_cdf((1 + percent / 100) / 2) ** 2)


def _decibels(rank: tuple[int, float]) -> str:
    """The quality in a rank, as text."""
    return "exact" if rank[1] == -math.inf else f"{-rank[1]:.1f} dB"


def _largest(shares: Sequence[float | None]) -> float | None:
    """The largest of the shares; None where one of them is not known, or there is none."""
    numbers = [share for share in shares if share is not None]
    return max(numbers) if numbers and len(numbers) == len(shares) else None


@dataclass(frozen=True)
class Noise:
    """The loss of one tensor under one recipe.

    Attributes:
        rowwise, columnwise: the measures of each direction's data. ``columnwise`` is None where
            both directions have the same data, or the recipe does not quantize that direction. Both
            are None where the recipe failed.
        error: the reason why the recipe failed; empty where it did not.
    """

    rowwise: Measures | None = None
    columnwise: Measures | None = None
    error: str = ""

    @property
    def sides(self) -> list[Measures]:
        """The measures of the directions that have any."""
        return [side for side in (self.rowwise, self.columnwise) if side is not None]

    @property
    def not_finite(self) -> int:
        """The number of values of the tensor that are NaN or infinite in high precision."""
        return max((side.not_finite for side in self.sides), default=0)

    @property
    def sqnr(self) -> float:
        """dB, in the worse direction; ``-inf`` where the recipe failed, or values of the tensor are
        not finite."""
        if self.not_finite:
            return -math.inf
        return min((side.sqnr for side in self.sides), default=-math.inf)

    @property
    def underflow(self) -> float:
        """Percent, in the worse direction; 100 where the recipe failed."""
        return max((side.underflow for side in self.sides), default=100.0)

    @property
    def saturation(self) -> float | None:
        """Percent, in the worse direction; None where it is not known."""
        return _largest([side.saturation for side in self.sides])

    @property
    def cosine(self) -> float:
        """The cosine in the worse direction; 0 where the SQNR is ``-inf``."""
        return 0.0 if self.not_finite else min((side.cosine for side in self.sides), default=0.0)

    @property
    def quality(self) -> float:
        """The dB that rank tensors: the lower one of the SQNR and the SQNR that corresponds to the
        underflow."""
        return min(self.sqnr, _of_underflow(self.underflow))

    def complaint(self, threshold: float) -> str:
        """The reason why the tensor is not good enough, in words; empty where it is."""
        if self.error:
            return f"fails: {self.error}"
        limit, reasons = most_underflow(threshold), []
        if self.not_finite:
            reasons.append(f"{self.not_finite} of {self.sides[0].count} values are NaN or infinite")
        elif self.sqnr < threshold:
            reasons.append(f"SQNR {self.sqnr:.1f} dB < {threshold:g} dB")
        if self.underflow > limit:
            reasons.append(f"underflow {self.underflow:.1f} % > {limit:.1f} %")
        return ", ".join(reasons)


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a layer.

    Attributes:
        layer: the qualified name of the layer.
        role: ``"weight"``, ``"input"`` or ``"grad_output"``.
        shape: the shape of the weight; for a captured tensor the matrix ``(rows, columns)`` of the
            last step.
        dtype: the dtype, such as ``"bfloat16"``.
        count: the number of elements; for a captured tensor in all steps together.
        not_finite: the number of elements that are NaN or infinite.
        amax: the largest magnitude.
        exponents: the result of :func:`ottava_debug.measures.exponents`.
        noise: name of a recipe -> the noise under it.
    """

    layer: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    not_finite: int
    amax: float
    exponents: Mapping[int, int]
    noise: Mapping[str, Noise]

    def under(self, recipes: Sequence[str]) -> "TensorReport":
        """The report with the noise of only these recipes."""
        return replace(self, noise={recipe: self.noise[recipe] for recipe in recipes})


@dataclass(frozen=True)
class Skipped:
    """A tensor, a layer or a recipe that was left out, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """The losses of all tensors under one recipe.

    Attributes:
        recipe: the name of the recipe.
        sqnr, lowest_sqnr: dB, the median over tensors and the worst one.
        underflow, saturation: percent, of the worst tensor.
        kept: the layers that need high precision under the recipe.
    """

    recipe: str
    sqnr: float
    lowest_sqnr: float
    underflow: float
    saturation: float | None
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`ottava_debug.analyze`.

    Attributes:
        source: the name of the analyzed checkpoint or model.
        recipes: the names of the recipes, in the order of the columns.
        tensors: the tensors, layer by layer in the order of the source, the weight first.
        skipped: tensors of the source, or layers of the model, that were left out.
        unavailable: installed recipes that could not be used, or only repeat another one.
        steps: the number of captured steps.
        threshold: dB below which a layer needs high precision.
    """

    source: str
    recipes: tuple[str, ...]
    tensors: tuple[TensorReport, ...]
    skipped: tuple[Skipped, ...] = ()
    unavailable: tuple[Skipped, ...] = ()
    steps: int = 0
    threshold: float = THRESHOLD

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers, in the order of their first tensors."""
        return tuple(dict.fromkeys(tensor.layer for tensor in self.tensors))

    def complaints(self, recipe: str) -> dict[str, list[str]]:
        """The layers that need high precision under a recipe -> the reasons.

        Raises:
            OptionError: the recipe is not in the report.
        """
        if recipe not in self.recipes:
            raise OptionError(
                f"recipe {recipe!r} is not in the report",
                expected=f"one of {', '.join(self.recipes)}",
            )
        reasons: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if complaint := tensor.noise[recipe].complaint(self.threshold):
                reasons.setdefault(tensor.layer, []).append(f"{tensor.role}: {complaint}")
        return reasons

    def keeps(self, recipe: str) -> list[Keep]:
        """The layers that a recipe file has to keep in high precision, in order; errors are those
        of :meth:`complaints`."""
        return [
            Keep(layer, "; ".join(reasons)) for layer, reasons in self.complaints(recipe).items()
        ]

    def summaries(self) -> list[Summary]:
        """A summary for each recipe."""
        return [self._summary(recipe) for recipe in self.recipes]

    def _summary(self, recipe: str) -> Summary:
        noises = [tensor.noise[recipe] for tensor in self.tensors]
        ratios = [noise.sqnr for noise in noises]
        return Summary(
            recipe=recipe,
            sqnr=median(ratios),
            lowest_sqnr=min(ratios),
            underflow=max(noise.underflow for noise in noises),
            saturation=_largest([noise.saturation for noise in noises]),
            kept=tuple(self.complaints(recipe)),
        )

    def best_recipe(self) -> str:
        """The recipe that leaves the fewest elements of weights in high precision.

        Among equal recipes it is the one whose worst tensor has the highest quality, then the
        first.
        """
        ranks = self._ranks()
        return min(self.recipes, key=lambda recipe: ranks[recipe])

    def _ranks(self) -> dict[str, tuple[int, float]]:
        """Recipe -> the number of weight elements in high precision, and the negative quality of
        its worst tensor."""
        weights = {tensor.layer: tensor.count for tensor in self.tensors if tensor.role == "weight"}
        # Tensors with NaN or infinite values are excluded, because no recipe can mend them.
        finite = [tensor for tensor in self.tensors if not tensor.not_finite]
        ranks = {}
        for recipe in self.recipes:
            elements = sum(weights.get(layer, 0) for layer in self.complaints(recipe))
            quality = min((tensor.noise[recipe].quality for tensor in finite), default=0.0)
            ranks[recipe] = elements, -quality
        return ranks

    def why_best(self) -> str:
        """The reason, as a sentence, why :meth:`best_recipe` is suggested among recipes that leave
        as little in high precision; empty where there are no such recipes."""
        best, ranks = self.best_recipe(), self._ranks()
        equals = [
            recipe
            for recipe in self.recipes
            if recipe != best and ranks[recipe][0] == ranks[best][0]
        ]
        alike = [recipe for recipe in equals if ranks[recipe] == ranks[best]]
        worse = [f"{recipe} {_decibels(ranks[recipe])}" for recipe in equals if recipe not in alike]
        reasons = []
        if worse:
            own = _decibels(ranks[best])
            reasons.append(f"its worst tensor keeps more, {own} (" + ", ".join(worse) + ")")
        if alike:
            reasons.append(f"it comes before {', '.join(alike)}, whose worst tensor keeps as much")
        if not reasons:
            return ""
        return (
            f"{', '.join(equals)} would leave as little: {best} is suggested because "
            f"{', and '.join(reasons)}."
        )

    def worst(self, number: int) -> list[tuple[TensorReport, str]]:
        """The tensors with the lowest quality, lowest first, each with its worst recipe."""

        def quality(tensor: TensorReport, recipe: str) -> float:
            return tensor.noise[recipe].quality

        ranked = [
            (tensor, min(self.recipes, key=lambda name: quality(tensor, name)))
            for tensor in self.tensors
        ]
        return sorted(ranked, key=lambda pair: quality(*pair))[:number]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data; numbers that are not finite become ``"inf"``, ``"-inf"`` or
        ``"nan"``."""
        best = self.best_recipe()
        kept = [{"layer": keep.layer, "reason": keep.reason} for keep in self.keeps(best)]
        suggestion = {"recipe": best, "kept": kept, "reason": self.why_best()}
        complaints = {recipe: self.complaints(recipe) for recipe in self.recipes}
        summaries = [asdict(summary) for summary in self.summaries()]
        more = {"summaries": summaries, "complaints": complaints, "suggestion": suggestion}
        return plain(asdict(self) | more)  # type: ignore[no-any-return]
