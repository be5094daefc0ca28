"""Checks of stochastic rounding: its seeds, and its mean."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from ottava.tensors import Quantizer
from ottava_testing import table
from ottava_testing.checks.training import train
from ottava_testing.compare import difference, plain, require, require_same, wide
from ottava_testing.subject import ROLES, Subject
from ottava_testing.table import STOCHASTIC

check = partial(table.check, "stochastic")
_SAMPLES = 48
# Of samples that have the mean that they should, one in 10^6 is farther off.
_STANDARD_ERRORS = 5.0
# A scale that is rounded to nearest may be too small for the amax, which then saturates. With three
# bits of mantissa or more, it is not for one of these sizes.
_SIZES = 1.0, 1.03, 1.06, 1.09
_HINT = "ottava.kernels.draw_seed() draws seeds that do"


def _random_quantizers(subject: Subject) -> Iterator[tuple[str, Quantizer]]:
    """Yields a title and a quantizer for each role and usage that is rounded at random."""
    values = wide(48, 40)
    for role in ROLES:
        for rowwise in (True, False):
            quantizer = subject.quantizer(role, rowwise=rowwise, columnwise=not rowwise)
            if difference(quantizer(values), quantizer(values)) is not None:
                usage = "rowwise" if rowwise else "columnwise"
                yield f"the {usage} data of {role!r}", quantizer


@check(STOCHASTIC)
def stochastic_seeds(subject: Subject) -> None:
    """Random rounding follows torch's generator: equal states of it give equal bytes, and
    activation checkpointing changes no bit of any gradient.
    """
    quantizers = list(_random_quantizers(subject))
    require(quantizers, "the spec says stochastic=True, and nothing is rounded at random")
    for title, quantizer in quantizers:
        torch.manual_seed(1)
        first, second = quantizer(wide(48, 40)), quantizer(wide(48, 40))
        words = f"{title}: two quantizations in a row have the same errors: no seed is drawn"
        require(difference(first, second) is not None, words)
        torch.manual_seed(1)
        words = f"{title}: torch.manual_seed does not repeat the bytes ({_HINT}): there is"
        require_same(words, quantizer(wide(48, 40)), first)
        torch.manual_seed(2)
        words = f"{title}: another seed of torch's generator gives the same bytes ({_HINT})"
        require(difference(quantizer(wide(48, 40)), first) is not None, words)
    torch.manual_seed(3)
    expected = train(subject.model(), 2)
    for reentrant in (False, True):
        model = subject.model()
        torch.manual_seed(3)
        results = train(model, 2, run=partial(checkpoint, model, use_reentrant=reentrant))
        title = f"training with activation checkpointing (use_reentrant={reentrant}) and one seed"
        require_same(f"{title} gives", results, expected)


def _pairs(size: float, rows: int = 384) -> torch.Tensor:
    """``[rows, 16]`` with two values in each row, whose magnitudes sum to ``size``.

    Whatever group has a scale, or is rotated, it has the same amax: a rotation leaves magnitudes
    that are their sum and their difference, up to one factor for all.
    """
    random = torch.Generator().manual_seed(7)
    places = torch.rand(rows, 16, generator=random).argsort(1)[:, :2]
    half = 0.2 * torch.rand(rows, 1, generator=random)
    magnitudes = torch.cat([0.5 + half, 0.5 - half], 1)
    signs = torch.randint(2, (rows, 2), generator=random) * 2.0 - 1.0
    return torch.zeros(rows, 16).scatter_(1, places, size * magnitudes * signs)


@check(STOCHASTIC)
def stochastic_mean(subject: Subject) -> None:
    """The mean of values that are rounded at random many times is within five standard errors of
    the value, where no element saturates.
    """
    for title, quantizer in _random_quantizers(subject):
        first, *others = (partial(_off_centre, quantizer, _pairs(size)) for size in _SIZES)
        if message := first():
            require(not all(other() for other in others), f"{title}: {message}")


def _off_centre(quantizer: Quantizer, pairs: torch.Tensor) -> str:
    """How far the mean of values is off; empty if it is not."""
    values = pairs if quantizer.rowwise_usage else pairs.t().contiguous()
    samples = torch.stack([plain(quantizer(values)).double() for _ in range(_SAMPLES)])
    # A value that has one neighbour alone, such as 0, is not rounded.
    is_rounded = samples.amin(0) < samples.amax(0)
    if not is_rounded.any():
        return "nothing of a matrix is rounded at random"
    errors = (samples - values)[:, is_rounded]
    for name, weights in (("the magnitude", values[is_rounded]), ("the sum", 1.0)):
        sums = (errors * weights).sum(1)
        # Independent numbers with the mean 0.
        mean, error = float(sums.mean()), float(sums.std()) / len(sums) ** 0.5
        # Sums of values have rounding errors of float32 as well.
        bound = _STANDARD_ERRORS * error + 1e-5
        if abs(mean) > bound:
            return f"{name} is off by {mean:.3g} in the mean, where {bound:.3g} is allowed"
    return ""
