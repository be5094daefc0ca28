"""State dicts of sharded, quantized and plain tensors as pieces of plain tensors, by the storage declaration.

A piece is what this rank has of a plain tensor: a box of the whole, sharing memory with the tensor it was taken from,
so that a checkpoint is written from pieces and read into them. Of a sharded quantized tensor, inner tensors that are
gathered are sharded as it is, in rows or blocks of rows; those that serve every usage are equal on all shards; those
that derive from others, a transpose for example, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ottava.checkpoint.header import DTYPE_NAMES
from ottava.checkpoint.inner import flatten_tensor
from ottava.checkpoint.pieces import as_bytes
from ottava.checkpoint.tree import encode_tree
from ottava.errors import DTypeError, OttavaError, ShapeError, UsageError
from ottava.tensors.freshness import bump_version
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage


@dataclass(frozen=True)
class Piece:
    """This rank's box of a tensor.

    Attributes:
        name: that of the tensor.
        tensor: the elements, sharing memory with where they came from, in the dtype that a file has.
        shape: that of the whole tensor.
        offsets: where in it the box begins.
        everywhere: whether every rank holds the whole, without a mesh that says so.
        of_shards: what must be equal on all ranks is a part of this sharded tensor.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    everywhere: bool = False
    of_shards: str | None = None


@dataclass
class FlatState:
    """A state as pieces by name, and the rest as JSON.

    Attributes:
        tree: the nested state with names in the place of tensors.
        pieces: the pieces of plain tensors.
        quantized: what the quantized tensors are, by name.
        storages: the live quantized tensors, of which the pieces are parts.
        values: the tensors as they are in the state.
        parts: the names of the pieces of each quantized tensor.
    """

    tree: Any = None
    pieces: dict[str, Piece] = field(default_factory=dict)
    quantized: dict[str, dict[str, Any]] = field(default_factory=dict)
    storages: dict[str, QuantizedTensorStorage] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, piece: Piece, path: str) -> None:
        """Take a piece in.

        Raises:
            UsageError: there is one of that name.
            DTypeError: the tensor has no values in memory, or a dtype that files do not have.
        """
        tensor = piece.tensor
        if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
            raise DTypeError(
                f"{path} is of {tensor.dtype} and {tensor.layout} on {tensor.device}",
                expected="a dense tensor with values, of a dtype that safetensors has",
            )
        if piece.name in self.pieces:
            raise UsageError(f"two tensors would have the name {piece.name!r}", remedy="rename one of them")
        self.pieces[piece.name] = piece

    def exchange(self, values: Mapping[str, torch.Tensor], done: list[str]) -> None:
        """Put new values into the pieces that have some, and so into the tensors of the state; ``values`` has the old.

        What derives from them, a transpose for example, is outdated then, and is made again where it is needed.

        Args:
            values: by name, of the shape and dtype of the pieces.
            done: takes the names of those that were exchanged, should one fail.
        """
        with torch.no_grad():
            for name, value in values.items():
                piece, given = as_bytes(self.pieces[name].tensor), as_bytes(value)
                before = piece.to(given.device, copy=True)
                piece.copy_(given)
                done.append(name)
                given.copy_(before)
        self._written(values)

    def undo(self, values: Mapping[str, torch.Tensor], done: Sequence[str]) -> None:
        """Put back what an :meth:`exchange` took, as far as that went."""
        with torch.no_grad():
            # Backwards: two names may be one tensor.
            for name in reversed(done):
                as_bytes(self.pieces[name].tensor).copy_(as_bytes(values[name]))
        self._written(values)

    def _written(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, storage in self.storages.items():
            if any(path in values for path in self.parts[name]):
                storage.mark_written()
                if isinstance(storage, torch.Tensor):
                    bump_version(storage)


def flatten_state(state: Any) -> FlatState:
    """A nested state as pieces and JSON; nothing is copied.

    Args:
        state: dicts, lists and tuples of tensors (sharded, quantized, plain), numbers, text, bools, None and dtypes.

    Raises:
        DTypeError: a value is something else; it is named.
        ShapeError, UsageError: a sharded quantized tensor has parts that no file could be resharded from.
    """
    if not isinstance(state, Mapping):
        raise DTypeError(f"the state is a {type(state).__name__}", expected="a dict")
    flat = FlatState()

    def take(name: str, value: Any) -> None:
        with torch.no_grad():
            _add_tensor(name, value, flat)
        flat.values[name] = value

    flat.tree = encode_tree(state, take)
    return flat


def _held(storage: QuantizedTensorStorage) -> list[InnerTensor]:
    return [inner for inner in storage.inner_tensors if getattr(storage, inner.attribute) is not None]


def _high_precision(local: Any) -> Any:
    """The plain tensor that a wrapper keeps its values in, or the tensor itself."""
    unwrap = getattr(local, "high_precision", None)
    return unwrap() if callable(unwrap) and isinstance(local, torch.Tensor) else local


def _add_tensor(name: str, value: Any, flat: FlatState) -> None:
    if not hasattr(value, "to_local"):
        local, shape, offsets = _high_precision(value), None, None
    else:
        local, (shape, offsets) = _high_precision(value.to_local()), _box(name, value)
    if isinstance(local, QuantizedTensorStorage):
        _add_quantized(name, local, shape, offsets, flat)
        return
    if shape is None or offsets is None:
        shape, offsets = tuple(local.shape), (0,) * local.dim()
        flat.add(Piece(name, local.detach(), shape, offsets, everywhere=True), name)
        return
    flat.add(Piece(name, local.detach(), shape, offsets), name)


def _box(name: str, value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the whole and offsets of this rank's box of a sharded tensor."""
    try:
        boxes = value.__create_chunk_list__()
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{name!r} cannot be saved in pieces: {error}", expected="a sharded or replicated DTensor"
        ) from error
    local = tuple(value.to_local().shape)
    if len(boxes) != 1 or tuple(boxes[0].sizes) != local:
        raise UsageError(
            f"{name!r} is sharded in a way that makes no single box of {local} on this rank: {value.placements}",
            expected="shards and replicas over a mesh with all ranks",
        )
    return tuple(value.shape), tuple(boxes[0].offsets)


def _described(name: str, local: QuantizedTensorStorage) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The inner tensors that are not derived, in the dtypes of files, by argument, and what the whole is."""
    tensors, described = flatten_tensor(name, local)
    entry = described.encode()
    kept = [inner.argument for inner in _held(local) if not local.is_derived(inner)]
    if not any(inner.gather for inner in _held(local)):
        raise UsageError(
            f"{name!r} holds only what derives from its elements",
            expected="rowwise data",
            remedy="keep the rowwise usage of weights",
        )
    entry["tensors"] = [argument for argument in entry["tensors"] if argument in kept]
    return {argument: tensors[argument] for argument in kept}, entry


def _add_quantized(
    name: str,
    local: QuantizedTensorStorage,
    shape: tuple[int, ...] | None,
    offsets: tuple[int, ...] | None,
    flat: FlatState,
) -> None:
    inner, entry = _described(name, local)
    declared = {d.argument: d for d in local.inner_tensors}
    if "shape" in entry["static"] and shape is not None:
        entry["static"]["shape"] = list(shape)
    for argument, tensor in inner.items():
        path = f"{name}.{argument}"
        if shape is None or offsets is None or not declared[argument].gather:
            own = tuple(tensor.shape)
            of = None if shape is None else name
            flat.add(Piece(path, tensor, own, (0,) * len(own), everywhere=True, of_shards=of), path)
            continue
        rows, first = sharded_rows(name, declared[argument], tensor, tuple(local.shape), shape, offsets)
        whole = (rows, *tensor.shape[1:])
        flat.add(Piece(path, tensor, whole, (first, *[0] * (tensor.dim() - 1))), path)
    flat.quantized[name] = entry
    flat.storages[name] = local
    flat.parts[name] = [f"{name}.{argument}" for argument in inner]


def sharded_rows(
    name: str,
    inner: InnerTensor,
    tensor: torch.Tensor,
    local: Sequence[int],
    shape: Sequence[int],
    offsets: Sequence[int],
) -> tuple[int, int]:
    """Rows that an inner tensor of the whole has, and the first one of this rank's part of it.

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


def flatten_sharded(name: str, value: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """A DTensor as DTensors of plain tensors, with the same mesh and placements, and plain ones equal on all ranks.

    Returns:
        Tensors by name, and what the quantized tensor is; None where it is not quantized.

    Raises:
        ShapeError, UsageError: it is quantized, and its inner tensors cannot be sharded as it is.
    """
    from torch.distributed.tensor import DTensor

    flat = FlatState()
    with torch.no_grad():
        _add_tensor(name, value, flat)
    tensors: dict[str, torch.Tensor] = {}
    for path, piece in flat.pieces.items():
        if piece.everywhere:
            tensors[path] = piece.tensor
            continue
        stride = [math.prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
        made = DTensor.from_local(
            piece.tensor,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=torch.Size(piece.shape),
            stride=tuple(stride),
        )
        try:
            placed = _box(path, made)[1] == piece.offsets or piece.tensor.numel() == 0
        except OttavaError:
            placed = False
        if not placed:
            raise ShapeError(
                f"the shards of {name!r} are no shards of {path!r}",
                expected="as many blocks on each rank but the last",
                remedy="save it with save_sharded",
            )
        tensors[path] = made
    return tensors, flat.quantized.get(name)
