"""Searches for the operands that are to blame, by replays with some operands quantized and the
others in high precision."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import Any

from ottava_bisect.search.group_testing import TooManyError, smallest
from ottava_bisect.search.measure import MEASURES, Outcome, loss_of_operand, relative_distances
from ottava_bisect.search.operands import Comparison, Operand
from ottava_bisect.search.replay import Replay
from ottava_bisect.search.report import Finding, Report, is_clamped, reason, worst_of

#: The largest number of single culprits that are named.
MOST = 8
#: The largest number of partners, without which a culprit does no harm, that are named.
_MOST_PARTNERS = 3
#: A gradient that moves relatively by more than this, when operands are moved by a rounding, is
#: noise.
_NOISE = 0.5
#: An operand that loses more than this is broken; 8-bit formats lose half as much.
_BROKEN = 0.15
_SPREAD = (
    "what is left comes from many operands, a little from each: the recipe is too coarse "
    "for this step"
)

#: Called after each replay with the number of replays so far, and the number expected in total.
Progress = Callable[[int, int], None]
_Operands = frozenset[Operand]


class _OutOfReplaysError(Exception):
    """The allowed number of replays is used up."""


class Search:
    """Searches for the operands that move a measure of a step away from high precision.

    Args:
        replay: the replay of the step.
        measure: the name of the measure, which tells how wrong the step is.
        tolerance: the largest distance that counts as right.
        most_replays: the largest number of replays.
        progress: called after each replay.
    """

    def __init__(
        self,
        replay: Replay,
        measure: str,
        tolerance: float,
        most_replays: int,
        progress: Progress | None = None,
    ) -> None:
        self._replay: Any = replay
        self._name, self._measure = measure, MEASURES[measure]
        self._most, self._progress, self._expected = most_replays, progress, 0
        self._tolerance = tolerance
        self._distances: dict[_Operands, float] = {}
        self._values: dict[_Operands, float] = {}
        # The operands of the backward pass cannot move the loss.
        every = [o for o in replay.operands if self._measure.backward or o.gemm == "fprop"]
        statistics = replay.comparison.statistics
        # The operands that lose most are tested first.
        self._all = tuple(sorted(every, key=lambda operand: -loss_of_operand(statistics[operand])))
        self._expect(2 + _questions(len(self._all)))
        self.noisy: frozenset[str] = frozenset()
        self.reference = self._run(frozenset())
        self._finite = self._measure.distance(self.reference, self.reference, frozenset()) == 0
        if self._measure.noise and self._finite:
            # The gradients of the biases of keys in attention are noise, for example, because they
            # cancel to rounding errors.
            distances = relative_distances(self._run(frozenset(), nudged=True), self.reference)
            self.noisy = frozenset(
                name for name, distance in distances.items() if distance > _NOISE
            )
        self._note(frozenset(self._all), replay.first)

    def run(self) -> Report:
        """Search, and return the report.

        The findings are complete unless the notes say that the rest is spread over many operands,
        or that the search stopped.
        """
        every, culprits = frozenset(self._all), set[Operand]()
        report = Report(
            self._name, self._measure.words, self._tolerance, before=self._distance(every)
        )
        report.after, report.noisy = report.before, tuple(sorted(self.noisy))
        if not self._finite:
            report.notes.append(
                "the step is not finite in high precision either: quantization is not what breaks "
                "it"
            )
            return report
        try:
            while report.after > self._tolerance:
                findings = self._round(every - culprits, report.after)
                if not findings:
                    report.notes.append(_SPREAD)
                    break
                culprits |= {operand for finding in findings for operand in finding.operands}
                report.findings += findings
                report.after = self._distance(every - culprits)
            report.findings = self._explain(report.findings, self._look(every - culprits))
        except _OutOfReplaysError:
            report.notes.append(
                f"stopped after {self._replay.replays} replays: more may be to blame"
            )
            if report.findings:
                report.notes.append("the reasons are of the step with nothing in high precision")
                report.findings = self._explain(report.findings, self._replay.comparison)
        report.value, report.reference = self._values[every], self._values[frozenset()]
        report.kept = self._values.get(every - culprits, math.nan)
        return report

    # -- the reasons --

    def _look(
        self, quantized: _Operands, shrunk: Mapping[Operand, float] = MappingProxyType({})
    ) -> Comparison:
        """The loss that operands in high precision would have by quantization, while ``quantized``
        are quantized."""
        comparison = Comparison()
        if len(quantized) < len(self._all):
            self._run(quantized, look=comparison, shrunk=shrunk)
        return comparison

    def _explain(self, findings: list[Finding], comparison: Comparison) -> list[Finding]:
        """The findings with their reasons.

        The result of a product with a weight that has outgrown its scale is likely to outgrow its
        own scale. Such a consequence is recognized by a replay in which the weight is made small
        enough: the other operand is then within its range.
        """
        clamped = [
            operand
            for finding in findings
            for operand in finding.operands
            if operand in comparison.stateful and is_clamped(operand, comparison)
        ]
        factors = {
            operand: comparison.largest[operand] / comparison.statistics[operand].amax
            for operand in clamped
            if operand.tensor == "weight"
        }
        after = Comparison()
        if factors and len(clamped) > len(factors) and self._replay.replays < self._most:
            blamed = {operand for finding in findings for operand in finding.operands}
            after = self._look(frozenset(self._all) - blamed, factors)
        weights = tuple(dict.fromkeys(f"{operand.layer}: weight" for operand in factors))
        consequences = {
            operand
            for operand in clamped
            if operand not in factors
            and operand in after.statistics
            and not is_clamped(operand, after)
        }
        explained: list[Finding] = []
        for finding in findings:
            worst = worst_of(finding.operands, comparison)
            text = reason(finding.operands, comparison, finding.partners)
            follows: tuple[str, ...] = ()
            if worst in consequences:
                follows = weights
                text += (
                    f"; a consequence of {', '.join(follows)}: within its range, nothing is "
                    f"clamped here"
                )
            statistics = comparison.statistics[worst]
            explained.append(replace(finding, reason=text, statistics=statistics, follows=follows))
        return explained

    # -- the culprits --

    def _round(self, rest: _Operands, wrong: float) -> list[Finding]:
        """The fewest operands of ``rest`` that bring the distance down from ``wrong``.

        The goal is the geometric mean of the tolerance and ``wrong``, or half of ``wrong``. The
        list is empty where that takes many operands that do little each.
        """
        halves = {
            min(max(self._tolerance, math.sqrt(self._tolerance * wrong)), wrong / 2),
            wrong / 2,
        }
        for threshold in sorted(halves) if math.isfinite(wrong) else [sys.float_info.max]:
            try:
                culprits = self._culprits(rest, threshold)
            except TooManyError:
                continue
            # A culprit that does no harm alone may only compensate the noise of all others. If it
            # is a real culprit, a later round finds it.
            alone = [
                culprit for culprit in culprits if self._distance(frozenset(culprit)) > threshold
            ]
            if alone:
                return [self._finding(culprit) for culprit in alone]
            for culprit in culprits:
                if partners := self._partners(culprit, rest, threshold):
                    return [self._finding(culprit, partners)]
        return []

    def _culprits(self, rest: _Operands, threshold: float) -> list[list[Operand]]:
        """The culprits: first the kinds of operands that are to blame, then their layers.

        Where the layers are many, a culprit is all operands of a kind.
        """

        def is_right_without(operands: Iterable[Operand]) -> bool:
            return self._distance(rest - {*operands}) <= threshold

        kinds: dict[tuple[str, str], list[Operand]] = {}
        for operand in self._all:
            if operand in rest:
                kinds.setdefault((operand.gemm, operand.tensor), []).append(operand)
        self._expect(_questions(len(kinds)) + _questions(len(rest)))
        blamed = smallest(
            list(kinds.values()), lambda some: is_right_without(o for kind in some for o in kind)
        )
        suspects = [operand for operand in self._all if any(operand in kind for kind in blamed)]
        self._expect(_questions(len(suspects)))
        try:
            return [[operand] for operand in smallest(suspects, is_right_without, MOST)]
        except TooManyError:
            # A kind is not to blame if most of its operands lose little.
            statistics = self._replay.comparison.statistics
            if not all(
                median(loss_of_operand(statistics[o]) for o in kind) > _BROKEN for kind in blamed
            ):
                raise
            return [
                [operand for operand in self._replay.operands if operand in kind] for kind in blamed
            ]

    def _partners(self, culprit: list[Operand], rest: _Operands, threshold: float) -> list[Operand]:
        """The few other operands together with which a culprit does harm, although it does none
        alone; empty where these are many."""
        own = frozenset(culprit)
        others = [operand for operand in self._all if operand in rest - own]
        try:
            return smallest(
                others, lambda some: self._distance(own | {*some}) > threshold, _MOST_PARTNERS
            )
        except TooManyError:
            return []

    def _finding(self, culprit: list[Operand], partners: Sequence[Operand] = ()) -> Finding:
        own, (_, gemm, tensor) = frozenset(culprit), culprit[0]
        alone, without = self._distance(own), self._distance(frozenset(self._all) - own)
        layers = tuple(operand.layer for operand in culprit)
        return Finding(layers, gemm, tensor, "", alone, without, tuple(map(str, partners)))

    # -- replays --

    def _distance(self, quantized: _Operands) -> float:
        """The distance with these operands quantized, and the others in high precision."""
        if quantized not in self._distances:
            self._run(quantized)
        return self._distances[quantized]

    def _run(self, quantized: _Operands, nudged: bool = False, **options: Any) -> Outcome:
        if self._replay.replays >= self._most:
            raise _OutOfReplaysError
        backward = self._measure.backward
        outcome: Outcome = self._replay.run(quantized, backward=backward, nudged=nudged, **options)
        self._expected = max(self._expected, self._replay.replays)
        if self._progress is not None:
            self._progress(self._replay.replays, self._expected)
        if not nudged and not options:
            self._note(quantized, outcome)
        return outcome

    def _note(self, quantized: _Operands, outcome: Outcome) -> None:
        reference = self.reference if quantized else outcome
        self._distances[quantized] = self._measure.distance(outcome, reference, self.noisy)
        self._values[quantized] = self._measure.value(outcome, reference, self.noisy)

    def _expect(self, more: int) -> None:
        self._expected = self._replay.replays + more


def _questions(number: int) -> int:
    """About how many questions find one of ``number``."""
    return 2 + 2 * math.ceil(math.log2(max(1, number)))
