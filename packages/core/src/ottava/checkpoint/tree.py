"""Nested states as JSON: what is not a tensor, and the names of what is.

Every node is a dict with one key that says what it is, so that nothing a state holds can be taken for something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ottava.checkpoint.header import TORCH_DTYPES
from ottava.errors import DTypeError
from ottava.tensors.storage import QuantizedTensorStorage

_DEPTH = 100


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(key) for key in path)


def encode_tree(state: Any, take: Callable[[str, Any], None]) -> Any:
    """A nested state as JSON; tensors are handed to ``take`` and leave their names.

    Raises:
        DTypeError: a value is of no kind that JSON could say; it is named.
    """
    return _encode(state, (), take)


def _encode(value: Any, path: tuple[Any, ...], take: Callable[[str, Any], None]) -> Any:
    if len(path) > _DEPTH:
        raise DTypeError(f"{_name(path[:5])!r} is nested too deep", expected=f"up to {_DEPTH} levels")
    if isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
        take(_name(path), value)
        return {"tensor": _name(path)}
    if isinstance(value, Mapping):
        entries = []
        for key, entry in value.items():
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise DTypeError(f"{_name(path)!r} has the key {key!r}", expected="text and integers as keys")
            entries.append([str(key) if isinstance(key, str) else int(key), _encode(entry, (*path, key), take)])
        return {"dict": entries}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(entry, (*path, number), take) for number, entry in enumerate(value)]}
    return {"value": _encode_value(value, path)}


def _encode_value(value: Any, path: Sequence[Any]) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, float):
        # JSON has no infinities and no NaN.
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str(value)
    raise DTypeError(
        f"{_name(path)!r} is a {type(value).__name__}",
        expected="a tensor, number, text, bool, None or torch.dtype, or a dict, list or tuple of them",
        remedy="leave it out, or save what it is made of",
    )


def decode_tree(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """The nested state that a tree stands for, with ``tensors`` by name in it.

    Raises:
        KeyError, TypeError, ValueError: the tree is none.
    """
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: decode_tree(entry, tensors) for key, entry in value}
    if kind in ("list", "tuple"):
        entries = [decode_tree(entry, tensors) for entry in value]
        return tuple(entries) if kind == "tuple" else entries
    if kind != "value":
        raise ValueError(f"no kind of value: {kind!r}")
    if not isinstance(value, dict):
        return value
    ((special, text),) = value.items()
    if special == "float":
        return float(text)
    dtype = TORCH_DTYPES.get(str(text)) if special == "dtype" else None
    if dtype is None:
        raise ValueError(f"no dtype {text!r}")
    return dtype


def tensor_names(tree: Any) -> list[str]:
    """The names of the tensors in a tree."""
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return [value]
    if kind == "dict":
        return [name for _, entry in value for name in tensor_names(entry)]
    return [name for entry in value for name in tensor_names(entry)] if kind in ("list", "tuple") else []


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The leaves of a tree, tensors, values and empty containers, by the names that errors give them."""
    ((kind, value),) = tree.items()
    if kind in ("tensor", "value") or not value:
        return {_name(path): tree}
    entries = value if kind == "dict" else enumerate(value)
    return {name: leaf for key, entry in entries for name, leaf in leaves(entry, (*path, key)).items()}


class Merge:
    """A tree to load into, with the values of a tree that was saved in the place of its own.

    Values that only the saved tree has are taken over. Tensors stay those of the target.

    Attributes:
        tree: the result.
        missing: names of what only the target has, and keeps.
        unexpected: names of tensors that only the saved tree has; they have no place in the result.
    """

    def __init__(self, target: Any, saved: Any) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.tree = self._merged(target, saved, ())

    def _merged(self, target: Any, saved: Any, path: tuple[Any, ...]) -> Any:
        ((kind, mine),), ((other, theirs),) = target.items(), saved.items()
        ours, names = tensor_names(target), tensor_names(saved)
        if kind == "dict" and other == "dict":
            return self._merged_dict(mine, theirs, path)
        if kind == other and kind in ("list", "tuple") and len(mine) == len(theirs):
            pairs = enumerate(zip(mine, theirs, strict=True))
            return {kind: [self._merged(a, b, (*path, number)) for number, (a, b) in pairs]}
        if kind == other == "tensor" or not (ours or names):
            return target if ours else saved
        self.missing += ours or [_name(path)]
        self.unexpected += names
        return target

    def _merged_dict(self, mine: Any, theirs: Any, path: tuple[Any, ...]) -> Any:
        saved = dict(theirs)
        entries = []
        for key, entry in mine:
            if key in saved:
                entries.append([key, self._merged(entry, saved.pop(key), (*path, key))])
            else:
                entries.append([key, entry])
                self.missing += list(leaves(entry, (*path, key)))
        for key, entry in saved.items():
            names = tensor_names(entry)
            self.unexpected += names
            if not names:
                entries.append([key, entry])
        return {"dict": entries}
