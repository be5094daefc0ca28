"""State dicts with quantized tensors as plain tensors by name, for whatever takes such, by the storage declaration.

A quantized tensor ``layer.weight`` becomes ``layer.weight.<argument>`` for each inner tensor held, in the dtype that
its bytes have, so that other tools read them. Of a sharded one, inner tensors that are gathered are sharded as it is,
in rows or blocks of rows; those that serve every usage are equal on all ranks; those that derive from others, a
transpose for example, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ottava.checkpoint.description import Described, Description, flatten_tensor, unflatten_tensor
from ottava.checkpoint.files import METADATA_KEY, check_dense
from ottava.errors import CheckpointError, DTypeError, ShapeError, UsageError
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Plain tensors by name, and the metadata with which :func:`unflatten_state_dict` restores what they came from.

    A sharded tensor becomes sharded plain tensors with the same mesh and placements. The metadata also says which
    quantizer, of which version of which package, made each tensor; for tensors that were loaded, what the file said.

    Raises:
        DTypeError: a value is not a tensor, or nested, jagged, sparse or of a dtype that safetensors does not have.
        UsageError: two tensors would have one name, or a quantized tensor holds no data.
        ShapeError, UsageError: the inner tensors of a sharded quantized tensor cannot be sharded as it is.
    """
    tensors, description = described_state(state_dict)
    return tensors, {METADATA_KEY: description.encode()}


def described_state(state_dict: Mapping[str, Any], *, once: bool = False) -> tuple[dict[str, Any], Description]:
    """As :func:`flatten_state_dict`, with the description before it is text.

    Args:
        state_dict: tensors by name.
        once: whether a tensor that is wholly another one, earlier in the state, is an alias of that.
    """
    if not isinstance(state_dict, Mapping):
        raise DTypeError(f"the state dict is a {type(state_dict).__name__}", expected="a mapping of names to tensors")
    tensors: dict[str, torch.Tensor] = {}
    quantized: dict[str, Described] = {}
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
            raise DTypeError(f"{name!r} is a {type(value).__name__}", expected="a state dict of tensors by name")
        if once and hasattr(value, "to_local"):
            remedy = "save with save_sharded, or gather them: get_model_state_dict with full_state_dict=True"
            raise DTypeError(f"{name!r} is sharded", expected="whole tensors", remedy=remedy)
        made, entry = flatten_value(name, value, derived=not hasattr(value, "to_local"))
        add_tensors(tensors, made)
        if entry is not None:
            quantized[name] = entry
    seen: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items() if once else ():
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if (first := seen.setdefault(place, name)) != name:
                aliases[name] = first
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, Description(quantized, aliases)


def add_tensors(tensors: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    """Add tensors by name; raises UsageError where there is one of that name."""
    for name, tensor in more.items():
        if name in tensors:
            raise UsageError(f"two tensors would have the name {name!r}", remedy="rename one of them")
        tensors[name] = tensor


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
    left: dict[str, Any] = dict(tensors)
    state: dict[str, Any] = {}
    at = {name: number for number, name in enumerate(tensors)}
    for alias, stored in description.aliases.items():
        if stored not in tensors or alias in tensors:
            what = (
                f"{alias!r} is said to be {stored!r}, which is {'stored beside it' if stored in tensors else 'missing'}"
            )
            raise CheckpointError(what, expected="one of them", remedy="the metadata is damaged")
        left[alias], at[alias] = tensors[stored], len(at)
    for name, entry in description.quantized.items():
        keys = {argument: f"{name}.{argument}" for argument in entry.tensors}
        if missing := [key for key in keys.values() if key not in left]:
            what = f"tensor {missing[0]!r} is missing"
            raise CheckpointError(what, expected=f"every inner tensor of {name!r}")
        at[name] = min((at[key] for key in keys.values()), default=0) if name not in at else at[name]
        state[name] = unflatten_tensor(name, entry, {argument: left.pop(key) for argument, key in keys.items()})
    if both := set(left) & set(state):
        raise CheckpointError(f"{min(both)!r} is both a tensor and a quantized one", expected="one tensor of a name")
    # In the order of the file.
    return dict(sorted((left | state).items(), key=lambda item: at[item[0]]))


def flatten_value(name: str, value: Any, *, derived: bool) -> tuple[dict[str, torch.Tensor], Described | None]:
    """A tensor as plain ones by name, sharded as it is; nothing is copied.

    Args:
        name: its name.
        value: plain, quantized, or sharded (a DTensor) with a plain or quantized tensor on each rank.
        derived: whether what derives from the elements of a quantized tensor is among them.

    Returns:
        Tensors by name, and what the quantized tensor is; None where it is not quantized.

    Raises:
        DTypeError: it is nested, jagged, sparse, on meta, or of a dtype that files do not have.
        ShapeError, UsageError: it is sharded in a way that no file could be resharded from.
    """
    sharded = hasattr(value, "to_local")
    with torch.no_grad():
        local: Any = value.to_local() if sharded else value
        # The plain tensor in which a wrapper keeps a weight in high precision that it gathers quantized.
        unwrap = getattr(local, "high_precision", None)
        local = unwrap() if callable(unwrap) and isinstance(local, torch.Tensor) else local
        if not isinstance(local, QuantizedTensorStorage):
            check_dense(name, local)
            return {name: _sharded(name, value, local, tuple(value.shape))[0] if sharded else local.detach()}, None
        held, described = flatten_tensor(name, local)
        declared = {inner.argument: inner for inner in local.inner_tensors if inner.argument in held}
        if not derived and not any(inner.gather for inner in declared.values()):
            what = f"{name!r} holds only what derives from its elements"
            raise UsageError(what, expected="rowwise data", remedy="keep the rowwise usage of weights")
        kept = {a: held[a] for a, inner in declared.items() if derived or not local.is_derived(inner)}
        static = dict(described.static)
        if sharded:
            offsets = _box(name, value)
            if "shape" in static:
                static["shape"] = list(value.shape)
            for argument in [argument for argument in kept if declared[argument].gather]:
                inner, tensor = declared[argument], kept[argument]
                rows, first = sharded_rows(name, inner, tensor, tuple(local.shape), tuple(value.shape), offsets)
                kept[argument], begin = _sharded(name, value, tensor, (rows, *tensor.shape[1:]))
                if tensor.numel() and begin[0] != first:
                    what = f"the shards of {name!r} are no shards of {argument!r}"
                    raise ShapeError(what, expected="as many blocks on each rank but the last")
        described = replace(described, tensors=tuple(kept), static=static)
        return {f"{name}.{argument}": tensor.detach() for argument, tensor in kept.items()}, described


def _sharded(name: str, value: Any, local: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, Sequence[int]]:
    """A tensor of the mesh and placements of another one, and where in it this rank's shard begins."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    made = type(value).from_local(
        local.detach(), value.device_mesh, value.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return made, _box(name, made)


def _box(name: str, value: Any) -> Sequence[int]:
    """Where in a sharded tensor this rank's box begins."""
    try:
        (box,) = value.__create_chunk_list__()
        fits = tuple(box.sizes) == tuple(value.to_local().shape) and not any(p.is_partial() for p in value.placements)
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{name!r} cannot be saved in shards: {error}", expected="a sharded or replicated DTensor"
        ) from error
    if not fits:
        what = f"{name!r} is sharded in a way that makes no single box of it on this rank: {value.placements}"
        raise UsageError(what, expected="shards and replicas over a mesh with all ranks")
    return tuple(box.offsets)


def sharded_rows(
    name: str,
    inner: InnerTensor,
    tensor: torch.Tensor,
    local: Sequence[int],
    shape: Sequence[int],
    offsets: Sequence[int],
) -> tuple[int, int]:
    """Rows that an inner tensor of the whole has, and the first one of this rank's shard of it.

    Args:
        name: of the quantized tensor, for errors.
        inner: the declaration.
        tensor: this rank's inner tensor.
        local: shape of this rank's shard of the quantized tensor.
        shape, offsets: shape of the whole, and where in it the shard begins.

    Raises:
        ShapeError: the shards are not of rows, or cut blocks of rows in two.
    """
    if any(offset for offset in offsets[1:]) or tuple(local[1:]) != tuple(shape[1:]):
        raise ShapeError(f"{name!r} is sharded in columns", expected="shards of dimension 0")
    if inner.block_rows is None:
        rows, first, own = shape[0], offsets[0], local[0]
    else:
        each, block = math.prod(shape[1:-1]), inner.block_rows
        begin, end = offsets[0] * each, (offsets[0] + local[0]) * each
        # Of an empty shard nothing is cut, wherever it begins.
        if local[0] and (begin % block or (end % block and offsets[0] + local[0] != shape[0])):
            raise ShapeError(
                f"the shards of {name!r} have {local[0] * each} rows, which cut the blocks of {inner.argument!r}",
                expected=f"a multiple of {block} on each",
                remedy="shard over fewer ranks, or keep this weight in high precision: it is quantized when it is used",
            )
        rows, first, own = (-(-n // block) for n in (shape[0] * each, begin, end - begin))
    if tensor.shape[0] != own:
        raise ShapeError(f"{inner.argument!r} of {name!r} has {tensor.shape[0]} rows", expected=str(own))
    return rows, first
