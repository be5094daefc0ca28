"""safetensors files of state dicts with quantized tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.flatten import flatten_state_dict, unflatten_state_dict
from ottava.errors import DTypeError, OttavaError, UsageError
from ottava.tensors.quantizer import as_device
from ottava.tensors.storage import QuantizedTensorStorage


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            "safetensors is not installed",
            expected="the package safetensors",
            remedy='pip install "ottava[safetensors]"',
        ) from error
    return safetensors


def _path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise DTypeError(f"the path is a {type(path).__name__}", expected="a path")
    return Path(path)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors that share no memory, which a file of tensors has no way to say: copies of those that do."""
    seen: set[int] = set()
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise DTypeError(f"{name!r} is on meta or sparse", expected="a dense tensor with values")
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        result[name] = tensor
    return result


def save_file(state_dict: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state dict, quantized tensors included, as one safetensors file; an existing one is replaced at once.

    Tensors that share memory, tied weights for example, are written one by one.

    Raises:
        UsageError: safetensors is not installed, two tensors would have one name, or the file cannot be written.
        DTypeError: a value is not a dense tensor with values.
    """
    library = _safetensors()
    tensors, metadata = flatten_state_dict(state_dict)
    tensors = _apart(tensors)
    target = _path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        library.torch.save_file(tensors, partial, metadata)
        os.replace(partial, target)
    except (library.SafetensorError, OSError) as error:
        raise UsageError(f"{target} cannot be written: {error}", expected="a file in an existing folder") from error
    finally:
        partial.unlink(missing_ok=True)


def load_file(
    path: str | os.PathLike[str], device: str | int = "cpu"
) -> dict[str, torch.Tensor | QuantizedTensorStorage]:
    """The state dict of a safetensors file; files of other tools give plain tensors.

    Raises:
        UsageError: the file cannot be read, or what it holds cannot be restored.
        DeviceError: ``device`` names none.
        OttavaError: the tensors do not fit together.
    """
    library = _safetensors()
    path, device = _path(path), str(as_device(device))
    try:
        with library.safe_open(path, framework="pt", device=device) as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (library.SafetensorError, OSError) as error:
        raise UsageError(f"{os.fspath(path)} cannot be read: {error}", expected="a whole safetensors file") from error
    try:
        return unflatten_state_dict(tensors, metadata)
    except OttavaError as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from error
