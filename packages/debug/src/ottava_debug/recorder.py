"""Records what the products of a model's layers take: operands in high precision, and digests of
what they become."""

from typing import Any

import torch

from ottava.tensors import QuantizedTensorStorage
from ottava_debug.bundle import digest
from ottava_debug.measures import direction_of
from ottava_debug.products import BY_COLUMN, OPERANDS, Inspection


def taken(quantized: QuantizedTensorStorage, gemm: str, tensor: str) -> torch.Tensor:
    """The values, in float32, that a product takes of a quantized operand: of its direction."""
    return direction_of(quantized, (gemm, tensor) in BY_COLUMN).dequantize(torch.float32)


class Pass:
    """One forward pass of a layer and its backward pass, as it was seen."""

    def __init__(self, name: str, layer: Any, number: int) -> None:
        self.name, self.layer, self.number = name, layer, number
        self.recipe: Any = None
        self.seen: set[str] = set()
        self.values: dict[str, torch.Tensor] = {}
        self.digests: dict[str, str] = {}


class Recorder:
    """Follows the passes of a model's layers. Where activations are recomputed, the backward pass
    runs for the second forward pass; what it gives belongs to the last one of the layer that has
    had none."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self.passes: list[Pass] = []

    def __call__(self, layer: Any) -> Inspection | None:
        name = self._names.get(id(layer))
        return None if name is None else self.inspection(name, layer)

    def inspection(self, name: str, layer: Any) -> "Recording":
        """What looks at one forward pass, or at one that is recomputed, and its backward pass."""
        return Recording(self, name, layer)

    def find(self, name: str, layer: Any, recomputed: bool) -> Pass:
        """The pass that begins, or that is recomputed."""
        if recomputed:
            return next(
                p for p in reversed(self.passes) if p.name == name and "gradient" not in p.seen
            )
        self.passes.append(Pass(name, layer, sum(p.name == name for p in self.passes)))
        return self.passes[-1]


class Recording(Inspection):
    """Keeps copies of the operands on the CPU."""

    def __init__(self, recorder: Recorder, name: str, layer: Any) -> None:
        self._of = recorder, name, layer
        self._pass: Pass | None = None

    @property
    def record(self) -> Pass:
        """The pass that this looks at."""
        return self._pass or self._begin()

    def _begin(self) -> Pass:
        if self._pass is None:
            recorder, name, layer = self._of
            self._pass = recorder.find(name, layer, self.call.recomputed)
            self._pass.recipe = self.call.recipe
        return self._pass

    def quantizes(self, gemm: str, tensor: str) -> bool:
        # So that a layer is known whose quantizer raises before anything can be looked at. Which
        # pass is recomputed, only its backward pass tells.
        if not self.call.recomputed:
            self._begin()
        return True

    def observe(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        if (gemm, tensor) in OPERANDS:
            self.note(gemm, tensor, values, quantized)
            self.record.seen.add(tensor)

    def note(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        """Called with each operand."""
        record = self.record
        if tensor not in record.seen and not self._is_parameter(tensor, values):
            record.values[tensor] = values.detach().to("cpu", copy=True)
        if quantized is not None:
            record.digests[f"{gemm}.{tensor}"] = digest(taken(quantized, gemm, tensor))

    def _is_parameter(self, tensor: str, values: torch.Tensor) -> bool:
        """Whether this is the layer's parameter, which the state has already."""
        layer = self.record.layer
        own = layer._parameters.get("weight")
        if tensor != "weight" or own is None or layer.weight_is_transposed:
            return False
        return isinstance(own, QuantizedTensorStorage) or own.data_ptr() == values.data_ptr()
