"""Quantized tensors as their inner tensors and a description, text that is checked before anything is built from it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ottava.checkpoint.files import TORCH_DTYPES
from ottava.errors import CheckpointError, DTypeError, OttavaError, UsageError
from ottava.recipes.registry import plugin_statuses
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage, StorageSpec, native_dtype, storage_classes

_VERSION = 1
# What a file says of what quantized a tensor; the first version had the name of a recipe in the place of a class.
_ORIGIN = {"quantizer": str, "package": str, "version": str, "options": dict, "recipe": str}


@dataclass(frozen=True)
class Described:
    """One quantized tensor: its class ``"module:Class"``, the arguments of the inner tensors that are held, the static
    fields by argument, as JSON has them, and what quantized it, as far as that is known."""

    cls: str
    tensors: tuple[str, ...]
    static: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """For JSON."""
        return {"class": self.cls, "tensors": list(self.tensors), "static": dict(self.static), **self.origin}

    @classmethod
    def decode(cls, entry: Any) -> Described:
        """Of JSON; raises ValueError, KeyError or TypeError where it is of another kind."""
        origin = {key: entry[key] for key in _ORIGIN if key in entry}
        right = isinstance(entry["tensors"], list) and isinstance(entry["static"], dict)
        right = right and all(isinstance(text, str) for text in (entry["class"], *entry["tensors"]))
        if not right or not all(isinstance(value, _ORIGIN[key]) for key, value in origin.items()):
            raise ValueError("it is of another kind")
        return cls(entry["class"], tuple(entry["tensors"]), entry["static"], origin)


@dataclass(frozen=True)
class Description:
    """What the metadata of a file says: its quantized tensors, and names of tensors that are stored under another."""

    quantized: Mapping[str, Described] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> str:
        """As text."""
        body: dict[str, Any] = {"quantized": {name: entry.encode() for name, entry in self.quantized.items()}}
        body |= {"version": _VERSION} | ({"aliases": dict(self.aliases)} if self.aliases else {})
        return json.dumps(body, sort_keys=True)

    @classmethod
    def decode(cls, text: str | None) -> Description:
        """Of text; None for that of another tool's file.

        Raises:
            CheckpointError: it is damaged, or of a later version.
        """
        try:
            read: Any = {"version": _VERSION, "quantized": {}} if text is None else json.loads(text)
            version, aliases = read["version"], read.get("aliases", {})
            if version == _VERSION and all(isinstance(stored, str) for stored in aliases.values()):
                return cls({name: Described.decode(entry) for name, entry in read["quantized"].items()}, aliases)
            if version == _VERSION:
                raise ValueError("a name is no text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise CheckpointError("the metadata of quantized tensors is damaged", expected="what was saved") from error
        what, remedy = (
            f"the metadata of quantized tensors has version {version!r:.80}",
            "read it with the ottava that wrote it",
        )
        raise CheckpointError(what, expected=f"version {_VERSION}", remedy=remedy)


def encode_static(value: Any) -> Any:
    """A value of a static field for JSON; raises DTypeError where JSON has no way to say it."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return [encode_static(entry) for entry in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise DTypeError(f"a static field holds a {type(value).__name__}", expected="a dtype, number, text or tuple")


def _decode_static(value: Any) -> Any:
    if isinstance(value, dict):
        return TORCH_DTYPES[str(value["dtype"])]
    return tuple(_decode_static(entry) for entry in value) if isinstance(value, list) else value


def flatten_tensor(name: str, value: QuantizedTensorStorage) -> tuple[dict[str, torch.Tensor], Described]:
    """The inner tensors of a quantized tensor by argument, in the dtypes of their bytes, and its description.

    Raises:
        UsageError: it holds no data.
    """
    inner, spec = value.flatten_storage()
    tensors = {}
    for declared, tensor in zip(value.inner_tensors, inner, strict=True):
        if tensor is not None:
            native = native_dtype(value, declared)
            tensors[declared.argument] = (tensor if native is None else tensor.view(native)).detach()
    if not tensors:
        raise UsageError(f"{name!r} holds no data", remedy="it was cleared or saved")
    static = zip(spec.cls.all_static_fields(), spec.static, strict=True)
    fields = {declared.argument: encode_static(entry) for declared, entry in static}
    return tensors, Described(_class_name(spec.cls), tuple(tensors), fields, _origin(value))


def unflatten_tensor(name: str, entry: Described, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensorStorage:
    """A quantized tensor of its inner tensors by argument; it remembers its origin.

    Raises:
        CheckpointError: the description does not fit its class, or that is not installed.
        OttavaError: the tensors do not fit together, in the words of the class.
    """
    cls = _find_class(name, entry)
    unknown = set(tensors) - {declared.argument for declared in cls.inner_tensors}
    if unknown or not tensors:
        what = f"{name!r} has {f'unknown tensors {sorted(unknown)!r:.80}' if unknown else 'no tensors'}"
        raise CheckpointError(what, expected="those of its class", remedy="the metadata is damaged")
    try:
        fields = {field.attribute: _decode_static(entry.static[field.argument]) for field in cls.all_static_fields()}
        if len(entry.static) != len(fields):
            raise ValueError(f"it has the fields {sorted(entry.static)!r:.200}")
        inner = [_held(declared, tensors.get(declared.argument), fields) for declared in cls.inner_tensors]
        built: Any = StorageSpec(cls, tuple(fields.values()), None).build(inner)
    except OttavaError as error:
        raise type(error)(f"{name!r}: {error.what}", expected=error.expected, remedy=error.remedy) from error
    except Exception as error:
        # A class of any author meets values that no code of its own has made.
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{name!r} cannot be restored: {why}", expected="what it was saved with") from error
    built._ottava_origin = entry.origin
    return built  # type: ignore[no-any-return]


def _held(declared: InnerTensor, tensor: torch.Tensor | None, fields: Mapping[str, Any]) -> torch.Tensor | None:
    """An inner tensor as a storage holds it: 8-bit data as uint8."""
    native = fields[declared.native] if isinstance(declared.native, str) else declared.native
    if tensor is None or native is None:
        return tensor
    if not isinstance(native, torch.dtype) or native.itemsize != 1 or tensor.dtype not in (native, torch.uint8):
        raise DTypeError(f"{declared.argument!r} is of {tensor.dtype}", expected=f"an 8-bit dtype, {native}")
    return tensor.view(torch.uint8)


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _origin(tensor: QuantizedTensorStorage) -> Mapping[str, Any]:
    """What quantized a tensor: its quantizer, or what the file said that it was loaded from."""
    if isinstance(tensor._quantizer, Quantizer):
        return origin_of_quantizer(tensor._quantizer)
    return getattr(tensor, "_ottava_origin", None) or _distribution(type(tensor).__module__)


def origin_of_quantizer(quantizer: Quantizer) -> Mapping[str, Any]:
    """The class of a quantizer, its distribution, and what tells it from others of the class: plain values that are
    neither learnt nor a process's own."""
    not_options = {"rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm", *quantizer.process_attributes}
    options: dict[str, Any] = {}
    for name, value in sorted(vars(quantizer).items() if not quantizer.stateful else ()):
        if name not in not_options and name[0] != "_" and value is not None:
            with contextlib.suppress(DTypeError):
                options[name] = encode_static(value)
    found = {"quantizer": _class_name(type(quantizer)), **_distribution(type(quantizer).__module__)}
    return found | ({"options": options} if options else {})


@functools.cache
def _distribution(module: str) -> dict[str, str]:
    """Name and version of the distribution that has a module; nothing for modules of none, or of several."""
    found = set(importlib.metadata.packages_distributions().get(module.partition(".")[0], []))
    return {"package": min(found), "version": importlib.metadata.version(min(found))} if len(found) == 1 else {}


def _find_class(name: str, entry: Described) -> type[QuantizedTensorStorage]:
    """The class of a described tensor, which was imported or which an installed recipe brings: nothing else is imported
    because a file says so."""
    module, _, attribute = entry.cls.partition(":")
    package = module.partition(".")[0]
    if entry.cls not in storage_classes():
        # A broken plugin, where all are required, must not keep a file from being read.
        statuses: list[Any] = []
        with contextlib.suppress(OttavaError):
            statuses = plugin_statuses()
        modules = [spec.factory.partition(":")[0] for status in statuses for spec in status.recipes]
        brings = [place for place in modules if place.partition(".")[0] == package]
        for place in (*brings, module) if brings else ():
            # A module may make its classes when asked; one that cannot be imported is reported as the missing class.
            with contextlib.suppress(Exception, SystemExit):
                getattr(importlib.import_module(place), attribute, None)
    found = storage_classes().get(entry.cls)
    if found is None:
        where = f"{entry.origin.get('package') or f'the distribution of {package!r}'} {entry.origin.get('version', '')}"
        what = f"{name!r} is a {entry.cls!r:.200}, which is not installed"
        raise CheckpointError(what, expected="its package", remedy=f"install {where.rstrip()}")
    return found
