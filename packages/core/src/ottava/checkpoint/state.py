"""Nested states as JSON: what is not a tensor, and the names of what is.

Every node is a dict with one key that says what it is, so that nothing a state holds can be taken for something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ottava.checkpoint.files import TORCH_DTYPES
from ottava.errors import DTypeError
from ottava.tensors.storage import QuantizedTensorStorage

_DEPTH = 100


def _name(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def encode_tree(value: Any, take: Callable[[str, Any], None], path: tuple[Any, ...] = ()) -> Any:
    """A nested state as JSON; tensors are handed to ``take`` and leave their names.

    Raises:
        DTypeError: a value is of no kind that JSON could say; it is named.
    """
    if len(path) > _DEPTH:
        raise DTypeError(f"{_name(path[:5])!r} is nested too deep", expected=f"up to {_DEPTH} levels")
    if isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
        take(_name(path), value)
        return {"tensor": _name(path)}
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise DTypeError(f"{_name(path)!r} has the key {key!r}", expected="text and integers as keys")
        return {"dict": [[key, encode_tree(entry, take, (*path, key))] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode_tree(entry, take, (*path, number)) for number, entry in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"value": {"dtype": str(value).removeprefix("torch.")}}
    if isinstance(value, float):
        # JSON has no infinities and no NaN.
        return {"value": float(value) if math.isfinite(value) else {"float": str(float(value))}}
    if value is None or isinstance(value, (bool, int, str)):
        return {"value": value}
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
    if isinstance(value, dict):
        ((special, text),) = value.items()
        return float(text) if special == "float" else TORCH_DTYPES[text]
    return value


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The leaves of a tree, tensors, values and empty containers, by the names that errors give them."""
    ((kind, value),) = tree.items()
    if kind in ("tensor", "value") or not value:
        return {_name(path): tree}
    entries = value if kind == "dict" else enumerate(value)
    return {name: leaf for key, entry in entries for name, leaf in leaves(entry, (*path, key)).items()}


def _tensors(tree: Any) -> list[str]:
    return [leaf["tensor"] for leaf in leaves(tree).values() if "tensor" in leaf]


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
        if kind == other == "dict":
            found, entries = dict(theirs), []
            for key, entry in mine:
                if key in found:
                    entries.append([key, self._merged(entry, found.pop(key), (*path, key))])
                else:
                    entries.append([key, entry])
                    self.missing += leaves(entry, (*path, key))
            self.unexpected += [name for entry in found.values() for name in _tensors(entry)]
            return {"dict": entries + [[key, entry] for key, entry in found.items() if not _tensors(entry)]}
        if kind == other and kind in ("list", "tuple") and len(mine) == len(theirs):
            pairs = enumerate(zip(mine, theirs, strict=True))
            return {kind: [self._merged(a, b, (*path, number)) for number, (a, b) in pairs]}
        ours, names = _tensors(target), _tensors(saved)
        if kind == other == "tensor" or not (ours or names):
            return target if ours else saved
        self.missing += ours or [_name(path)]
        self.unexpected += names
        return target
