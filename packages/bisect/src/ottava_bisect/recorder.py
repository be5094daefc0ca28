"""Records the operands of a model's products: high-precision values, and digests of their quantized
values."""

from typing import Any

import torch

from ottava.tensors import QuantizedTensorStorage
from ottava_bisect.bundle import digest
from ottava_debug.measures import direction_of
from ottava_debug.operands import BY_COLUMN, OPERANDS
from ottava_debug.products import Inspection


def values_of(quantized: QuantizedTensorStorage, gemm: str, tensor: str) -> torch.Tensor:
    """The float32 values of a quantized operand, in the direction that product ``gemm`` reads."""
    return direction_of(quantized, (gemm, tensor) in BY_COLUMN).dequantize(torch.float32)


class Pass:
    """One recorded forward pass of a layer and its backward pass."""

    def __init__(self, name: str, layer: Any, number: int) -> None:
        self.name = name
        self.layer = layer
        self.number = number
        self.recipe: Any = None
        self.seen: set[str] = set()
        self.values: dict[str, torch.Tensor] = {}
        self.digests: dict[str, str] = {}


class Recorder:
    """Follows the passes of a model's layers.

    Where activations are recomputed, the backward pass belongs to the second forward pass. The
    gradients that it records are then assigned to the last pass of the layer that has none yet.

    Attributes:
        passes: the recorded passes, in the order of the forward pass.
        begins_recomputed: whether passes that are recomputed now were not recorded before. So it is
            with a reentrant checkpoint around the model, whose first call has no gradients.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self.passes: list[Pass] = []
        self.begins_recomputed = False

    def __call__(self, layer: Any) -> Inspection | None:
        name = self._names.get(id(layer))
        return None if name is None else self.inspection(name, layer)

    def inspection(self, name: str, layer: Any) -> "Recording":
        """The inspection of one forward pass, recomputed or not, and its backward pass."""
        return Recording(self, name, layer)

    def find(self, name: str, layer: Any, recomputed: bool) -> Pass:
        """The pass that begins, or that is recomputed."""
        if recomputed:
            for each in reversed(self.passes):
                if each.name == name and "gradient" not in each.seen:
                    return each
        self.passes.append(Pass(name, layer, sum(p.name == name for p in self.passes)))
        return self.passes[-1]


class Recording(Inspection):
    """Keeps copies of the operands on the CPU."""

    def __init__(self, recorder: Recorder, name: str, layer: Any) -> None:
        self._recorder = recorder
        self._name = name
        self._layer = layer
        self._pass: Pass | None = None
        self._is_new = recorder.begins_recomputed

    @property
    def record(self) -> Pass:
        """The record of this pass."""
        return self._pass or self._begin()

    def _begin(self) -> Pass:
        if self._pass is None:
            recomputed = self.call.recomputed and not self._is_new
            self._pass = self._recorder.find(self._name, self._layer, recomputed)
            self._pass.recipe = self.call.recipe
        return self._pass

    def quantizes(self, gemm: str, tensor: str) -> bool:
        # The record begins here, so that it exists even if the layer's quantizer raises before any
        # operand is observed. Which recorded pass is recomputed, only the backward pass tells.
        if self._is_new or not self.call.recomputed:
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
        """Record an operand's values, unless they are the parameter, and its digest."""
        record = self.record
        if tensor not in record.seen and not self._is_parameter(tensor, values):
            record.values[tensor] = values.detach().to("cpu", copy=True)
        if quantized is not None:
            record.digests[f"{gemm}.{tensor}"] = digest(values_of(quantized, gemm, tensor))

    def _is_parameter(self, tensor: str, values: torch.Tensor) -> bool:
        """Whether ``values`` are the layer's parameter, which the model's state contains."""
        layer = self.record.layer
        own = layer._parameters.get("weight")
        if tensor != "weight" or own is None or layer.weight_is_transposed:
            return False
        return isinstance(own, QuantizedTensorStorage) or own.data_ptr() == values.data_ptr()
