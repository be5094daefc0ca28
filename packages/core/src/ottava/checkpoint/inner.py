"""One quantized tensor as its inner tensors and a description, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ottava.checkpoint.description import Described, find_class
from ottava.checkpoint.header import TORCH_DTYPES
from ottava.checkpoint.provenance import encode_static, origin_of, remember
from ottava.errors import CheckpointError, DTypeError, OttavaError, UsageError
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage, StorageSpec, native_dtype


def flatten_tensor(name: str, value: QuantizedTensorStorage) -> tuple[dict[str, torch.Tensor], Described]:
    """The inner tensors of a quantized tensor by argument, in the dtypes of their bytes, and its description.

    Raises:
        UsageError: it holds no data.
    """
    inner, spec = value.flatten_storage()
    held = [(d, t) for d, t in zip(value.inner_tensors, inner, strict=True) if t is not None]
    if not held:
        raise UsageError(f"{name!r} holds no data", remedy="it was cleared or saved")
    tensors = {}
    for declared, tensor in held:
        native = native_dtype(value, declared)
        tensors[declared.argument] = (tensor if native is None else tensor.view(native)).detach()
    static = zip(spec.cls.all_static_fields(), spec.static, strict=True)
    return tensors, Described(
        f"{spec.cls.__module__}:{spec.cls.__qualname__}",
        tuple(tensors),
        {declared.argument: encode_static(v) for declared, v in static},
        origin_of(value),
    )


def unflatten_tensor(name: str, entry: Described, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensorStorage:
    """A quantized tensor of its inner tensors by argument; it remembers its origin.

    Raises:
        CheckpointError: the description does not fit its class, or that is not installed.
        OttavaError: the tensors do not fit together, in the words of the class.
    """
    cls = find_class(name, entry)
    unknown = set(tensors) - {declared.argument for declared in cls.inner_tensors}
    if unknown or not tensors:
        what = f"{name!r} has {f'unknown tensors {sorted(unknown)!r:.80}' if unknown else 'no tensors'}"
        raise CheckpointError(what, expected="those of its class", remedy="the metadata is damaged")
    try:
        fields = {field.attribute: _decode(entry.static[field.argument]) for field in cls.all_static_fields()}
        if len(entry.static) != len(fields):
            raise ValueError(f"it has the fields {sorted(entry.static)!r:.200}")
        inner = [_bytes(d, tensors.get(d.argument), fields) for d in cls.inner_tensors]
        built = StorageSpec(cls, tuple(fields.values()), None).build(inner)
    except OttavaError as error:
        raise type(error)(f"{name!r}: {error.what}", expected=error.expected, remedy=error.remedy) from error
    except Exception as error:
        # A class of any author meets values that no code of its own has made.
        raise CheckpointError(
            f"{name!r} cannot be restored: {type(error).__name__}: {error}",
            expected="the metadata it was saved with",
        ) from error
    remember(built, entry.origin)
    return built


def _bytes(declared: InnerTensor, tensor: torch.Tensor | None, fields: Mapping[str, Any]) -> torch.Tensor | None:
    """An inner tensor as it is held: codes as uint8."""
    native = fields[declared.native] if isinstance(declared.native, str) else declared.native
    if tensor is None or native is None:
        return tensor
    if not isinstance(native, torch.dtype) or native.itemsize != 1:
        raise DTypeError(f"the bytes of {declared.argument!r} are said to be of {native!r}", expected="an 8-bit dtype")
    if tensor.dtype not in (native, torch.uint8):
        raise DTypeError(f"{declared.argument!r} is of {tensor.dtype}", expected=f"{native}")
    return tensor.view(torch.uint8)


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        dtype = TORCH_DTYPES.get(str(value["dtype"]))
        if dtype is None:
            raise ValueError(f"no dtype {value['dtype']!r}")
        return dtype
    return tuple(_decode(entry) for entry in value) if isinstance(value, list) else value
