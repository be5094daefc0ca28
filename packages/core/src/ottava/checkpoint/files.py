"""safetensors files, written and read by the safetensors library.

Ottava adds two entries to the metadata: ``ottava`` describes the quantized tensors, and
``ottava.crc32`` is the checksum of everything else. A file that has only one of them is damaged. So
no single error turns a file into one of another tool, which has no checksum.
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
from typing import BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from ottava.errors import CheckpointError, DTypeError, UsageError, translated
from ottava.filesystem import AnyPath, as_path, unreplaced

_T = TypeVar("_T")

METADATA_KEY, CHECKSUM_KEY = "ottava", "ottava.crc32"
# A blank value stands for the checksum until the bytes are in the file. The search for the entry is
# unique, because quotes inside of a text are escaped.
_ENTRY, _BLANK = f'"{CHECKSUM_KEY}":"'.encode(), "0" * 8
#: Bytes of a file that one thread holds at a time.
_CHUNK = 1 << 20
_INCOMPLETE = "something is missing from what was written"
#: The file that makes a folder a sharded checkpoint.
INDEX_NAME = "ottava.json"
#: The remedy for checkpoints of formats that are no longer read.
RESAVE = (
    "load it in the ottava that wrote it, keep that with torch.save, and save it again in this one"
)
# Dtypes by torch's names. A name from a file is looked up here and not in torch, because getattr on
# torch can import a module of that name.
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
    """Raise DTypeError unless a tensor is dense, has values and has a dtype that safetensors
    knows."""
    fault = ""
    if tensor.is_nested:
        fault = "nested"
    elif tensor.is_meta:
        fault = "on meta"
    elif tensor.layout != torch.strided:
        fault = f"of layout {tensor.layout}"
    if fault:
        raise DTypeError(
            f"{name!r} is {fault}",
            expected="a dense tensor with values",
            remedy="save what it is made of",
        )
    with translated(
        f"{name!r} is of {tensor.dtype}", "a dtype that safetensors has", to=DTypeError
    ):
        TensorSpec(dtype=dtype_name(tensor.dtype), shape=[0], data_ptr=0, data_len=0)
    check_memory(name, tensor)


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError if a strided tensor has elements outside of its storage.

    That is so if the storage was resized. Reading the tensor would crash or read foreign memory.
    """
    if not tensor.numel():
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    needed = (last + 1) * tensor.element_size()
    with translated(f"{name!r} is a {type(tensor).__name__}", "a plain tensor", to=DTypeError):
        size = tensor.untyped_storage().nbytes()
    if needed > size:
        fault = "has no memory: its storage was resized to nothing"
        if size:
            fault = f"lies outside of its memory: its storage was resized to {size} bytes"
        raise UsageError(
            f"{name!r} {fault}",
            expected=f"a storage of {needed} bytes at least",
            remedy="use the tensor while it has memory, or give it memory and values",
        )


def in_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous and on the CPU, else a copy that is.

    Raises DTypeError if the tensor has no bytes.
    """
    check_dense(name, tensor)
    with translated(
        f"{name!r} is a {type(tensor).__name__}", "a plain tensor", to=DTypeError, of=RuntimeError
    ):
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        plain.data_ptr()  # raises for a wrapper, which has no address
    return plain


def crc32_of(tensor: torch.Tensor) -> int:
    """The CRC-32 of the bytes of a contiguous tensor on the CPU."""
    if not tensor.nbytes:
        return 0
    return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """The checksum of a file: the CRC-32, in hexadecimal, of the JSON ``[metadata, tensors]``.

    ``metadata`` has all texts except for the checksum, and ``tensors`` has
    ``[torch's name of the dtype, shape, CRC-32 of the bytes]`` by name. The JSON is sorted by name
    and has no spaces.
    """
    return _checksum(tensors, _in_threads(crc32_of, tensors.values()), metadata)


def _checksum(
    tensors: Mapping[str, torch.Tensor], sums: Iterable[int], metadata: Mapping[str, str]
) -> str:
    """The checksum of a file, given the CRC-32 of the bytes of each tensor."""
    entries = {
        name: [dtype_name(tensor.dtype), list(tensor.shape), crc]
        for (name, tensor), crc in zip(tensors.items(), sums, strict=True)
    }
    texts = {key: text for key, text in metadata.items() if key != CHECKSUM_KEY}
    body = json.dumps([texts, entries], sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(body.encode()):08x}"


def _in_threads(function: Callable[[_T], int], values: Iterable[_T]) -> list[int]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(function, values))


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    mode: int | None = None,
) -> str:
    """Write one file, sync it to the disk, and return its checksum.

    All tensors are in memory on the CPU at the same time. The checksum is computed from the bytes
    in the file. If other threads write to the tensors during the save, the file holds some old and
    some new values, and its checksum fits.

    Args:
        path: a new file, in a folder that nobody else reads.
        tensors, metadata: the content of the file.
        mode: the permissions of the file; None takes those of its folder, which is new as well.
    """
    plain = {name: in_memory(name, tensor) for name, tensor in tensors.items()}
    # Some tools require the entry "format".
    texts = {"format": "pt", **metadata}
    if "__metadata__" in plain:
        raise UsageError("a tensor has the name '__metadata__'", expected="another name")
    for text in (*plain, *texts, *texts.values()):
        with translated(
            f"{text!r:.200} cannot be written", "text without half characters", to=UsageError
        ):
            text.encode()
    specs = {
        name: TensorSpec(
            dtype=dtype_name(tensor.dtype),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in plain.items()
    }
    try:
        serialize_file(specs, path, texts | {CHECKSUM_KEY: _BLANK})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if mode is None:
        mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o666
    with path.open("r+b") as file:
        checksum = _seal(file, plain, texts)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    return checksum


def _seal(file: BinaryIO, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]) -> str:
    """Replace the blank checksum of a file by that of its bytes, and return the checksum.

    Raises OSError if the file does not hold all tensors, although the write reported success.
    """
    length = int.from_bytes(file.read(8), "little")
    header = file.read(length)
    ranges: list[tuple[int, int]] = []
    try:
        entries = json.loads(header)
        for name in tensors:
            begin, end = entries[name]["data_offsets"]
            ranges.append((8 + length + begin, 8 + length + end))
        place = 8 + header.index(_ENTRY + _BLANK.encode()) + len(_ENTRY)
    except (ValueError, KeyError) as error:
        raise OSError(_INCOMPLETE) from error
    if [end - begin for begin, end in ranges] != [tensor.nbytes for tensor in tensors.values()]:
        raise OSError(_INCOMPLETE)
    sums = _in_threads(partial(_crc32_in_file, file.fileno()), ranges)
    checksum = _checksum(tensors, sums, texts)
    file.seek(place)
    file.write(checksum.encode())
    file.flush()
    return checksum


def _crc32_in_file(descriptor: int, place: tuple[int, int]) -> int:
    """The CRC-32 of a range of bytes of a file; OSError if the file ends before."""
    begin, end = place
    crc32 = 0
    while begin < end:
        chunk = os.pread(descriptor, min(_CHUNK, end - begin), begin)
        if not chunk:
            raise OSError(_INCOMPLETE)
        crc32 = zlib.crc32(chunk, crc32)
        begin += len(chunk)
    return crc32


def read_tensors(
    path: AnyPath, *, verify: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, mapped into memory on the CPU, in the order of their bytes; and its
    metadata.

    Nothing in the file is trusted, and memory is bounded by its size. With ``verify`` its bytes are
    compared with the checksum. Raises CheckpointError if the file is not a whole safetensors file,
    is damaged, or was replaced while it was read.
    """
    place = as_path(path)
    # If the file is replaced in between, header and bytes may come from two files.
    with unreplaced(place):
        kind, remedy = looks_like(place)
        fault = kind or "it is damaged, or no safetensors file"
        with translated(f"{place}: {fault}", "a whole one", remedy):
            with safe_open(place, "pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
            _check(place, tensors, metadata, verify)
    return tensors, metadata


def _check(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], verify: bool
) -> None:
    keys = (METADATA_KEY, CHECKSUM_KEY)
    present = [key for key in keys if key in metadata]
    if len(present) == 1:
        (absent,) = set(keys) - set(present)
        raise CheckpointError(
            f"{path}: the metadata has {present[0]!r} but not {absent!r}",
            expected="both, or neither in a file of another tool",
            remedy="write it with ottava.checkpoint.save_file; another tool has rewritten it, or "
            "it is damaged",
        )
    expected = metadata.get(CHECKSUM_KEY)
    if verify and expected is not None:
        actual = checksum(tensors, metadata)
        if actual != expected:
            raise CheckpointError(
                f"{path} is damaged: its checksum is {actual}",
                f"{expected:.80}",
                "load another one",
            )
    for name, tensor in tensors.items():
        # In memory of this dtype any other byte is undefined behaviour.
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise CheckpointError(
                f"{path}: tensor {name!r} has values besides 0 and 1", expected="booleans"
            )


def looks_like(path: Path) -> tuple[str, str]:
    """A guess at the kind of a file that is not a safetensors file, and the remedy.

    Both are empty texts for a file that may be one.
    """
    with translated(f"{path} cannot be read", "a safetensors file"), path.open("rb") as file:
        start = file.read(64)
    if not start:
        return "the file is empty", ""
    # In a safetensors file, eight bytes of the header's length come before the header.
    if start[8:9] == b"{":
        return "", ""
    for magic, kind, remedy in _MAGICS:
        if start.startswith(magic):
            return f"this looks like {kind}", remedy
    return "", ""
