"""What a layer keeps of its weight from one microbatch of a step to the next."""

from typing import Any

import torch

from ottava.recipes.binding import Call
from ottava.recipes.state import RecipeState
from ottava.tensors.storage import QuantizedTensorStorage


class KeptWeight:
    """The weight as it was quantized in the first microbatch, by a state of the layer."""

    quantized: QuantizedTensorStorage | None = None
    _state: RecipeState | None = None

    def clear(self) -> None:
        """Keep nothing: the weight or the recipe has changed."""
        self.quantized = self._state = None

    def for_call(self, call: Call, weight: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        """What was kept, or what is kept from now on."""
        state: Any = call.state
        if (
            self.quantized is None
            or self._state is not state
            or (call.first and (call.recording or not call.recomputed))
        ):
            quantizer = state.quantizer("weight", rowwise=True, columnwise=True, recording=call.recording)
            weight = weight.detach()
            with torch.no_grad():
                kept = quantizer.quantize(weight.clone() if quantizer.keeps_operands else weight, dtype=dtype)
            if state.stateful:
                # It is never quantized again, and the quantizer holds the state as it is now.
                kept.update_quantizer(None)
            self.quantized, self._state = kept, state
        return self.quantized
