"""Which steps of training compute in high precision, as a recipe says."""

from typing import Any, NamedTuple

from ottava.errors import OptionError


class Schedule(NamedTuple):
    """The steps of training that compute in high precision. They are counted from 1.

    Attributes:
        until: the first ones, up to this one; 0 for none.
        after: those after this one; None for none.
    """

    until: int = 0
    after: int | None = None

    def in_high_precision(self, step: int) -> bool:
        """Whether a step computes in high precision."""
        return step <= self.until or (self.after is not None and step > self.after)


# Any, because the module of Recipe imports this one.
def schedule_of(recipe: Any) -> Schedule | None:
    """The schedule of a recipe; None if no step computes in high precision.

    Raises:
        OptionError: a number is no integer >= 0, or no step would be quantized.
    """
    until = recipe.high_precision_until_step
    after = recipe.high_precision_after_step
    if not _is_count(until):
        raise OptionError(f"high_precision_until_step is {until!r}", expected="an integer >= 0")
    if after is not None and not _is_count(after):
        raise OptionError(
            f"high_precision_after_step is {after!r}", expected="an integer >= 0, or None"
        )
    if after is not None and after <= until:
        raise OptionError(
            f"high_precision_until_step={until} and high_precision_after_step={after} leave no "
            f"step to quantize",
            expected="a last step after the first ones",
            remedy="leave out the recipe where all steps are to compute in high precision",
        )
    if not until and after is None:
        return None
    return Schedule(until, after)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
