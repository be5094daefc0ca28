"""safetensors files of state dicts with quantized tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ottava.checkpoint.flatten import METADATA_KEY, described_state, unflatten_state_dict
from ottava.checkpoint.header import TensorSpec
from ottava.checkpoint.reader import SafetensorsFile, named, usable_device
from ottava.checkpoint.writer import SafetensorsWriter
from ottava.errors import DTypeError
from ottava.tensors.storage import QuantizedTensorStorage

#: What some tools ask every file for.
METADATA = {"format": "pt"}


def shared_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that are wholly another one, earlier in the dict, by its name."""
    seen: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise DTypeError(f"{name!r} is on meta or sparse", expected="a dense tensor with values")
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            first = seen.setdefault(place, name)
            if first != name:
                aliases[name] = first
    return aliases


def save_file(state_dict: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state dict, quantized tensors included, as one safetensors file; an existing one is replaced at once.

    A tensor under several names, a tied weight for example, is stored under the first one; parts of one memory are
    written one by one. Every tensor, and the header, has a checksum. One tensor at a time is copied.

    Raises:
        UsageError: two tensors would have one name, or the file cannot be written.
        DTypeError: a value is not a dense tensor with values, of a dtype that the format has.
    """
    for name, value in state_dict.items() if isinstance(state_dict, Mapping) else ():
        if hasattr(value, "to_local"):
            raise DTypeError(
                f"{name!r} is sharded",
                expected="whole tensors",
                remedy="save with save_sharded, or gather them: get_model_state_dict with full_state_dict=True",
            )
    tensors, description = described_state(state_dict)
    aliases = shared_tensors(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    metadata = METADATA | {METADATA_KEY: replace(description, aliases=aliases).encode()}
    with SafetensorsWriter(path, specs, metadata) as writer:
        for name, tensor in stored.items():
            writer.write(name, tensor)


def load_file(
    path: str | os.PathLike[str], device: str | int = "cpu", *, verify: bool = True
) -> dict[str, torch.Tensor | QuantizedTensorStorage]:
    """The state dict of a safetensors file; files of other tools give plain tensors.

    Quantized tensors come without quantizers: loading copies their bytes into the tensors of a model. They remember
    what quantized them, so that they can be saved again.

    Args:
        path: the file. Nothing in it is trusted; memory is bounded by its size.
        device: where the tensors go.
        verify: whether tensors are compared with their checksums; the header always is.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is no safetensors file; it names file and tensor.
        DeviceError: ``device`` names none that can be used.
        OttavaError: the tensors do not fit together.
    """
    place = usable_device(device)
    with SafetensorsFile(path, verify=verify) as file, named(file.path):
        tensors = {name: file.read(name).to(place) for name in file.names()}
        return unflatten_state_dict(tensors, file.metadata)
