"""``QuantizerRole``: what a quantizer is for."""

from dataclasses import dataclass
from typing import Self

from ottava.errors import DTypeError

#: The tensors for which a linear layer asks for quantizers.
OF_LINEAR = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class QuantizerRole:
    """What a quantizer is asked for.

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
        """A role as it is; a plain string is taken as ``tensor_type``, and all else is a DTypeError."""
        if isinstance(role, str):
            return cls(tensor_type=role)
        if not isinstance(role, QuantizerRole):
            raise DTypeError(f"the role is a {type(role).__name__}", expected="a QuantizerRole or a tensor type")
        return role

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor flows in the backward pass."""
        return self.tensor_type in ("grad_output", "grad_input")
