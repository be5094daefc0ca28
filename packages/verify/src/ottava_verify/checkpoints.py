"""Quantized tensors in checkpoints of Ottava and of other tools, by their weights' names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ottava.checkpoint import read_state
from ottava.checkpoint.published import find_published, weight_of
from ottava.contract import Contract
from ottava.errors import OttavaError
from ottava.filesystem import AnyPath, as_path
from ottava.kernels import HIGH_PRECISION
from ottava.tensors import QuantizedTensorStorage
from ottava_verify.reading import stored_tensors
from ottava_verify.steps import Grid, Usage
from ottava_verify.stored import Stored, numbers_of, power_of_two, spread

Tensor = torch.Tensor
_USAGES: tuple[Usage, ...] = ("rowwise", "columnwise")
# What follows a weight's name in that of its scales.
_SCALES = ("_scale", "_scale_inv", "_scales")
# The same for a second level, and what that is: of compressed-tensors, ModelOpt and torchao.
_INVERSE = ("amax/whole", "1/(whole/amax)")
_LEVELS: Mapping[str, tuple[str, ...]] = {
    "_global_scale": ("whole/amax",),
    "_scale_2": _INVERSE,
    "_per_tensor_scale": _INVERSE,
}


@dataclass(frozen=True, eq=False)
class Quantized:
    """One usage of a quantized tensor of a checkpoint.

    Attributes:
        name: of the weight.
        usage: which products read it; only Ottava's files have both.
        stored: its bytes.
        format: what the file calls it.
        contract: what the file states of it; None if it states nothing.
        decode: gives the values; raises an error of Ottava if it cannot.
        problem: why it cannot be read; empty if it can.
    """

    name: str
    usage: Usage
    stored: Stored | None
    format: str
    contract: Contract | None
    decode: Callable[[], Tensor]
    problem: str = ""

    @property
    def title(self) -> str:
        """The name, with the usage where it is not that of rows."""
        return self.name if self.usage == "rowwise" else f"{self.name} ({self.usage})"


def quantized_tensors(path: AnyPath) -> list[Quantized]:
    """The quantized tensors of a checkpoint.

    Args:
        path: see :func:`ottava.checkpoint.read_state`.

    Raises:
        CheckpointError: it is damaged, or cannot be read.
    """
    state, _ = read_state(path)
    published = find_published(state, as_path(path))
    found: list[Quantized] = []
    for name, value in state.items():
        if isinstance(value, QuantizedTensorStorage):
            found += _of_ottava(name, value)
    for data_name, scale_names in published.scales.items():
        found.append(_of_published(data_name, scale_names, state, published.format.title))
    return found


def _of_ottava(name: str, value: QuantizedTensorStorage) -> Iterator[Quantized]:
    """The usages of a tensor of Ottava that the file has."""
    usages = value.get_usages()
    seen: list[int] = []
    for usage in _USAGES:
        if not usages[usage]:
            continue
        parts = stored_tensors(value, usage)
        # One buffer may serve both usages.
        if parts["data"].data_ptr() in seen or "scales" not in parts:
            continue
        seen.append(parts["data"].data_ptr())
        stored = Stored.of(parts["data"], parts["scales"], parts.get("amax"), ("amax",))
        title = f"Ottava, {type(value).__name__}"
        yield Quantized(name, usage, stored, title, value.saved_contract, value.dequantize)


def _of_published(
    data_name: str, scale_names: tuple[str, ...], state: Mapping[str, Any], title: str
) -> Quantized:
    """A tensor of another tool."""
    weight, data = weight_of(data_name), state[data_name]
    ends = {name.removeprefix(weight): name for name in scale_names}
    # torchao writes `layer._weight_qdata`.
    name = weight.replace("._weight", ".weight")

    def refused(problem: str) -> Quantized:
        return Quantized(name, "rowwise", None, title, None, lambda: data, problem)

    end = next((end for end in _SCALES if ends.get(end) in state), None)
    if end is None:
        return refused(f"no scales of {data_name!r} are in the file")
    if data.dim() != 2:
        return refused(f"data have shape {tuple(data.shape)}, and are no matrix")
    scales = state[ends[end]]
    second = next((end for end in _LEVELS if ends.get(end) in state), "")
    level = state[ends[second]] if second else None
    try:
        stored = Stored.of(data, scales, level, _LEVELS.get(second, ()))
    except OttavaError as error:
        return refused(str(error))
    return Quantized(name, "rowwise", stored, title, None, lambda: decoded(stored, data, scales))


def decoded(stored: Stored, data: Tensor, scales: Tensor) -> Tensor:
    """The values of a tensor of another tool: elements times scales, which lie on a grid.

    The format of elements follows from the dtype of data: bytes without one are two E2M1 each, the
    even one in the low half. Scales without one are codes of E8M0.
    """
    if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) or data.dtype is torch.int8:
        values = data.float()
    else:
        codes = torch.stack([stored.data & 0xF, stored.data >> 4], -1).flatten(-2)
        values = numbers_of("E2M1")[codes.long()].float()
    numbers = stored.scales
    if scales.dtype is torch.float8_e4m3fn:
        numbers = scales.float()
    elif numbers.dtype is torch.uint8:
        numbers = power_of_two(numbers.int() - 127)
    if numbers.dim() != 2:
        numbers = numbers.reshape(-1, 1)
    sides = [-(-size // count) for size, count in zip(values.shape, numbers.shape, strict=True)]
    grid = Grid((sides[0], sides[1]), (values.shape[0], values.shape[1]))
    values = values * spread(numbers, grid)
    if stored.level is None:
        return values
    return values / stored.level if stored.level_is == ("whole/amax",) else values * stored.level


def source_tensors(path: AnyPath) -> dict[str, Tensor]:
    """The tensors in high precision of a checkpoint, by name.

    Raises:
        CheckpointError: it is damaged, or cannot be read.
    """
    state, _ = read_state(path)
    return {
        name: value
        for name, value in state.items()
        if not isinstance(value, QuantizedTensorStorage) and value.dtype in HIGH_PRECISION
    }
