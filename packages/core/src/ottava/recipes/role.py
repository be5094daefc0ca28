"""``QuantizerRole``: the tensor that a quantizer is for; and descriptions of what serves it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ottava.errors import DTypeError, OptionError

if TYPE_CHECKING:
    import torch

#: The tensors for which a linear layer asks for quantizers.
OF_LINEAR = ("input", "weight", "grad_output")


def check_of_linear(tensor_types: Iterable[str]) -> None:
    """Refuse tensors for which a linear layer asks for no quantizer.

    Raises:
        OptionError: one is none of :data:`OF_LINEAR`.
    """
    for tensor_type in tensor_types:
        if tensor_type not in OF_LINEAR:
            expected = f"one of {', '.join(OF_LINEAR)}"
            raise OptionError(f"the role is {tensor_type!r}", expected=expected)


@dataclass(frozen=True)
class QuantizerRole:
    """What a quantizer is for.

    Attributes:
        module_type: kind of module, for example ``"linear"``.
        tensor_type: ``"input"``, ``"weight"``, ``"output"``, ``"grad_output"`` or ``"grad_input"``.
        name: qualified name of the module.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    @classmethod
    def of(cls, role: Self | str) -> Self:
        """A role as it is; a plain string is taken as ``tensor_type``, and all else is a
        DTypeError."""
        if isinstance(role, str):
            return cls(tensor_type=role)
        if not isinstance(role, QuantizerRole):
            raise DTypeError(
                f"the role is a {type(role).__name__}", expected="a QuantizerRole or a tensor type"
            )
        return role

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor flows in the backward pass."""
        return self.tensor_type in ("grad_output", "grad_input")


@dataclass(frozen=True)
class RecipeRule:
    """One rule of a recipe that has rules, such as one that was read from a file.

    Attributes:
        text: the pattern, for listings.
        place: where it begins, in words: ``"line 4"``, or the path of its key, ``"layers[0]"``.
    """

    text: str
    place: str = ""


@dataclass(frozen=True)
class Explanation:
    """A description of what serves one role of one layer.

    Attributes:
        rowwise: the data that products read along rows, in words: ``"current E4M3"``.
        columnwise: the same along columns.
        rule: the rule that it belongs to; None for a default, and for recipes without rules.
        place: the place in the recipe's file in words: ``"line 4"``, or the path of a key,
            ``"layers[0].all"``.
    """

    rowwise: str
    columnwise: str
    rule: RecipeRule | None = None
    place: str = ""


def words(quantizer: object, name: str = "") -> str:
    """A quantizer in words: ``name``, or the name of its class, and its element format if it has
    one."""
    from ottava.formats import ELEMENTS

    text = name or type(quantizer).__name__
    dtype: torch.dtype | None = getattr(quantizer, "fp8_dtype", None)
    if dtype is None:
        dtype = getattr(quantizer, "dtype", None)
    if dtype is None or dtype not in ELEMENTS:
        return text
    return f"{text} {ELEMENTS[dtype].name}"
