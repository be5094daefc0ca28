"""Counts of the elements that evaluation clamps, and warnings about them.

Evaluation moves no scale, so its counts are separate from the state of training.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ottava.formats import fp8_format

#: An input is warned about when its amax exceeds the range of its scale by this factor. Some
#: batches of an evaluation have values that are slightly larger than all values of training, and
#: clamping these few values loses little.
INPUT_EXCESS = 2.0
#: On a GPU one pass in this many is checked, through copies that no pass waits for.
GPU_INTERVAL = 16
_REMEDY = (
    "If the weight was changed from outside, or the inputs are of another kind than those of "
    "training, take new scales in a calibrating pass: "
    "with torch.no_grad(), ottava.autocast(calibrating=True): model(batch)"
)


class Look(NamedTuple):
    """The amaxes and scales of a pass, and the counts of all passes, ``[slots]`` each.

    The tensors may be read on the CPU once the CUDA event ``arrival`` has completed. It is None for
    tensors that were computed on the CPU.
    """

    amax: torch.Tensor
    scale: torch.Tensor
    saturated: torch.Tensor
    arrival: Any


class Evaluations:
    """Counts the elements that evaluations of one layer clamp, and warns once for each operand.

    The counts are not state: checkpoints do not contain them, copies start from zero, and no scale
    depends on them. A warning needs a value that clamping changes by more than rounding could.
    Therefore a weight that has grown a little since its scale was computed causes no warning, and
    an input has to exceed the range of its scale by a factor of :data:`INPUT_EXCESS`.

    On a CPU the counts are checked after every pass. On a GPU no pass waits: the amaxes of the
    first pass, and of each sixteenth from then on, are copied asynchronously and checked in a later
    pass.

    Args:
        slots: tensor type -> slot.
        formats: the FP8 dtypes of the slots.

    Attributes:
        buffers: the tensors that the kernels of an evaluation read and write instead of the state's
            buffers: the state's ``scale``, an ``amax_history`` of one pass, float32 ``[1, slots]``,
            and counters ``saturated``, int64 ``[slots]``. Empty before the first evaluation.
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
        """Forget all evaluations and all warnings."""
        # The dictionary is cleared in place, because quantizers hold a reference to it.
        self.buffers.clear()
        self._counts = [0] * len(self.slots)
        # The tensor types that a warning was given for.
        self._warned: set[str] = set()
        self._passes = 0
        self._look: Look | None = None

    def counts(self) -> list[int]:
        """The number of elements clamped so far in each slot; waits for a GPU."""
        saturated = self.buffers.get("saturated")
        if saturated is None:
            return [0] * len(self._counts)
        return saturated.tolist()

    def opens(self, scale: torch.Tensor) -> bool:
        """Prepare the buffers for a pass with the scales ``[slots]``, on the device of the scales.

        Returns False where the pass cannot be counted: for scales that are a tensor subclass or on
        the meta device, and for new buffers while a CUDA graph is captured.
        """
        saturated = self.buffers.get("saturated")
        if saturated is None or saturated.device != scale.device:
            if type(scale) is not torch.Tensor or scale.is_meta or _is_capturing(scale):
                return False
            self._place(scale.device)
        self.buffers["scale"] = scale
        return True

    def _place(self, device: torch.device) -> None:
        counts = self.counts()
        self._look = None
        self._passes = 0
        # Tensors that are allocated in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.buffers["amax_history"] = torch.zeros(
                1, len(counts), dtype=torch.float32, device=device
            )
            self.buffers["saturated"] = torch.tensor(counts, dtype=torch.int64, device=device)

    def take(self, tensor_type: str, amax: torch.Tensor, saturated: torch.Tensor) -> None:
        """Add the amax and the number of clamped elements, ``[1]`` each, that were recorded
        elsewhere for a tensor."""
        slot = self.slots[tensor_type]
        recorded = self.buffers["amax_history"][0, slot]
        recorded.copy_(torch.maximum(recorded, amax[0]))
        self.buffers["saturated"][slot].add_(saturated[0])

    def close(self, layer: str) -> None:
        """Check the pass that ends, or on a GPU an earlier one, and warn of elements clamped in
        ``layer``."""
        if len(self._warned) == len(self.slots) or not self.buffers:
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
        look = self._look
        place = self._passes % GPU_INTERVAL
        self._passes += 1
        if look is not None and look.arrival.query():
            self._look = None
            self._warn(layer, look)
        elif look is None and place == 0:
            self._look = self._copy_to_cpu()
        if place == GPU_INTERVAL - 1:
            # The next pass is checked by itself, because earlier passes may have had other scales.
            amax.zero_()

    def _copy_to_cpu(self) -> Look:
        amax = self.buffers["amax_history"][0]
        with torch.cuda.device(amax.device):
            amax = amax.to("cpu", non_blocking=True)
            scale = self.buffers["scale"].to("cpu", non_blocking=True)
            saturated = self.buffers["saturated"].to("cpu", non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record()
        return Look(amax, scale, saturated, arrival)

    def _warn(self, layer: str, look: Look) -> None:
        amaxes, scales, counts = (tensor.tolist() for tensor in look[:3])
        for tensor_type, slot in self.slots.items():
            excess = amaxes[slot] * scales[slot] / self.maxima[slot]
            if not counts[slot] or excess <= self.limits[slot] or tensor_type in self._warned:
                continue
            self._warned.add(tensor_type)
            warnings.warn(
                f"evaluation clamps the {tensor_type} of {layer}, {counts[slot]} elements so far: "
                f"its largest value is {excess:.3g} times what its scale of delayed scaling can "
                f"represent, and evaluation moves no scale. {_REMEDY}",
                UserWarning,
                # The line that calls the layer.
                stacklevel=9,
            )


def _is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured.

    A captured graph must contain neither buffers allocated here nor a copy to the CPU.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
