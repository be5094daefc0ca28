"""Nested states as JSON: what is not a tensor, and the names of what is.

Every node is a dict with one key that says what it is, so that nothing a state holds can be taken for something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ottava.checkpoint.files import TORCH_DTYPES, dtype_name
from ottava.errors import DTypeError, UsageError
from ottava.tensors.storage import QuantizedTensorStorage


def encode_tree(value: Any, tensors: dict[str, Any], path: tuple[Any, ...] = ()) -> Any:
    """A nested state as JSON; tensors are added to ``tensors`` and leave their names.

    Raises:
        DTypeError: a value is of no kind that JSON could say; it is named.
        UsageError: two tensors would have one name.
    """
    name = ".".join(map(str, path))
    if len(path) > 100:
        raise DTypeError(f"{name[:50]!r} is nested too deep", expected="up to 100 levels")
    if isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
        if name in tensors:
            raise UsageError(f"two tensors would have the name {name!r}", remedy="rename one of them")
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise DTypeError(f"{name!r} has the key {key!r}", expected="text and integers as keys")
        return {"dict": [[key, encode_tree(entry, tensors, (*path, key))] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode_tree(entry, tensors, (*path, number)) for number, entry in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"value": {"dtype": dtype_name(value)}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"value": {"float": str(float(value))}}  # JSON has no infinities and no NaN
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    expected = "a tensor, number, text, bool, None or torch.dtype, or a dict, list or tuple of them"
    raise DTypeError(f"{name!r} is a {type(value).__name__}", expected=expected, remedy="leave it out")


def decode_tree(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """The nested state of a tree with ``tensors`` by name; KeyError, TypeError or ValueError where it is none."""
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: decode_tree(entry, tensors) for key, entry in value}
    if kind in ("list", "tuple"):
        entries = [decode_tree(entry, tensors) for entry in value]
        return tuple(entries) if kind == "tuple" else entries
    if kind == "value" and isinstance(value, dict):
        ((special, text),) = value.items()
        return float(text) if special == "float" else TORCH_DTYPES[text]
    return {"value": value}[kind]


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a tree, tensors, values and empty containers, by the names that errors give them."""
    ((kind, value),) = tree.items()
    if kind in ("tensor", "value") or not value:
        return {path.removeprefix("."): tree}
    entries = value if kind == "dict" else enumerate(value)
    return {name: leaf for key, entry in entries for name, leaf in leaves(entry, f"{path}.{key}").items()}


def tensors_in(tree: Any) -> list[str]:
    """The names of the tensors in a tree."""
    return [leaf["tensor"] for leaf in leaves(tree).values() if "tensor" in leaf]


def merge_trees(target: Any, saved: Any) -> Any:
    """A tree to load into, with the values of a tree that was saved in the place of its own.

    Values that only the saved tree has are taken over, tensors are not. What only the target has it keeps.
    """
    ((kind, mine),), ((other, theirs),) = target.items(), saved.items()
    tensors = bool(tensors_in(target) or tensors_in(saved))
    if kind == other == "dict" or (kind == other in ("list", "tuple") and (tensors or len(mine) == len(theirs))):
        ours, found = (dict(of if kind == "dict" else enumerate(of)) for of in (mine, theirs))
        made = {key: merge_trees(entry, found[key]) if key in found else entry for key, entry in ours.items()}
        made |= {key: entry for key, entry in found.items() if key not in ours and not tensors_in(entry)}
        return {kind: list(made.items() if kind == "dict" else made.values())}
    return target if tensors else saved
