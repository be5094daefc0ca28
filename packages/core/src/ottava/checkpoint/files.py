"""safetensors files, by their library.

Two entries of metadata are Ottava's: ``ottava`` describes the quantized tensors, ``ottava.crc32`` is the checksum of
all else. One without the other is damage, so that no single error makes another tool's file, which nobody can check.
"""

import ctypes
import json
import os
import stat
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from ottava.errors import CheckpointError, DTypeError, UsageError, translated
from ottava.filesystem import AnyPath, as_path, sync, uninterrupted, unreplaced

METADATA_KEY, CHECKSUM_KEY = "ottava", "ottava.crc32"
#: The file that makes a folder a sharded checkpoint.
INDEX_NAME = "ottava.json"
#: For checkpoints of formats that are no longer read.
RESAVE = "load it in the ottava that wrote it, keep that with torch.save, and save it again in this one"
# By torch's own names. Asking torch for a name that a file gives would import modules of that name.
DTYPES = {str(v).removeprefix("torch."): v for v in list(vars(torch).values()) if isinstance(v, torch.dtype)}
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
    """Raise DTypeError for a tensor that is no block of memory with values, of a dtype that the format has."""
    if tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else "on meta" if tensor.is_meta else f"of layout {tensor.layout}"
        raise DTypeError(f"{name!r} is {kind}", expected="a dense tensor with values", remedy="save what it is made of")
    with translated(f"{name!r} is of {tensor.dtype}", "a dtype that safetensors has", to=DTypeError):
        TensorSpec(dtype=dtype_name(tensor.dtype), shape=[0], data_ptr=0, data_len=0)


def in_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where it is contiguous and on the CPU, else a copy that is; DTypeError where it has no bytes."""
    check_dense(name, tensor)
    with translated(f"{name!r} is a {type(tensor).__name__}", "a plain tensor", to=DTypeError, of=RuntimeError):
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        plain.data_ptr()  # a wrapper has none, and says so
    return plain


def crc32_of(tensor: torch.Tensor) -> int:
    """The CRC-32 of the bytes of a contiguous tensor on the CPU."""
    return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())) if tensor.nbytes else 0


def checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """The checksum of a file: CRC-32, in hexadecimal, of the JSON ``[metadata, tensors]``, sorted by name and without
    spaces: the texts but for the checksum, and ``[torch's name of the dtype, shape, CRC-32 of the bytes]`` by name."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        sums = threads.map(crc32_of, tensors.values())
    about = {n: [dtype_name(t.dtype), list(t.shape), crc] for (n, t), crc in zip(tensors.items(), sums, strict=True)}
    texts = {key: text for key, text in metadata.items() if key != CHECKSUM_KEY}
    return f"{zlib.crc32(json.dumps([texts, about], sort_keys=True, separators=(',', ':')).encode()):08x}"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Write one file, to the disk, and give its checksum; all tensors are in memory, on the CPU, meanwhile."""
    plain = {name: in_memory(name, tensor) for name, tensor in tensors.items()}
    # Some tools ask every file for its format.
    texts = {"format": "pt", **metadata}
    if "__metadata__" in plain:
        raise UsageError("a tensor has the name '__metadata__'", expected="another name")
    for text in (*plain, *texts, *texts.values()):
        with translated(f"{text!r:.200} cannot be written", "text without half characters", to=UsageError):
            text.encode()
    specs = {
        n: TensorSpec(dtype=dtype_name(t.dtype), shape=list(t.shape), data_ptr=t.data_ptr(), data_len=t.nbytes)
        for n, t in plain.items()
    }
    try:
        serialize_file(specs, path, texts | {CHECKSUM_KEY: (found := checksum(plain, texts))})
        # The library lets nobody else read it; its permissions are to be those of the folder, which is as new as it is.
        os.chmod(path, stat.S_IMODE(path.parent.stat().st_mode) & 0o666)
        sync(path)
        # What did not reach the disk is not there now, whatever was said of it.
        with safe_open(path, "pt") as written:
            if len(written.keys()) != len(specs) or written.metadata()[CHECKSUM_KEY] != found:
                raise OSError("something is missing from what was written")
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return found


def read_tensors(path: AnyPath, *, verify: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a file, mapped into memory, on the CPU and in the order of their bytes, and its metadata.

    Nothing in it is trusted; memory is bounded by its size. With ``verify`` its bytes are compared with the checksum.
    Raises CheckpointError where it is no whole safetensors file, is damaged, or was replaced while it was read.
    """
    place = as_path(path)
    # Header and bytes may be of two files where it is replaced in between.
    with unreplaced(place):
        kind, remedy = looks_like(place)
        with translated(f"{place}: {kind or 'it is damaged, or no safetensors file'}", "a whole one", remedy):
            # Inside of torch an interrupt would become an error about the file.
            with uninterrupted(), safe_open(place, "pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
            _check(place, tensors, metadata, verify)
    return tensors, metadata


def _check(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], verify: bool) -> None:
    if "ottava.digest" in metadata:
        raise CheckpointError(f"{path} is of an old format", expected=CHECKSUM_KEY, remedy=RESAVE)
    claimed = metadata.get(CHECKSUM_KEY)
    if (claimed is None) != (METADATA_KEY not in metadata):
        held, other = (METADATA_KEY, CHECKSUM_KEY) if claimed is None else (CHECKSUM_KEY, METADATA_KEY)
        what = f"{path}: the metadata has {held!r} but not {other!r}"
        remedy = "write it with ottava.checkpoint.save_file; another tool has rewritten it, or it is damaged"
        raise CheckpointError(what, expected="both, or neither in a file of another tool", remedy=remedy)
    if verify and claimed is not None and (found := checksum(tensors, metadata)) != claimed:
        raise CheckpointError(f"{path} is damaged: its checksum is {found}", f"{claimed:.80}", "load another one")
    for name, tensor in tensors.items():
        # Any other byte in memory of this dtype is undefined behaviour.
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise CheckpointError(f"{path}: tensor {name!r} has values besides 0 and 1", expected="booleans")


def looks_like(path: Path) -> tuple[str, str]:
    """What a file that is no safetensors file seems to be, and what to do with it; empty texts where nobody knows."""
    with translated(f"{path} cannot be read", "a safetensors file"), path.open("rb") as file:
        start = file.read(64)
    found = [(f"this looks like {kind}", remedy) for magic, kind, remedy in _MAGICS if start.startswith(magic)]
    return found[0] if found and start[8:9] != b"{" else ("" if start else "the file is empty", "")
