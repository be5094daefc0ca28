"""A nested state as a tree of JSON, in which names stand for tensors.

Each node of the tree is a dict with one key, its kind::

    {"weight": tensor, "step": 3}  <->  {"dict": [["weight", {"tensor": "weight"}],
                                                  ["step", {"value": 3}]]}
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ottava.checkpoint.files import DTYPES, dtype_name
from ottava.checkpoint.flatten import Value
from ottava.errors import DTypeError, UsageError
from ottava.tensors.storage import QuantizedTensorStorage

#: A node of a tree.
Node = dict[str, object]
#: Kinds of nodes with entries -> the function that makes the container.
_CONTAINERS: dict[object, Callable[..., object]] = {"dict": dict, "list": list, "tuple": tuple}


def encoded(value: object, tensors: dict[str, Value], path: tuple[object, ...] = ()) -> Node:
    """A nested state as a tree; the tensors are added to ``tensors``."""
    name = ".".join(map(str, path))
    if len(path) > 100:
        raise DTypeError(f"{name[:50]!r} is nested too deep", expected="up to 100 levels")
    if isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
        if name in tensors:
            raise UsageError(
                f"two tensors would have the name {name!r}", remedy="rename one of them"
            )
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise DTypeError(
                    f"{name!r} has the key {key!r}", expected="text and integers as keys"
                )
        pairs = [[key, encoded(entry, tensors, (*path, key))] for key, entry in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        entries = [encoded(entry, tensors, (*path, number)) for number, entry in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": entries}
    return {"value": _encoded_leaf(name, value)}


def _encoded_leaf(name: str, value: object) -> object:
    """A value that is no tensor and no container as JSON."""
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}  # JSON has no infinities and no NaN
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise DTypeError(
        f"{name!r} is a {type(value).__name__}",
        expected="a tensor, number, text, bool, None or torch.dtype, or a dict, list or tuple of "
        "them",
        remedy="leave it out",
    )


class _NodeParts(NamedTuple):
    """A node of a tree.

    Attributes:
        kind: the kind: ``"tensor"``, ``"value"`` or a container.
        content: the name of a tensor, a value, or the entries as JSON.
        entries: the entries of a container, by key; empty for tensors and values.
    """

    kind: object
    content: object
    entries: dict[object, object]


def _parts_of(node: object) -> _NodeParts:
    """The parts of a node; TypeError or ValueError if it is no node."""
    if not isinstance(node, dict):
        raise TypeError("a node is no dict")
    ((kind, content),) = node.items()
    if kind == "dict":
        return _NodeParts(kind, content, dict(content))
    if kind in _CONTAINERS:
        return _NodeParts(kind, content, dict(enumerate(content)))
    return _NodeParts(kind, content, {})


def decoded(node: object, tensors: Mapping[str, Value]) -> object:
    """The nested state of a tree with ``tensors`` by name; KeyError, TypeError or ValueError if the
    tree is invalid."""
    kind, content, entries = _parts_of(node)
    if kind == "tensor":
        if not isinstance(content, str):
            raise TypeError("the name of a tensor is no text")
        return tensors[content]
    if kind == "value":
        return _decoded_leaf(content)
    values = {key: decoded(entry, tensors) for key, entry in entries.items()}
    container = _CONTAINERS[kind]
    return container(values if kind == "dict" else values.values())


def _decoded_leaf(content: object) -> object:
    if not isinstance(content, dict):
        return content
    ((special, text),) = content.items()
    if special == "float":
        return float(text)
    return DTYPES[text]


def leaves_of(node: object, path: str = "") -> dict[str, Node]:
    """Tensors, values and empty containers in a tree, by their names in error messages."""
    entries = _parts_of(node).entries
    if not entries and isinstance(node, dict):
        return {path.removeprefix("."): node}
    leaves: dict[str, Node] = {}
    for key, entry in entries.items():
        leaves |= leaves_of(entry, f"{path}.{key}")
    return leaves


def _has_tensors(node: object) -> bool:
    return any("tensor" in leaf for leaf in leaves_of(node).values())


def merged(target: object, saved: object) -> object:
    """The target tree with the values of a saved tree.

    Tensors, and entries that only the target has, stay.
    """
    target_parts, saved_parts = _parts_of(target), _parts_of(saved)
    kind = target_parts.kind
    has_tensors = _has_tensors(target) or _has_tensors(saved)
    same_kind = kind == saved_parts.kind and kind in _CONTAINERS
    same_length = len(target_parts.entries) == len(saved_parts.entries)
    # Lists and tuples of other lengths are merged only for the sake of their tensors.
    if not same_kind or not (kind == "dict" or has_tensors or same_length):
        return target if has_tensors else saved
    entries = dict(target_parts.entries)
    for key, entry in saved_parts.entries.items():
        if key in target_parts.entries:
            entries[key] = merged(target_parts.entries[key], entry)
        elif not _has_tensors(entry):
            entries[key] = entry
    if kind == "dict":
        return {"dict": list(entries.items())}
    return {kind: list(entries.values())}
