"""Pieces of tensors in files: the bytes of live tensors, and bytes that are read and checked."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.description import Described, Description
from ottava.checkpoint.folder import as_path, locate
from ottava.checkpoint.header import METADATA_KEY
from ottava.checkpoint.index import Index, StoredPiece, StoredTensor, check_files, read_index
from ottava.errors import CheckpointError, UsageError


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, shared with it; the tensor has to live as long."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of an 8-bit float format as uint8, sharing memory, since few ops know such formats; others as is."""
    eight_bit = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if eight_bit else tensor


def blocks_of(tensor: torch.Tensor, size: int) -> Iterator[memoryview]:
    """The bytes of a tensor, whatever its device and strides, in blocks of ``size``."""
    values = as_bytes(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
    data = buffer_of(values)
    for start in range(0, len(data), size):
        yield data[start : start + size]


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that torch does not write to.

    Raises:
        UsageError: several of its elements are one, or it was made in inference mode.
    """
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    if any(stride == 0 and size > 1 for size, stride in strides):
        raise UsageError(
            f"{name!r} is an expanded view: several of its elements are one", expected="a tensor with memory of its own"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(f"{name!r} was made in inference mode", remedy="load it in torch.inference_mode()")


class PieceReader:
    """Reads parts of the pieces of one checkpoint, and checks every byte that it gives.

    Args:
        folder: where the files are.
        index: what they hold.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._open = contextlib.ExitStack()
        self._files: dict[str, BufferedReader] = {}

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self._files.clear()

    def _file(self, name: str) -> BufferedReader:
        if name not in self._files:
            expected = self.index.files[name]
            file = self._open.enter_context((self.folder / name).open("rb"))
            if os.fstat(file.fileno()).st_size != expected.size:
                raise ValueError(f"it is not {expected.size} bytes long")
            if zlib.crc32(file.read(expected.header)) != expected.crc32:
                raise ValueError("its header is damaged")
            self._files[name] = file
        return self._files[name]

    def _bytes(self, piece: StoredPiece, start: int, stop: int, nbytes: int) -> bytearray:
        """Bytes ``[start, stop)`` of a piece of ``nbytes``, by whole blocks."""
        file, block = self._file(piece.file), self.index.block_bytes
        first = start // block
        low, high = first * block, min(-(-stop // block) * block, nbytes)
        data = bytearray(high - low)
        file.seek(piece.begin + low)
        if file.readinto(data) != len(data):
            raise ValueError("it ends too early")
        with memoryview(data) as view:
            for number, begin in enumerate(range(0, len(data), block), first):
                if zlib.crc32(view[begin : begin + block]) != piece.crc32[number]:
                    raise ValueError("its bytes are not those that were written")
        del data[: start - low]
        del data[stop - start :]
        return data

    def read(self, name: str, piece: StoredPiece, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """The box at ``offsets`` of a piece of the tensor ``name``, of shape ``lengths``, 8-bit floats as uint8.

        Raises:
            CheckpointError: the file cannot be read, or the bytes are not those that were written.
        """
        dtype = self.index.tensors[name].dtype
        dtype = torch.uint8 if dtype.is_floating_point and dtype.itemsize == 1 else dtype
        row = math.prod(piece.shape[1:]) * dtype.itemsize
        start, rows = (offsets[0], lengths[0]) if piece.shape else (0, 1)
        nbytes = math.prod(piece.shape) * dtype.itemsize
        if math.prod(lengths) == 0:
            return torch.empty(tuple(lengths), dtype=dtype, device="cpu")
        try:
            data = self._bytes(piece, start * row, (start + rows) * row, nbytes)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / piece.file} cannot be read for {name!r}: {error}",
                expected="the file as it was written",
                remedy="load another checkpoint",
            ) from error
        box = torch.frombuffer(data, dtype=dtype).reshape(rows, *piece.shape[1:]) if piece.shape else None
        if box is None:
            return torch.frombuffer(data, dtype=dtype).reshape(())
        for dim in range(1, box.dim()):
            box = box.narrow(dim, offsets[dim], lengths[dim])
        return box


class ShardedSource:
    """The tensors of a sharded checkpoint, one by one and whole, read by one process.

    Quantized tensors appear as their inner tensors; :attr:`metadata` is what ``unflatten_state_dict`` takes. Of a
    tensor that each rank had of its own, rank 0's is read; of scaling state that the next step would have reduced, the
    largest values of all ranks.

    Args:
        path: the folder of the checkpoint.

    Raises:
        CheckpointError: it is not a whole sharded checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path)
        self._folder = locate(self.path)
        self._index = read_index(self._folder)
        check_files(self._folder, self._index)
        description = self._index.description
        # Of what the ranks had of their own, that of rank 0 has the name.
        self._per_rank: dict[str, list[str]] = description.get("per_rank", {})
        self._largest: list[str] = description.get("largest", [])
        others = {name for names in self._per_rank.values() for name in names[1:]}
        self._names = sorted(name for name in self._index.tensors if name not in others)
        quantized = description.get("quantized", {})
        self.metadata: dict[str, str] = {METADATA_KEY: _described(quantized, self.path)} if quantized else {}

    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._names)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        tensor = self._tensor(name)
        return tensor.dtype, tensor.shape

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU.

        Raises:
            CheckpointError: there is none of that name, or its bytes are not those that were written.
        """
        ranks = self._per_rank.get(name, [name]) if name in self._largest else [name]
        whole = self._read(ranks[0])
        for other in ranks[1:]:
            torch.maximum(whole, self._read(other), out=whole)
        return whole

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._tensor(name)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        with PieceReader(self._folder, self._index) as reader:
            for piece in tensor.pieces:
                box = as_bytes(whole)
                for dim, (offset, size) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
                    box = box.narrow(dim, offset, size)
                box.copy_(reader.read(name, piece, [0] * len(piece.shape), piece.shape))
        return whole

    def _tensor(self, name: str) -> StoredTensor:
        tensor = self._index.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", expected="one of names()")
        return tensor


def _described(quantized: Any, path: Path) -> str:
    try:
        return Description({name: Described.decode(entry) for name, entry in quantized.items()}).encode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} describes its quantized tensors wrongly: {error}", expected="what save_sharded wrote"
        ) from error
