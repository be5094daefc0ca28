"""Quantized tensors as their inner tensors, named and typed by the storage declaration, and back.

A quantized tensor ``layer.weight`` becomes ``layer.weight.<argument>`` for each inner tensor held, in the dtype that
its bytes have, so that other tools read them; what else it is made of is text. Nothing is pickled, and reading builds
only classes that are installed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ottava.errors import DTypeError, OttavaError, UsageError
from ottava.recipes.registry import list_recipes
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage, StorageSpec, storage_classes

#: The metadata entry that describes the quantized tensors.
METADATA_KEY = "ottava"
_VERSION = 1


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Plain tensors by name, and the metadata with which :func:`unflatten_state_dict` restores what they came from.

    Raises:
        DTypeError: a value is not a tensor.
        UsageError: two tensors would have one name, or a quantized tensor holds no data.
    """
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    if not isinstance(state_dict, Mapping):
        raise DTypeError(f"the state dict is a {type(state_dict).__name__}", expected="a mapping of names to tensors")
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
            raise DTypeError(f"{name!r} is a {type(value).__name__}", expected="a state dict of tensors by name")
        if not isinstance(value, QuantizedTensorStorage):
            if hasattr(value, "to_local"):
                raise DTypeError(
                    f"{name!r} is sharded",
                    expected="whole tensors",
                    remedy="gather them first, with get_model_state_dict and full_state_dict=True, or save with DCP",
                )
            _add(tensors, name, value)
            continue
        inner, spec = value.flatten_storage()
        held = [(d, t) for d, t in zip(value.inner_tensors, inner, strict=True) if t is not None]
        if not held:
            raise UsageError(f"{name!r} holds no data", remedy="it was cleared or saved")
        for declared, tensor in held:
            native = _native_dtype(value, declared)
            _add(tensors, f"{name}.{declared.argument}", tensor if native is None else tensor.view(native))
        fields = zip(spec.cls.all_static_fields(), spec.static, strict=True)
        described[name] = {
            "class": f"{spec.cls.__module__}:{spec.cls.__qualname__}",
            "tensors": [declared.argument for declared, _ in held],
            "static": {declared.argument: _encode(v) for declared, v in fields},
        }
    text = json.dumps({"version": _VERSION, "quantized": described}, sort_keys=True)
    return tensors, {METADATA_KEY: text}


def unflatten_state_dict(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, torch.Tensor | QuantizedTensorStorage]:
    """The state dict that :func:`flatten_state_dict` made ``tensors`` and ``metadata`` from.

    Quantized tensors come without quantizers: loading copies their bytes into the tensors of a model.

    Raises:
        UsageError: the metadata is damaged, of a later version, or asks for a tensor that is missing or for a class of
            a package that is not installed.
        OttavaError: the tensors do not fit together, in the words of the class.
    """
    described = _described(metadata)
    taken: set[str] = set()
    state: dict[str, Any] = {}
    for name, entry in described.items():
        cls = _class(entry["class"], name)
        inner: list[torch.Tensor | None] = []
        for declared in cls.inner_tensors:
            key = f"{name}.{declared.argument}"
            if declared.argument not in entry["tensors"]:
                inner.append(None)
                continue
            if key not in tensors:
                raise UsageError(f"tensor {key!r} is missing", expected=f"every inner tensor of {name!r}")
            taken.add(key)
            inner.append(tensors[key])
        if all(tensor is None for tensor in inner):
            raise UsageError(
                f"{name!r} has no tensors", expected="those of its class", remedy="the metadata is damaged"
            )
        try:
            fields = {field.attribute: _decode(entry["static"][field.argument]) for field in cls.all_static_fields()}
            static = tuple(fields.values())
            inner = [_bytes(name, d, t, fields) for d, t in zip(cls.inner_tensors, inner, strict=True)]
            state[name] = StorageSpec(cls, static, None).build(inner)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, OttavaError):
                raise type(error)(f"{name!r}: {error}") from error
            raise UsageError(
                f"{name!r} cannot be restored: {error}", expected="the metadata it was saved with"
            ) from error
    state.update({name: tensor for name, tensor in tensors.items() if name not in taken})
    return state


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in tensors:
        raise UsageError(f"two tensors would have the name {name!r}", remedy="rename one of them")
    tensors[name] = tensor.detach()


def _native_dtype(value: QuantizedTensorStorage, declared: InnerTensor) -> torch.dtype | None:
    """The dtype of an inner tensor's bytes: given, or that of a static field."""
    native = declared.native
    dtype: torch.dtype | None = getattr(value, native) if isinstance(native, str) else native
    return dtype


def _bytes(
    name: str, declared: InnerTensor, tensor: torch.Tensor | None, fields: Mapping[str, Any]
) -> torch.Tensor | None:
    """An inner tensor as it is held: codes as uint8."""
    native = fields[declared.native] if isinstance(declared.native, str) else declared.native
    if tensor is None or native is None:
        return tensor
    if tensor.dtype not in (native, torch.uint8):
        raise DTypeError(f"{declared.argument!r} is of {tensor.dtype}", expected=f"{native}")
    return tensor.view(torch.uint8)


def _encode(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return [_encode(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise DTypeError(f"a static field holds a {type(value).__name__}", expected="a dtype, number, text or tuple")


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype {value['dtype']!r}")
        return dtype
    return tuple(_decode(entry) for entry in value) if isinstance(value, list) else value


def _described(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        read = json.loads(text)
        version, described = read["version"], read["quantized"]
        right = all(
            isinstance(name, str)
            and isinstance(entry["class"], str)
            and isinstance(entry["tensors"], list)
            and isinstance(entry["static"], dict)
            for name, entry in described.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError("the metadata of quantized tensors is damaged", expected="what was saved with them") from error
    if version != _VERSION or not right:
        raise UsageError(
            f"the metadata of quantized tensors has version {version!r}",
            expected=f"version {_VERSION}",
            remedy="read it with the version of ottava that wrote it",
        )
    found: dict[str, Any] = described
    return found


def _class(reference: str, name: str) -> type[QuantizedTensorStorage]:
    """A storage class by its name: one that was imported, or that is in the package of an installed recipe."""
    found = storage_classes().get(reference)
    package = reference.partition(":")[0].partition(".")[0]
    if found is None:
        # Nothing is imported because a file says so, but the recipes that are installed.
        for module in {spec.factory.partition(":")[0] for spec in list_recipes()}:
            if module.partition(".")[0] == package:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
        found = storage_classes().get(reference)
    if found is None:
        raise UsageError(
            f"{name!r} is a {reference!r}, which is not installed",
            expected="the package that wrote it",
            remedy=f"install the distribution of {package!r}",
        )
    return found
