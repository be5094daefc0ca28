"""The contract of a quantizer: every choice between values and bytes, as data.

A contract is a frozen value of plain words and numbers. It is printed as JSON, it has a hash that
can be cited, and two contracts can be compared field by field. Whoever implements what the fields
say makes the same bytes; :func:`schema` says what each word means. Quantizing is:

1. Values are float32 (:class:`Source`).
2. Groups along the summed dimension are transformed (:class:`Transform`).
3. Each block has an amax (:class:`Amax`).
4. The tensor, or each row, has a scale (:class:`SecondLevel`).
5. Each block has a scale (:class:`Scale`), the best of several (:class:`Candidates`).
6. Each value times its multiplier is rounded to an element (:class:`Element`), at random
   (:class:`Random`).
7. Elements and scales are stored (:class:`Storage`).

Each step is computed in float32, correctly rounded, and in the order in which its formula is
written. :class:`Interpretation` does that with a matrix, without the kernels of Ottava.
"""

from ottava.contract.choices import (
    RULES,
    UNSTATED,
    VERSION,
    Amax,
    Candidates,
    Choices,
    Direction,
    Element,
    Random,
    Scale,
    SecondLevel,
    Source,
    Storage,
    Transform,
)
from ottava.contract.contract import NOTHING_STATED, Contract, schema
from ottava.contract.interpretation import Interpretation

__all__ = [
    "NOTHING_STATED",
    "RULES",
    "UNSTATED",
    "VERSION",
    "Amax",
    "Candidates",
    "Choices",
    "Contract",
    "Direction",
    "Element",
    "Interpretation",
    "Random",
    "Scale",
    "SecondLevel",
    "Source",
    "Storage",
    "Transform",
    "schema",
]
