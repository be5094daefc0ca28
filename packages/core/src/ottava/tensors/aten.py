"""The table of aten ops on quantized tensors.

An op on a quantized tensor is one small function registered for one overload (:func:`implements`), looked up along
the class hierarchy, so that a subclass extends or overrides the table. What is not in it is dequantized, computed
and, for every argument that the op's schema says it writes, quantized again.
"""

from collections.abc import Callable
from typing import Any

import torch

from ottava.errors import UsageError
from ottava.tensors.slots import above
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import schema_of, tree_map

OpImplementation = Callable[..., Any]
_TABLES: dict[type, dict[Any, OpImplementation]] = {}


def implements(cls: type, *ops: Any) -> Callable[[OpImplementation], OpImplementation]:
    """Register ``function(op, *args, **kwargs)`` for aten overloads on ``cls`` and its subclasses.

    Returning ``NotImplemented`` falls through to the next class of the hierarchy, then to the fallback.
    """

    def register(function: OpImplementation) -> OpImplementation:
        table = _TABLES.setdefault(cls, {})
        for op in ops:
            table[op] = function
        return function

    return register


def dispatch(cls: type, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` by the table of ``cls``, else by dequantizing."""
    for ancestor in cls.__mro__:
        function = _TABLES.get(ancestor, {}).get(op)
        result = NotImplemented if function is None else function(op, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return dequantize_and_run(op, args, kwargs)


def dequantize_and_run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dequantize, compute, and quantize into whatever the schema says is written.

    Raises:
        UsageError: a collective, whose schema does not say what it writes.
    """
    if op.namespace == "c10d":
        what = f"the collective {schema_of(op).name} was called with a quantized tensor"
        load = "load whole state dicts into sharded models with broadcast_from_rank0=True, or with "
        expected, remedy = "plain tensors: its data and scales, or its values", f"{load}ottava.checkpoint.load_sharded"
        raise UsageError(what, expected=expected, remedy=remedy)
    plain: dict[int, torch.Tensor] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, QuantizedTensorStorage):
            return value
        # One dequantized copy per object, so that an op given the same tensor twice still sees one.
        if id(value) not in plain:
            plain[id(value)] = value.dequantize()
        return plain[id(value)]

    result = op(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    written = _written(op, args, kwargs)
    if len(written) > 1 and any(getattr(value, "_shard_group", None) is not None for value in written):
        # Shards: one collective serves all whose scales are shared.
        above("rules").requantize([(value, plain[id(value)]) for value in written])
    else:
        for value in written:
            value.quantize_(plain[id(value)])
    returned: dict[int, Any] = {id(plain[id(value)]): value for value in written}
    if not returned:
        return result
    # An in-place op returns its own argument: hand back the quantized one.
    return tree_map(lambda r: returned.get(id(r), r) if isinstance(r, torch.Tensor) else r, result)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found: dict[int, Any] = {}
    for position, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            entries = value if isinstance(value, (list, tuple)) else (value,)
            found |= {id(entry): entry for entry in entries if isinstance(entry, QuantizedTensorStorage)}
    return list(found.values())
