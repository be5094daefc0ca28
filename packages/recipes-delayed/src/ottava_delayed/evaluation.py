"""What evaluation clamps: it moves no scale, so that this is counted apart from the state, and
warned of."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ottava.formats import fp8_format

#: From how many times its range on an input is warned of: among the batches of an evaluation some
#: have values that are somewhat larger than all that training saw, and clamping these few loses
#: little.
INPUT_EXCESS = 2.0
#: On a GPU one pass of so many is looked at, by copies that no pass waits for.
GPU_INTERVAL = 16
_REMEDY = (
    "If the weight was changed from outside, or the inputs are of another kind than those of "
    "training, take new scales"
    " in a calibrating pass: with torch.no_grad(), ottava.autocast(calibrating=True): model(batch)"
)


class Look(NamedTuple):
    """The largest magnitudes of a pass, its scales and all counts, ``[slots]`` each; on a CPU when
    ``arrival`` is."""

    amax: torch.Tensor
    scale: torch.Tensor
    saturated: torch.Tensor
    arrival: Any


class Evaluations:
    """Counts what the evaluations of one layer clamp, and warns of it once for each operand.

    None of this is state: checkpoints do not have it, copies begin afresh, and no scale depends on
    it. A warning needs a value that clamping changes by more than rounding could: a weight that has
    grown a little since its scale was taken is no reason for one, and an input has to be larger by
    a factor of :data:`INPUT_EXCESS`. A CPU is asked after every pass. A GPU is not waited for: the
    amaxes of the first pass, and of each sixteenth from then on, are copied while it works, and
    looked at in a later pass.

    Args:
        slots: which slot is which tensor's.
        formats: the FP8 dtypes of the slots.

    Attributes:
        buffers: what the kernels of an evaluation read and write in the place of the state's
            buffers: its ``scale``, an ``amax_history`` of one pass, float32 ``[1, slots]``, and
            counters ``saturated``, int64 ``[slots]``. Empty before the first evaluation.
    """

    def __init__(self, slots: Mapping[str, int], formats: Sequence[torch.dtype]) -> None:
        self.slots = slots
        self.limits = [1.0 + torch.finfo(dtype).eps / 2 for dtype in formats]
        for tensor_type, slot in slots.items():
            if tensor_type == "input":
                self.limits[slot] = INPUT_EXCESS
        self.maxima = [fp8_format(dtype).max for dtype in formats]
        self.buffers: dict[str, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all evaluations, and what was warned of."""
        # Quantizers read the same dictionary.
        self.buffers.clear()
        self._counts = [0] * len(self.slots)
        self._told: set[str] = set()
        self._passes = 0
        self._look: Look | None = None

    def counts(self) -> list[int]:
        """How many elements were clamped so far, of each slot; waits for a GPU."""
        saturated = self.buffers.get("saturated")
        return [0] * len(self._counts) if saturated is None else saturated.tolist()

    def opens(self, scale: torch.Tensor) -> bool:
        """Whether a pass with the scales ``[slots]`` can be counted; the buffers are then where the
        scales are."""
        saturated = self.buffers.get("saturated")
        if saturated is None or saturated.device != scale.device:
            if type(scale) is not torch.Tensor or scale.is_meta or _is_capturing(scale):
                return False
            self._place(scale.device)
        self.buffers["scale"] = scale
        return True

    def _place(self, device: torch.device) -> None:
        counts, self._look, self._passes = self.counts(), None, 0
        # Tensors of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.buffers["amax_history"] = torch.zeros(
                1, len(counts), dtype=torch.float32, device=device
            )
            self.buffers["saturated"] = torch.tensor(counts, dtype=torch.int64, device=device)

    def take(self, tensor_type: str, amax: torch.Tensor, saturated: torch.Tensor) -> None:
        """Add what another counter has seen of a tensor, ``[1]`` each."""
        slot = self.slots[tensor_type]
        seen = self.buffers["amax_history"][0, slot]
        seen.copy_(torch.maximum(seen, amax[0]))
        self.buffers["saturated"][slot].add_(saturated[0])

    def close(self, layer: str) -> None:
        """Look at the pass that ends, or at one before, and warn of what was clamped in
        ``layer``."""
        if len(self._told) == len(self.slots) or not self.buffers:
            return
        amax, saturated = self.buffers["amax_history"], self.buffers["saturated"]
        if not amax.is_cpu:
            self._close_on_gpu(layer)
            return
        counts: list[int] = saturated.tolist()
        if counts != self._counts:
            self._counts = counts
            self._warn(layer, Look(amax[0], self.buffers["scale"], saturated, None))
        amax.zero_()

    def _close_on_gpu(self, layer: str) -> None:
        amax = self.buffers["amax_history"]
        if not amax.is_cuda or _is_capturing(amax):
            return
        look, place = self._look, self._passes % GPU_INTERVAL
        self._passes += 1
        if look is not None and look.arrival.query():
            self._look = None
            self._warn(layer, look)
        elif look is None and place == 0:
            self._look = self._begin_look()
        if place == GPU_INTERVAL - 1:
            # The next pass is looked at by itself, whatever the scales were before.
            amax.zero_()

    def _begin_look(self) -> Look:
        found = self.buffers["amax_history"][0], self.buffers["scale"], self.buffers["saturated"]
        with torch.cuda.device(found[0].device):
            amax, scale, saturated = (tensor.to("cpu", non_blocking=True) for tensor in found)
            arrival = torch.cuda.Event()
            arrival.record()
        return Look(amax, scale, saturated, arrival)

    def _warn(self, layer: str, look: Look) -> None:
        amaxes, scales, counts = (tensor.tolist() for tensor in look[:3])
        for tensor_type, slot in self.slots.items():
            excess = amaxes[slot] * scales[slot] / self.maxima[slot]
            if not counts[slot] or excess <= self.limits[slot] or tensor_type in self._told:
                continue
            self._told.add(tensor_type)
            what = (
                f"evaluation clamps the {tensor_type} of {layer}, {counts[slot]} elements so "
                f"far: its largest value"
            )
            what = (
                f"{what} is {excess:.3g} times what its scale of delayed scaling can "
                f"represent, and evaluation"
            )
            warnings.warn(f"{what} moves no scale. {_REMEDY}", UserWarning, stacklevel=6)


def _is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured, which must have neither new memory of ours nor a copy to
    the CPU."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
