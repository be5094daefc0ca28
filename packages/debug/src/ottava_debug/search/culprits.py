"""Which operands are to blame: by replays with some of them quantized and the others in high precision."""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ottava_debug.search.group_testing import TooManyError, smallest
from ottava_debug.search.measure import Measure, Outcome, loss_of_operand, relative_distances
from ottava_debug.search.operands import Operand
from ottava_debug.search.replay import Replay

#: More single culprits than this are no longer told apart.
MOST = 8
#: More others than this without which a culprit does no harm are not named.
_MOST_PARTNERS = 3
#: A gradient that moves as far as this, relatively, when operands are moved by a rounding, is noise.
_NOISE = 0.5

Progress = Callable[[int, int], None]


class OutOfReplaysError(Exception):
    """The replays that were allowed are used up."""


@dataclass
class Culprit:
    """What is to blame.

    Attributes:
        operands: one operand of one layer; or the same operand of the same product in many layers.
        alone: the distance with nothing else quantized.
        without: the distance with everything else quantized.
        partners: the operands without which it does no harm.
    """

    operands: tuple[Operand, ...]
    alone: float = math.nan
    without: float = math.nan
    partners: tuple[Operand, ...] = ()


@dataclass
class Culprits:
    """What a search gives.

    Attributes:
        found: in the order in which they were found, the heaviest first.
        before, after: the distance of the step, and with all that was found in high precision.
        values: what the measure shows of the step, of the step in high precision, and with what was found kept.
        spread: whether what is left comes from more operands than can be told apart.
        stopped: whether the replays were used up.
        noisy: parameters whose gradients are noise already in high precision, and do not count.
    """

    found: list[Culprit] = field(default_factory=list)
    before: float = 0.0
    after: float = 0.0
    values: tuple[float, float, float] = (0.0, 0.0, 0.0)
    spread: bool = False
    stopped: bool = False
    noisy: frozenset[str] = frozenset()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All operands that were found."""
        return tuple(operand for culprit in self.found for operand in culprit.operands)


class Search:
    """Searches a replay for what moves a measure away from high precision.

    Args:
        replay: the step.
        measure: what tells how wrong it is.
        tolerance: the distance that is right.
        most_replays: stop after so many.
        progress: called after each replay with how many there were, and how many there are likely to be.
    """

    def __init__(
        self, replay: Replay, measure: Measure, tolerance: float, most_replays: int, progress: Progress | None = None
    ) -> None:
        self._replay, self._measure, self.tolerance = replay, measure, tolerance
        self._most, self._progress, self._expected = most_replays, progress, 0
        self._known: dict[frozenset[Operand], float] = {}
        self._outcomes: dict[frozenset[Operand], float] = {}
        # Nothing of the backward pass moves the loss.
        every = replay.operands if measure.backward else [o for o in replay.operands if o.gemm == "fprop"]
        statistics = replay.comparison.statistics
        # What loses most is asked about first.
        self._all: tuple[Operand, ...] = tuple(sorted(every, key=lambda o: -loss_of_operand(statistics[o])))
        self._expect(3 + _questions(len(self._all)))
        self._reference = self._run(frozenset())
        self._noisy = self._noise() if measure.backward else frozenset()

    def run(self) -> Culprits:
        """Search; what was found is complete unless it says that it stopped, or that the rest is spread."""
        made, every = Culprits(noisy=self._noisy), frozenset(self._all)
        made.before = made.after = self.distance(every)
        rest, threshold = every, math.inf
        try:
            while made.after > self.tolerance and not made.spread:
                culprits, threshold = self._round(rest, made.after)
                made.spread = not culprits
                made.found += culprits
                rest = every - {*made.operands}
                made.after = self.distance(rest)
                for culprit in culprits:
                    self._examine(culprit, every, min(threshold, made.before / 2))
        except OutOfReplaysError:
            made.stopped = True
        value = self._outcomes
        made.values = (value[every], value[frozenset()], value.get(every - {*made.operands}, math.nan))
        return made

    def distance(self, quantized: frozenset[Operand]) -> float:
        """The distance with these operands quantized, and the others in high precision."""
        if quantized not in self._known:
            self._run(quantized)
        return self._known[quantized]

    # -- the search --

    def _round(self, rest: frozenset[Operand], wrong: float) -> tuple[list[Culprit], float]:
        """The fewest operands of ``rest`` that bring the distance down from ``wrong``, and what down means: half of the
        way to the tolerance as ratios go, or to half; none where that takes too many."""
        halves = {min(max(self.tolerance, math.sqrt(self.tolerance * wrong)), wrong / 2), wrong / 2}
        for threshold in sorted(halves) if math.isfinite(wrong) else [sys.float_info.max]:
            try:
                return self._culprits(rest, threshold), threshold
            except TooManyError:
                continue
        return [], math.inf

    def _culprits(self, rest: frozenset[Operand], threshold: float) -> list[Culprit]:
        """First the kinds of operands that are to blame, then the layers."""

        def fixed(kept: Iterable[Operand]) -> bool:
            return self.distance(rest - {*kept}) <= threshold

        kinds: dict[tuple[str, str], list[Operand]] = {}
        for operand in self._all:
            if operand in rest:
                kinds.setdefault((operand.gemm, operand.tensor), []).append(operand)
        self._expect(_questions(len(kinds)) + _questions(len(rest)))
        blamed = smallest(list(kinds.values()), lambda some: fixed(o for kind in some for o in kind))
        suspects = [operand for operand in self._all if any(operand in kind for kind in blamed)]
        self._expect(_questions(len(suspects)))
        try:
            found = smallest(suspects, fixed, MOST)
        except TooManyError:
            if len(blamed) > 2:
                raise
            return [Culprit(tuple(kind)) for kind in blamed]
        return [Culprit((operand,)) for operand in found]

    def _examine(self, culprit: Culprit, every: frozenset[Operand], threshold: float) -> None:
        """What it does by itself, and if that is nothing, together with which others."""
        own = frozenset(culprit.operands)
        culprit.alone, culprit.without = self.distance(own), self.distance(every - own)
        if culprit.alone > threshold:
            return
        others = [operand for operand in self._all if operand not in own]
        try:
            partners = smallest(others, lambda some: self.distance(own | {*some}) > threshold, _MOST_PARTNERS)
            culprit.partners = tuple(partners)
        except TooManyError:
            pass

    # -- replays --

    def _run(self, quantized: frozenset[Operand], nudged: bool = False) -> Outcome:
        if self._replay.replays >= self._most:
            raise OutOfReplaysError
        outcome = self._replay.run(quantized, backward=self._measure.backward, nudged=nudged)
        self._expected = max(self._expected, self._replay.replays)
        if self._progress is not None:
            self._progress(self._replay.replays, self._expected)
        if not nudged:
            reference = outcome if not quantized else self._reference
            noisy = frozenset[str]() if not quantized else self._noisy
            self._known[quantized] = self._measure.distance(outcome, reference, noisy)
            self._outcomes[quantized] = self._measure.value(outcome, reference, noisy)
        return outcome

    def _noise(self) -> frozenset[str]:
        """Parameters whose gradients cancel to rounding errors, as those of the biases of keys in attention."""
        nudged = self._run(frozenset(), nudged=True)
        distances = relative_distances(nudged, self._reference)
        return frozenset(name for name, distance in distances.items() if distance > _NOISE)

    def _expect(self, more: int) -> None:
        self._expected = self._replay.replays + more


def _questions(number: int) -> int:
    """About how many questions find one of ``number``."""
    return 2 + 2 * math.ceil(math.log2(max(1, number)))
