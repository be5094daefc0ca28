"""The arguments of a model's call as data.

Nested lists, mappings and plain values become JSON, which refers to tensors by name.
"""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ottava.checkpoint.files import DTYPES, dtype_name
from ottava.errors import CheckpointError, DTypeError

_MAX_DEPTH = 64
_EXPECTED = "tensors, numbers, texts, None, and lists, tuples and mappings of these"


def flatten(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """The JSON description of a value; copies of its tensors are added to ``tensors``.

    The tensors' names begin with ``name``. A mapping becomes a dict, and a named tuple a tuple.

    Raises:
        DTypeError: the value contains an object of another kind; the error says where.
    """
    if depth > _MAX_DEPTH:
        raise DTypeError(f"{name} is nested more than {_MAX_DEPTH} times", expected=_EXPECTED)
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().to("cpu", copy=True)
        return {"tensor": name, "requires_grad": value.requires_grad}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": repr(value)}  # JSON has no NaN
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [flatten(v, f"{name}.{i}", tensors, depth + 1) for i, v in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            "dict": {
                key: flatten(v, f"{name}.{key}", tensors, depth + 1) for key, v in value.items()
            }
        }
    raise DTypeError(
        f"{name} is a {type(value).__name__}", expected=_EXPECTED, remedy="pass what it is made of"
    )


def unflatten(data: Any, tensors: Mapping[str, torch.Tensor], device: Any, depth: int = 0) -> Any:
    """The value that :func:`flatten` described, with its tensors copied to ``device``.

    Raises:
        CheckpointError: ``data`` is not such a description, or names a missing tensor.
    """
    if data is None or type(data) in (bool, int, str):
        return data
    kind, entry = next(iter(data.items())) if isinstance(data, dict) and data else (None, None)
    if depth > _MAX_DEPTH or kind not in _DECODERS:
        raise CheckpointError(
            f"an argument is described as {data!r:.80}", expected="what capture writes"
        )
    try:
        if kind == "tensor":
            tensor = tensors[str(entry)].to(device, copy=True)
            if tensor.dtype.is_floating_point:
                tensor.requires_grad_(data["requires_grad"] is True)
            return tensor
        return _DECODERS[kind](entry, lambda value: unflatten(value, tensors, device, depth + 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"an argument is described as {data!r:.80}", expected="what capture writes"
        ) from error


_DECODERS: dict[str | None, Any] = {
    "tensor": None,
    "float": lambda entry, decode: float(entry),
    "dtype": lambda entry, decode: DTYPES[entry],
    "list": lambda entry, decode: [decode(value) for value in entry],
    "tuple": lambda entry, decode: tuple(decode(value) for value in entry),
    "dict": lambda entry, decode: {key: decode(value) for key, value in entry.items()},
}


def ends(output: Any) -> Any:
    """A model's output, in which each of several tensors has its own autograd node.

    The gradient of one tensor then excludes the gradient through another one that was computed from
    it. Tensors in objects of other kinds stay as they are.
    """
    several = len([tensor for tensor in tensors_of(output) if tensor.requires_grad]) > 1
    return _ends(output) if several else output


def _ends(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.view_as(output) if output.requires_grad else output
    if isinstance(output, MutableMapping):
        result = copy.copy(output)
        for key, value in output.items():
            result[key] = _ends(value)
        return result
    if isinstance(output, (list, tuple)):
        values = [_ends(value) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    return output


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for entry in value.values() for tensor in tensors_of(entry)]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in tensors_of(entry)]
    return []
