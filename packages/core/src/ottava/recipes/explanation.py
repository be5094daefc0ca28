"""What serves a role, in words: for people who ask which layer gets what."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ottava.tensors.quantizer import Quantizer


@dataclass(frozen=True)
class RecipeRule:
    """One rule of a recipe that has rules, such as one that was read from a file.

    Attributes:
        text: what it matches, for listings.
        line: where it begins, from 1; None where the language of the file tells no lines.
        place: the same in words: ``"line 4"``, or the path of its key, ``"layers[0]"``.
    """

    text: str
    line: int | None = None
    place: str = ""


@dataclass(frozen=True)
class Explanation:
    """What serves one role of one layer.

    Attributes:
        rowwise: what is read along rows, in words: ``"current E4M3"``.
        columnwise: the same along columns.
        line: the line of the recipe's file that says so; None without a file, and where its language tells no lines.
        rule: the rule that it belongs to; None for a default, and for recipes without rules.
        place: the place in the recipe's file in words: ``"line 4"``, or the path of a key, ``"layers[0].all"``.
    """

    rowwise: str
    columnwise: str
    line: int | None = None
    rule: RecipeRule | None = None
    place: str = ""


def words(quantizer: "Quantizer", name: str = "") -> str:
    """A quantizer in words: ``name``, or that of its class, and its element format if it has one."""
    import torch

    from ottava.formats import ELEMENTS

    text = name or type(quantizer).__name__
    for dtype in (getattr(quantizer, attribute, None) for attribute in ("fp8_dtype", "dtype")):
        if isinstance(dtype, torch.dtype):
            return f"{text} {ELEMENTS[dtype].name if dtype in ELEMENTS else str(dtype).removeprefix('torch.')}"
    return text
