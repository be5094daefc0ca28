"""What a layer keeps of its weight between microbatches, and what becomes of it where it is moved or replaced."""

from typing import Any

import torch

from ottava.kernels import HIGH_PRECISION
from ottava.recipes.binding import Call
from ottava.recipes.state import RecipeState
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import local_tensor, set_local_tensor


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
        if self.quantized is None or self._state is not state or (call.first and not call.recomputed):
            # Where operands are seen when they are recomputed, this one is not quantized again.
            recording = call.recording or state._unseen
            quantizer = state.quantizer("weight", rowwise=True, columnwise=True, recording=recording)
            weight = weight.detach()
            with torch.no_grad():
                kept = quantizer.quantize(weight.clone() if quantizer.keeps_operands else weight, dtype=dtype)
            if state.stateful:
                # It is never quantized again, and the quantizer holds the state as it is now.
                kept.update_quantizer(None)
            self.quantized, self._state = kept, state
        return self.quantized


def apply_to_layer(layer: Any, fn: Any, apply: Any) -> None:
    """``Module._apply`` of a layer, by ``apply(fn)``, which keeps a quantized weight quantized."""
    weight: Any = layer._parameters.get("weight")
    without_values = layer.weight.is_meta
    kept: Any = None
    if isinstance(weight, QuantizedTensor):
        with torch.no_grad():
            kept = fn(weight)
            if not isinstance(kept, QuantizedTensor) and kept.dtype in HIGH_PRECISION:
                # What would dequantize it keeps its data.
                kept = weight.to(kept.device).to_dtype(kept.dtype)  # type: ignore[attr-defined]
    if kept is None or kept.is_meta is not without_values:
        apply(fn if kept is None else lambda t: kept if t is weight else fn(t))
    else:
        # torch swaps a parameter of a subclass for another one, which has neither its attributes nor its hooks. A
        # plain parameter is given new data, and so is this one.
        if kept is not weight:
            weight.data = kept
        if weight.grad is not None:
            weight.grad.data = fn(weight.grad)
        layer._parameters["weight"] = None
        try:
            apply(fn)
        finally:
            layer._parameters["weight"] = weight
    if without_values and not layer.weight.is_meta:
        _share_shards(layer)


def _share_shards(layer: Any) -> None:
    """See that the first values of a quantized weight that was on meta are quantized as those of the whole."""
    weight = layer.weight
    local = local_tensor(weight)
    if not isinstance(local, QuantizedTensor):
        return
    layer._binding.own_shard(layer, local)
    sharded = [] if local is weight else [d for d, p in enumerate(weight.placements) if not p.is_replicate()]
    if len(sharded) == 1 and local._quantizer is not None:
        group = weight.device_mesh.get_group(sharded[0])
        local.update_quantizer(local._quantizer.for_shards(group.group_name))


def gather_as(layer: Any, before: Any) -> None:
    """Have a weight that was put in the place of another one (``assign=True``) be gathered as that was."""
    weight: Any = layer.weight
    local = local_tensor(weight)
    gathered = isinstance(local, QuantizedTensorStorage) or hasattr(local, "high_precision")
    if gathered or not hasattr(before, "high_precision"):
        return
    made = type(before)(local.detach())
    if local is weight:
        layer._parameters["weight"] = torch.nn.Parameter(made, requires_grad=weight.requires_grad)
    else:
        set_local_tensor(weight, made)
