"""The table of aten operators on quantized tensors, and the fallback for operators that are not in
it.

The table has functions by class and operator. An operator is looked up in the class of the tensor,
then in its bases. The fallback dequantizes the arguments, computes, and quantizes into the
arguments that the operator has written to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from ottava.errors import UsageError
from ottava.tensors.slots import above
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import tree_map, writes_of


class AtenOp(Protocol):
    """An overload of an aten operator, as torch dispatches it."""

    def name(self) -> str: ...

    # Any, because an operator returns what its schema says.
    def __call__(self, *args: object, **kwargs: object) -> Any: ...


#: ``function(op, *args, **kwargs)``.
Implementation = Callable[..., object]
ImplementationT = TypeVar("ImplementationT", bound=Implementation)
_TABLES: dict[type, dict[AtenOp, Implementation]] = {}


def implements(cls: type, *ops: AtenOp) -> Callable[[ImplementationT], ImplementationT]:
    """Register ``function(op, *args, **kwargs)`` for aten overloads on ``cls`` and its subclasses.

    Returning ``NotImplemented`` falls through to the next class of the hierarchy, then to the
    fallback.
    """

    def register(function: ImplementationT) -> ImplementationT:
        _TABLES.setdefault(cls, {}).update(dict.fromkeys(ops, function))
        return function

    return register


def dispatch(cls: type, op: AtenOp, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The result of an operator on a tensor of ``cls``: by the table, or else by the fallback."""
    for ancestor in cls.__mro__:
        function = _TABLES.get(ancestor, {}).get(op)
        if function is None:
            continue
        result = function(op, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return _dequantize_and_run(op, args, kwargs)


class _PlainCopies:
    """Dequantized copies of quantized tensors.

    There is one copy for each object, so that an operator that is given one tensor twice still sees
    one.

    Attributes:
        values: the copies, by the ids of the objects.
        owners: these objects, by their ids.
    """

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.owners: dict[int, QuantizedTensorStorage] = {}

    def of(self, argument: object) -> object:
        """The copy of a quantized tensor; other arguments themselves."""
        if not isinstance(argument, QuantizedTensorStorage):
            return argument
        key = id(argument)
        if key not in self.values:
            self.values[key] = argument.dequantize()
            self.owners[key] = argument
        return self.values[key]


def _dequantize_and_run(op: AtenOp, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Dequantize, compute, and quantize into the arguments that were written to."""
    if op.name().startswith("c10d::"):
        # The schema of a collective does not say what it writes.
        raise _collective_refusal(op)
    copies = _PlainCopies()
    plain_args, plain_kwargs = tree_map(copies.of, args), tree_map(copies.of, kwargs)
    places = writes_of(op)
    if places is not None:
        result = op(*plain_args, **plain_kwargs)
        arguments = arguments_at(places, args, kwargs)
        targets = {id(t): t for t in arguments if isinstance(t, QuantizedTensorStorage)}
        returned = targets
    else:
        # Torch shows no schemas: arguments that changed were written to, and any may be returned.
        before = {key: values.clone() for key, values in copies.values.items()}
        result = op(*plain_args, **plain_kwargs)
        changed = [k for k, v in before.items() if not _have_same_bits(v, copies.values[k])]
        targets = {key: copies.owners[key] for key in changed}
        returned = copies.owners
    _quantize_into(targets, copies.values)
    if not returned:
        return result
    # An in-place operator returns its own argument: give back the quantized one.
    quantized = {id(copies.values[key]): owner for key, owner in returned.items()}
    return tree_map(lambda leaf: quantized.get(id(leaf), leaf), result)


def _collective_refusal(op: AtenOp) -> UsageError:
    return UsageError(
        f"the collective {op.name()} was called with a quantized tensor",
        expected="plain tensors: its data and scales, or its values",
        remedy="load whole state dicts into sharded models with broadcast_from_rank0=True, or with "
        "ottava.checkpoint.load_sharded; shard weights by fully_shard, as no tensor parallel plan "
        "can",
    )


def arguments_at(
    places: Sequence[tuple[int, str]], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[object]:
    """The arguments at these positions, or of these names; the entries of lists one by one."""
    for position, name in places:
        argument = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(argument, (list, tuple)):
            yield from argument
        else:
            yield argument


def _quantize_into(
    targets: Mapping[int, QuantizedTensorStorage], values: Mapping[int, torch.Tensor]
) -> None:
    """Quantize new values into tensors; both are by the ids of the tensors."""
    groups = [getattr(tensor, "_shard_group", None) for tensor in targets.values()]
    if len(targets) > 1 and any(group is not None for group in groups):
        # One collective serves all shards whose scales are shared.
        above("batches").requantize([(tensor, values[key]) for key, tensor in targets.items()])
        return
    for key, tensor in targets.items():
        tensor.quantize_(values[key])


def _have_same_bits(values: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and bits, NaN included."""
    if values.shape != others.shape:
        return False
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (values, others)))
