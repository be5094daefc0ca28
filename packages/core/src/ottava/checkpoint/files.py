"""safetensors files, by their library.

Two entries of metadata are Ottava's: ``ottava`` describes the quantized tensors, ``ottava.crc32``
is the checksum of all else. One without the other is damage, so that no single error makes another
tool's file, which nobody can check.
"""

import ctypes
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from ottava.errors import CheckpointError, DTypeError, UsageError, translated
from ottava.filesystem import AnyPath, as_path, unreplaced

METADATA_KEY, CHECKSUM_KEY = "ottava", "ottava.crc32"
# What stands for the checksum until the bytes are in the file. Inside of a text quotes are escaped.
_ENTRY, _BLANK = f'"{CHECKSUM_KEY}":"'.encode(), "0" * 8
#: Bytes of a file that one thread holds at a time.
_CHUNK = 1 << 20
#: The file that makes a folder a sharded checkpoint.
INDEX_NAME = "ottava.json"
#: For checkpoints of formats that are no longer read.
RESAVE = (
    "load it in the ottava that wrote it, keep that with torch.save, and save it again in this one"
)
# By torch's own names. Asking torch for a name that a file gives would import modules of that name.
DTYPES = {
    str(v).removeprefix("torch."): v
    for v in list(vars(torch).values())
    if isinstance(v, torch.dtype)
}
BY_TORCH = "torch.load(path, weights_only=True) reads it, and `ottava export` converts it"
_MAGICS = (
    (b"PK\x03\x04", "a file of torch.save", BY_TORCH),
    (b"\x80", "a pickle", BY_TORCH),
    (b"GGUF", "a GGUF file", "convert it to safetensors"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself", "run `git lfs pull`"),
)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise DTypeError for a tensor that is no block of memory with values, of a dtype that the
    format has."""
    if tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
        kind = (
            "nested"
            if tensor.is_nested
            else "on meta"
            if tensor.is_meta
            else f"of layout {tensor.layout}"
        )
        raise DTypeError(
            f"{name!r} is {kind}",
            expected="a dense tensor with values",
            remedy="save what it is made of",
        )
    with translated(
        f"{name!r} is of {tensor.dtype}", "a dtype that safetensors has", to=DTypeError
    ):
        TensorSpec(dtype=dtype_name(tensor.dtype), shape=[0], data_ptr=0, data_len=0)
    check_memory(name, tensor)


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError for a strided tensor with elements outside of its storage, which was given
    up or cut: to read it would crash, or read what belongs to others."""
    if not tensor.numel():
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    needed = (last + 1) * tensor.element_size()
    with translated(f"{name!r} is a {type(tensor).__name__}", "a plain tensor", to=DTypeError):
        held = tensor.untyped_storage().nbytes()
    if needed > held:
        what = f"{name!r} has no memory: its storage was resized to nothing"
        if held:
            what = f"{name!r} lies outside of its memory: its storage was resized to {held} bytes"
        remedy = "use the tensor while it has memory, or give it memory and values"
        raise UsageError(what, expected=f"a storage of {needed} bytes at least", remedy=remedy)


def in_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where it is contiguous and on the CPU, else a copy that is; DTypeError where it
    has no bytes."""
    check_dense(name, tensor)
    with translated(
        f"{name!r} is a {type(tensor).__name__}", "a plain tensor", to=DTypeError, of=RuntimeError
    ):
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        plain.data_ptr()  # a wrapper has none, and says so
    return plain


def crc32_of(tensor: torch.Tensor) -> int:
    """The CRC-32 of the bytes of a contiguous tensor on the CPU."""
    return (
        zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        if tensor.nbytes
        else 0
    )


def checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """The checksum of a file: CRC-32, in hexadecimal, of the JSON ``[metadata, tensors]``, sorted
    by name and without spaces: the texts but for the checksum, and
    ``[torch's name of the dtype, shape, CRC-32 of the bytes]`` by name."""
    return _checksum(tensors, _in_threads(crc32_of, tensors.values()), metadata)


def _checksum(
    tensors: Mapping[str, torch.Tensor], sums: Iterable[int], metadata: Mapping[str, str]
) -> str:
    """The checksum of a file with such tensors, whose bytes have such sums."""
    about = {
        name: [dtype_name(tensor.dtype), list(tensor.shape), crc]
        for (name, tensor), crc in zip(tensors.items(), sums, strict=True)
    }
    texts = {key: text for key, text in metadata.items() if key != CHECKSUM_KEY}
    body = json.dumps([texts, about], sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(body.encode()):08x}"


def _in_threads(function: Callable[[Any], int], values: Iterable[Any]) -> list[int]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(function, values))


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    mode: int | None = None,
) -> str:
    """Write one file, to the disk, and give its checksum; all tensors are in memory, on the CPU,
    meanwhile.

    The checksum is that of the bytes in the file. Where other threads write to the tensors
    meanwhile, the file holds some of their old and some of their new values, and is whole.

    Args:
        path: a new file; nobody else may read it until it is written.
        tensors, metadata: what it holds.
        mode: the permissions of the file; None: those of its folder, which is as new as the file
            is.
    """
    plain = {name: in_memory(name, tensor) for name, tensor in tensors.items()}
    # Some tools ask every file for its format.
    texts = {"format": "pt", **metadata}
    if "__metadata__" in plain:
        raise UsageError("a tensor has the name '__metadata__'", expected="another name")
    for text in (*plain, *texts, *texts.values()):
        with translated(
            f"{text!r:.200} cannot be written", "text without half characters", to=UsageError
        ):
            text.encode()
    specs = {
        n: TensorSpec(
            dtype=dtype_name(t.dtype), shape=list(t.shape), data_ptr=t.data_ptr(), data_len=t.nbytes
        )
        for n, t in plain.items()
    }
    try:
        serialize_file(specs, path, texts | {CHECKSUM_KEY: _BLANK})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if mode is None:
        mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o666
    with path.open("r+b") as file:
        found = _sealed(file, plain, texts)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    return found


def _sealed(file: BinaryIO, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]) -> str:
    """Put the checksum of the bytes that a file holds in the place of the blank one, and give it.

    An OSError: it does not hold all of the tensors. What did not reach the disk is not there now,
    whatever was said.
    """
    length = int.from_bytes(file.read(8), "little")
    header = file.read(length)
    try:
        entries = json.loads(header)
        ranges = [[8 + length + at for at in entries[name]["data_offsets"]] for name in tensors]
        place = 8 + header.index(_ENTRY + _BLANK.encode()) + len(_ENTRY)
    except (ValueError, KeyError) as error:
        raise OSError("something is missing from what was written") from error
    if [end - begin for begin, end in ranges] != [tensor.nbytes for tensor in tensors.values()]:
        raise OSError("something is missing from what was written")
    sums = _in_threads(partial(_crc32_in_file, file.fileno()), ranges)
    found = _checksum(tensors, sums, texts)
    file.seek(place)
    file.write(found.encode())
    file.flush()
    return found


def _crc32_in_file(descriptor: int, place: tuple[int, int]) -> int:
    """The CRC-32 of the bytes of a file from one place to another; an OSError where it ends
    before."""
    begin, end = place
    found = 0
    while begin < end:
        chunk = os.pread(descriptor, min(_CHUNK, end - begin), begin)
        if not chunk:
            raise OSError("something is missing from what was written")
        found = zlib.crc32(chunk, found)
        begin += len(chunk)
    return found


def read_tensors(path: AnyPath, *, verify: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a file, mapped into memory, on the CPU and in the order of their bytes, and
    its metadata.

    Nothing in it is trusted; memory is bounded by its size. With ``verify`` its bytes are compared
    with the checksum. Raises CheckpointError where it is no whole safetensors file, is damaged, or
    was replaced while it was read.
    """
    place = as_path(path)
    # Header and bytes may be of two files where it is replaced in between.
    with unreplaced(place):
        kind, remedy = looks_like(place)
        with translated(
            f"{place}: {kind or 'it is damaged, or no safetensors file'}", "a whole one", remedy
        ):
            with safe_open(place, "pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
            _check(place, tensors, metadata, verify)
    return tensors, metadata


def _check(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], verify: bool
) -> None:
    if "ottava.digest" in metadata:
        raise CheckpointError(f"{path} is of an old format", expected=CHECKSUM_KEY, remedy=RESAVE)
    claimed = metadata.get(CHECKSUM_KEY)
    if (claimed is None) != (METADATA_KEY not in metadata):
        held, other = (
            (METADATA_KEY, CHECKSUM_KEY) if claimed is None else (CHECKSUM_KEY, METADATA_KEY)
        )
        what = f"{path}: the metadata has {held!r} but not {other!r}"
        remedy = (
            "write it with ottava.checkpoint.save_file; another tool has rewritten it, or it "
            "is damaged"
        )
        raise CheckpointError(
            what, expected="both, or neither in a file of another tool", remedy=remedy
        )
    if verify and claimed is not None and (found := checksum(tensors, metadata)) != claimed:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {found}", f"{claimed:.80}", "load another one"
        )
    for name, tensor in tensors.items():
        # Any other byte in memory of this dtype is undefined behaviour.
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise CheckpointError(
                f"{path}: tensor {name!r} has values besides 0 and 1", expected="booleans"
            )


def looks_like(path: Path) -> tuple[str, str]:
    """What a file that is no safetensors file seems to be, and what to do with it; empty texts
    where nobody knows."""
    with translated(f"{path} cannot be read", "a safetensors file"), path.open("rb") as file:
        start = file.read(64)
    found = [
        (f"this looks like {kind}", remedy)
        for magic, kind, remedy in _MAGICS
        if start.startswith(magic)
    ]
    return found[0] if found and start[8:9] != b"{" else ("" if start else "the file is empty", "")
