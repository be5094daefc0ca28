"""What a quantizer stored of one usage, under names that all quantizers share."""

import torch

from ottava.errors import UsageError
from ottava.gemm import Operand, side_of
from ottava.tensors import QuantizedTensorStorage
from ottava_verify.steps import Usage

#: The parts of a usage, in order.
PARTS = ("data", "scales", "amax")


def stored_tensors(
    result: torch.Tensor | QuantizedTensorStorage | Operand, usage: Usage
) -> dict[str, torch.Tensor]:
    """The tensors of a usage by the names of :data:`PARTS`.

    ``data`` are uint8; ``scales`` are float32 or codes in uint8; ``amax`` are those of the second
    level, as a vector.

    Raises:
        UsageError: the usage is not held, or its elements and scales are on no grid.
    """
    side = side_of(result, usage == "columnwise")
    if side is None:
        raise UsageError(
            f"a {type(result).__name__} says nothing of its {usage} data",
            expected="a quantized tensor of elements and scales on a grid",
        )
    parts = {"data": side.values}
    if side.scales is not None:
        parts["scales"] = side.scales
    if side.amax is not None:
        parts["amax"] = side.amax.reshape(-1)
    return {name: part.detach() for name, part in parts.items()}
