"""Quantized tensors as their inner tensors, named and typed by the storage declaration, and back.

A quantized tensor ``layer.weight`` becomes ``layer.weight.<argument>`` for each inner tensor held, in the dtype that
its bytes have, so that other tools read them; what else it is made of is text. Nothing is pickled, and reading builds
only classes that are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ottava.checkpoint.description import Described, Description, find_class
from ottava.checkpoint.header import METADATA_KEY as METADATA_KEY
from ottava.checkpoint.header import TORCH_DTYPES
from ottava.checkpoint.provenance import encode_static, origin_of, remember
from ottava.errors import CheckpointError, DTypeError, OttavaError, UsageError
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage, StorageSpec


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
    from ottava.checkpoint.sharded import flatten_sharded

    parts, entry = flatten_sharded(name, value)
    for key, tensor in parts.items():
        _add(tensors, key, tensor)
    if entry is not None:
        quantized[name] = Described.decode(entry)


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
        native = _native_dtype(value, declared)
        tensors[declared.argument] = (tensor if native is None else tensor.view(native)).detach()
    static = zip(spec.cls.all_static_fields(), spec.static, strict=True)
    return tensors, Described(
        f"{spec.cls.__module__}:{spec.cls.__qualname__}",
        tuple(tensors),
        {declared.argument: encode_static(v) for declared, v in static},
        origin_of(value),
    )


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


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in tensors:
        raise UsageError(f"two tensors would have the name {name!r}", remedy="rename one of them")
    tensors[name] = tensor.detach()


def _native_dtype(value: QuantizedTensorStorage, declared: InnerTensor) -> torch.dtype | None:
    """The dtype of an inner tensor's bytes: given, or that of a static field."""
    native = declared.native
    dtype: torch.dtype | None = getattr(value, native) if isinstance(native, str) else native
    return dtype


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
