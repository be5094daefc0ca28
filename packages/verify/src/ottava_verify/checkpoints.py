"""Quantized tensors in checkpoints of Ottava and of other tools, by their weights' names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ottava.checkpoint import read_state
from ottava.checkpoint.published import find_published, weight_of
from ottava.contract import Contract
from ottava.contract.numbers import numbers_of_codes, numbers_of_scales
from ottava.contract.steps import USAGES, Grid, Usage
from ottava.errors import OttavaError
from ottava.filesystem import AnyPath, as_path
from ottava.gemm import stored_tensors
from ottava.kernels import HIGH_PRECISION
from ottava.tensors import QuantizedTensorStorage
from ottava_verify.stored import INVERSE, Shapes, Stored, of_parts
from ottava_verify.ways import VIEWS

# What follows a weight's name in that of its scales.
_SCALES = ("_scale", "_scale_inv", "_scales")
# The same for a second level, and what that is: of compressed-tensors, ModelOpt and torchao.
_LEVELS: Mapping[str, tuple[str, ...]] = {
    "_global_scale": ("whole/amax",),
    "_scale_2": INVERSE,
    "_per_tensor_scale": INVERSE,
}


@dataclass(frozen=True, eq=False)
class Quantized:
    """One usage of a quantized tensor of a checkpoint.

    Attributes:
        name: of the weight.
        usage: which products read it; only Ottava's files have both.
        stored: its bytes; None if they cannot be read.
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


def _of_ottava(name: str, value: QuantizedTensorStorage) -> Iterator[Quantized]:
    """The usages of a tensor of Ottava that the file has; one buffer may serve both."""
    held = value.get_usages()
    buffers: list[int] = []
    for usage in USAGES:
        parts = stored_tensors(value, usage) if held[usage] else {}
        if "scales" not in parts or parts["data"].data_ptr() in buffers:
            continue
        buffers.append(parts["data"].data_ptr())
        title = f"Ottava, {type(value).__name__}"
        contract = value.saved_contract
        yield Quantized(name, usage, of_parts(parts), title, contract, value.dequantize)


def _of_published(
    data_name: str, scale_names: tuple[str, ...], state: Mapping[str, Any], title: str
) -> Quantized:
    """A tensor of another tool."""
    weight, data = weight_of(data_name), state[data_name]
    tensors = {name.removeprefix(weight): state.get(name) for name in scale_names}
    # torchao writes `layer._weight_qdata`.
    name = weight.replace("._weight", ".weight")

    def refused(problem: str) -> Quantized:
        return Quantized(name, "rowwise", None, title, None, lambda: data, problem)

    scales = next((tensors[end] for end in _SCALES if tensors.get(end) is not None), None)
    if scales is None:
        return refused(f"no scales of {data_name!r} are in the file")
    if data.dim() != 2:
        return refused(f"data have shape {tuple(data.shape)}, and are no matrix")
    end = next((end for end in _LEVELS if tensors.get(end) is not None), "")
    try:
        stored = Stored.of(data, scales, tensors.get(end), _LEVELS.get(end, ()))
    except OttavaError as error:
        return refused(str(error))
    return Quantized(name, "rowwise", stored, title, None, lambda: _decoded(stored, data, scales))


def _side(size: int, count: int) -> int:
    """The side of blocks that are so many: a power of two, unless none fits."""
    least = -(-size // max(count, 1))
    power = 1 << max(least - 1, 0).bit_length()
    return power if -(-size // power) == count else least


def _in_rows(stored: Stored, block: int) -> Stored:
    """Tensors of E2M1 whose scales are one for each block of a row, also where they are stored in
    tiles, as products of GPUs read them."""
    rows, half = stored.data.shape
    shapes = Shapes((rows, half), (rows, -(-2 * half // block)))
    if tuple(stored.scales.shape) == shapes.scales:
        return stored
    return VIEWS["scales-swizzled"](stored, shapes, "") or stored


def _decoded(stored: Stored, data: Tensor, scales: Tensor) -> Tensor:
    """The values of a tensor of another tool: elements times scales, which lie on a grid.

    The format of elements follows from the dtype of data: bytes without one are two E2M1 each, the
    even one in the low half. Scales without one are codes of E8M0.
    """
    is_e4m3 = scales.dtype == torch.float8_e4m3fn
    if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        values = data.float()
    else:
        codes = torch.stack([stored.data & 0xF, stored.data >> 4], -1).flatten(-2)
        values = numbers_of_codes("E2M1")[codes.long()]
        stored = _in_rows(stored, 16 if is_e4m3 else 32)
    numbers = numbers_of_scales(stored.scales, "E4M3" if is_e4m3 else "E8M0")
    if numbers.dim() != 2:
        numbers = numbers.reshape(-1, 1)
    down, across = map(_side, values.shape, numbers.shape)
    grid = Grid((down, across), (values.shape[0], values.shape[1]))
    values = values * grid.spread(numbers)
    if stored.level is None:
        return values
    return values / stored.level if stored.level_is == ("whole/amax",) else values * stored.level
