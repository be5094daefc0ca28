"""DCP planners of pieces: what each rank writes, and what it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ottava.checkpoint.sharded import Piece
from ottava.errors import CheckpointError


def _empty(piece: Piece) -> bool:
    return piece.tensor.numel() == 0


class PieceSavePlanner(DefaultSavePlanner):
    """Plans pieces by name; a box that several ranks hold is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        # Where the whole is empty there is still a tensor to tell of; the box of every rank is the same then.
        items = [
            _write_item(name, piece)
            for name, piece in self.state_dict.items()
            if not _empty(piece) or math.prod(piece.shape) == 0
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].tensor


def _write_item(name: str, piece: Piece) -> WriteItem:
    offsets = torch.Size([0] * len(piece.shape) if _empty(piece) else piece.offsets)
    sizes = torch.Size(piece.shape) if _empty(piece) else piece.tensor.shape
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, sizes),
        properties=TensorProperties(dtype=piece.tensor.dtype),
        size=torch.Size(piece.shape),
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans what a rank reads into fresh tensors, one for each of its pieces.

    Args:
        pieces: this rank's pieces by the name that a tensor has in the checkpoint.
        buffers: what is read into, by the same names, of the shapes of the pieces.
    """

    def __init__(self, pieces: Mapping[str, Piece], buffers: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces, self.buffers = pieces, buffers

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        stored = {} if self.metadata is None else self.metadata.state_dict_metadata
        for name, piece in self.pieces.items():
            if _empty(piece):
                continue
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
            found = create_read_items_for_chunk_list(name, stored[name], [chunk])  # type: ignore[arg-type]
            if sum(math.prod(item.lengths) for item in found) != piece.tensor.numel():
                raise CheckpointError(f"the checkpoint does not hold all of {name!r}", expected="every piece of it")
            items += found
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.buffers[read_item.dest_index.fqn]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target
