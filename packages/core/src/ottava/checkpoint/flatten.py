"""Quantized tensors as their inner tensors, named and typed by the storage declaration, and back.

A quantized tensor ``layer.weight`` becomes ``layer.weight.<argument>`` for each inner tensor held, in the dtype that
its bytes have, so that other tools read them; what else it is made of is text. Nothing is pickled, and reading builds
only classes that are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ottava.checkpoint.description import Described, Description
from ottava.checkpoint.header import METADATA_KEY as METADATA_KEY
from ottava.checkpoint.inner import flatten_tensor, unflatten_tensor
from ottava.checkpoint.sharded import flatten_sharded
from ottava.errors import CheckpointError, DTypeError, UsageError
from ottava.tensors.storage import QuantizedTensorStorage


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Plain tensors by name, and the metadata with which :func:`unflatten_state_dict` restores what they came from.

    A sharded tensor becomes sharded plain tensors with the same mesh and placements. The metadata also says by which
    recipe, of which version of which package, each tensor was quantized, as far as the installed packages can tell; for
    tensors that were loaded it is what the file said.

    Raises:
        DTypeError: a value is not a tensor.
        UsageError: two tensors would have one name, or a quantized tensor holds no data.
        ShapeError, UsageError: the inner tensors of a sharded quantized tensor cannot be sharded as it is.
    """
    tensors, description = described_state(state_dict)
    return tensors, {METADATA_KEY: description.encode()}


def described_state(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Description]:
    """As :func:`flatten_state_dict`, with the description before it is text."""
    tensors: dict[str, torch.Tensor] = {}
    quantized: dict[str, Described] = {}
    if not isinstance(state_dict, Mapping):
        raise DTypeError(f"the state dict is a {type(state_dict).__name__}", expected="a mapping of names to tensors")
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
            raise DTypeError(f"{name!r} is a {type(value).__name__}", expected="a state dict of tensors by name")
        if isinstance(value, QuantizedTensorStorage):
            inner, quantized[name] = flatten_tensor(name, value)
            for argument, tensor in inner.items():
                _add(tensors, f"{name}.{argument}", tensor)
        elif hasattr(value, "to_local"):
            _add_sharded(tensors, quantized, name, value)
        else:
            # A weight in high precision whose class only serves its gathering.
            plain = getattr(value, "high_precision", None)
            _add(tensors, name, plain() if callable(plain) else value)
    return tensors, Description(quantized)


def _add_sharded(tensors: dict[str, torch.Tensor], quantized: dict[str, Described], name: str, value: Any) -> None:
    parts, entry = flatten_sharded(name, value)
    for key, tensor in parts.items():
        _add(tensors, key, tensor)
    if entry is not None:
        quantized[name] = Described.decode(entry)


def unflatten_state_dict(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, torch.Tensor | QuantizedTensorStorage]:
    """The state dict that :func:`flatten_state_dict` made ``tensors`` and ``metadata`` from.

    Quantized tensors come without quantizers: loading copies their bytes into the tensors of a model.

    Raises:
        CheckpointError: the metadata is damaged, of a later version, or asks for a tensor that is missing or for a
            class of a package that is not installed, which it names.
        OttavaError: the tensors do not fit together, in the words of the class.
    """
    description = Description.decode((metadata or {}).get(METADATA_KEY))
    tensors = description.with_aliases(tensors)
    taken: set[str] = set()
    state: dict[str, Any] = {}
    for name, entry in description.quantized.items():
        keys = [f"{name}.{argument}" for argument in entry.tensors]
        for key in keys:
            if key not in tensors:
                raise CheckpointError(f"tensor {key!r} is missing", expected=f"every inner tensor of {name!r}")
        state[name] = unflatten_tensor(name, entry, dict(zip(entry.tensors, map(tensors.__getitem__, keys))))
        taken.update(keys)
    for name, tensor in tensors.items():
        if name not in taken:
            if name in state:
                raise CheckpointError(f"{name!r} is both a tensor and a quantized one", expected="one tensor of a name")
            state[name] = tensor
    return state


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in tensors:
        raise UsageError(f"two tensors would have the name {name!r}", remedy="rename one of them")
    tensors[name] = tensor.detach()
