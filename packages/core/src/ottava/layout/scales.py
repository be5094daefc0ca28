"""Formats of scales, and the rules from an amax to a scale."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ottava.errors import DTypeError, OptionError
from ottava.formats import E4M3, E8M0, UE5M3, FloatFormat


class ScaleFormat(NamedTuple):
    """A format of scales.

    Attributes:
        number: the format of its numbers; None for float32.
        stored: the dtype of stored scales.
        native: the dtype of torch with the same bytes; None where stored scales have it already, or
            torch has none.
        rules: the words for how an amax becomes a scale.
    """

    number: FloatFormat | None
    stored: torch.dtype
    native: torch.dtype | None
    rules: tuple[str, ...]


#: The formats of scales, by their dtype or name.
SCALES: dict[torch.dtype | str, ScaleFormat] = {
    torch.float32: ScaleFormat(None, torch.float32, None, ("nearest", "floor")),
    torch.float8_e8m0fnu: ScaleFormat(
        E8M0, torch.uint8, torch.float8_e8m0fnu, ("up", "floor", "even", "nearest")
    ),
    torch.float8_e4m3fn: ScaleFormat(E4M3, torch.uint8, torch.float8_e4m3fn, ("nearest",)),
    "UE5M3": ScaleFormat(UE5M3, torch.uint8, None, ("nearest",)),
}
#: A rule of one's own: from the amaxes of blocks (float32; times the scale of the second level, if
#: there is one) and the layout to the scales that are stored, of the same shape.
# Any, because the module of Layout imports this one.
ScaleRule = Callable[[torch.Tensor, Any], torch.Tensor]
#: The rules that were registered, by name.
OWN_RULES: dict[str, ScaleRule] = {}


def register_scale_rule(name: str, rule: ScaleRule) -> None:
    """Let layouts have a rule of one's own for scales, as ``rounding=name``.

    A process that reads files with such layouts registers the rule first.

    Args:
        name: letters, digits, dots, hyphens and underscores, beginning with a letter.
        rule: see :data:`ScaleRule`. Equal amaxes must give equal scales.

    Raises:
        OptionError: the name is not of this form, or is taken by another rule.
        DTypeError: ``rule`` is no function.
    """
    known = {word for scale in SCALES.values() for word in scale.rules}
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise OptionError(
            f"a rule for scales named {name!r}",
            expected="letters, digits, dots, hyphens and underscores, beginning with a letter",
        )
    if name in known or OWN_RULES.get(name, rule) is not rule:
        raise OptionError(f"the name {name!r} of a rule is taken", expected="another name")
    if not callable(rule):
        raise DTypeError(f"the rule {name!r} is a {type(rule).__name__}", expected="a function")
    OWN_RULES[name] = rule
