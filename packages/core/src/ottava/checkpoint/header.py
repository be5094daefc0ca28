"""The header of a safetensors file: what tensors there are and where, read without trusting a byte of it.

A file is 8 bytes with the length of the header, the header, JSON padded by spaces, and the bytes of the tensors without
a gap. Files of Ottava have two entries of metadata: the description of the quantized tensors, and a digest with the
checksums of the header and of every tensor. One without the other is damage, so that no single error in a file makes a
stranger's file of it, whose bytes nobody could check.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ottava.errors import CheckpointError, DTypeError, UsageError

#: The metadata entry that describes the quantized tensors.
METADATA_KEY = "ottava"
#: The metadata entry with the checksums.
DIGEST_KEY = "ottava.digest"
#: The longest header that readers of the format take.
MAX_HEADER = 100_000_000
LENGTH_BYTES = 8

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# By torch's own names. Asking torch for a name that a file gives would import modules of that name.
TORCH_DTYPES = {str(v).removeprefix("torch."): v for v in list(vars(torch).values()) if isinstance(v, torch.dtype)}

_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DIMS = 64
# The digest stands at the very beginning, so that it is found, and written again, without a search.
_PREFIX = b'{"__metadata__":{"' + DIGEST_KEY.encode() + b'":"crc32:'
_HEX = 8


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: what it is, where its bytes are, and their checksum if the file has one."""

    spec: TensorSpec
    begin: int
    end: int
    crc32: int | None = None


@dataclass(frozen=True)
class Header:
    """What a header says; ``entries`` in the order in which it stands there, positions from the start of the file."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


# -- writing --


def layout(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The order of the tensors in a file: larger elements first, so that each tensor is aligned, then by name.

    Raises:
        DTypeError: a dtype that the format does not have.
        UsageError: a name that it cannot have.
    """
    for name, spec in specs.items():
        if spec.dtype not in DTYPE_NAMES:
            raise DTypeError(f"{name!r} is of {spec.dtype}", expected="a dtype that safetensors has")
        if name == "__metadata__" or not _is_text(name):
            raise UsageError(f"a tensor has the name {name!r}", expected="text, not '__metadata__'")
        if len(spec.shape) > _MAX_DIMS:
            raise UsageError(f"{name!r} has {len(spec.shape)} dimensions", expected=f"at most {_MAX_DIMS}")
    return dict(sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def encode(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], checksums: Sequence[int] | None = None
) -> bytes:
    """Length and header of a file with these tensors, laid out in this order.

    Its length does not depend on ``checksums``: those of the tensors, in order; None for zeros.

    Raises:
        UsageError: the header is longer than readers take.
    """
    body: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.nbytes
        body[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    rest = json.dumps(body, separators=(",", ":")).encode().removeprefix(b'{"__metadata__":{')
    sums = "".join(f"{crc32:08x}" for crc32 in checksums or [0] * len(specs)).encode()
    text = _PREFIX + b"0" * _HEX + sums + b'"' + (b"," if metadata else b"") + rest
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UsageError(f"the header would have {len(text)} bytes", expected=f"at most {MAX_HEADER}")
    whole = len(text).to_bytes(LENGTH_BYTES, "little") + text
    place = LENGTH_BYTES + len(_PREFIX)
    return whole[:place] + f"{zlib.crc32(whole):08x}".encode() + whole[place + _HEX :]


# -- reading --


def decode(raw: bytes, file_size: int) -> Header:
    """The header of a file of ``file_size`` bytes that begins with ``raw``: length and header.

    Raises:
        CheckpointError: it is not one, or does not fit the file; the error names the tensor, not the file.
    """
    text = raw[LENGTH_BYTES:]
    if not text.startswith(b"{"):
        raise CheckpointError("the header is no JSON object", expected="a safetensors file")
    try:
        body = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"the header is damaged: {_short(error)}", expected="JSON") from error
    metadata = _metadata(body.pop("__metadata__", None))
    ours = METADATA_KEY in metadata or DIGEST_KEY in metadata
    checksums = _checksums(raw, metadata, len(body)) if ours else [None] * len(body)
    entries: dict[str, Entry] = {}
    for (name, fields), crc32 in zip(body.items(), checksums, strict=True):
        if not _is_text(name):
            raise CheckpointError(f"a tensor has the name {name!r}", expected="text")
        entries[name] = _entry(name, fields, len(raw), crc32)
    _check_places(entries, len(raw), file_size)
    return Header(entries, metadata)


def _short(error: BaseException) -> str:
    return str(error)[:200] if isinstance(error, ValueError) else type(error).__name__


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands there twice")
        found[key] = value
    return found


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _metadata(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, str) and _is_text(k + v) for k, v in found.items()):
        raise CheckpointError("the metadata is damaged", expected="texts by name")
    return found


def _checksums(raw: bytes, metadata: Mapping[str, str], tensors: int) -> list[int]:
    """The checksums of the tensors, from a digest whose own checksum of the header is right."""
    if METADATA_KEY not in metadata or DIGEST_KEY not in metadata:
        present, missing = sorted((METADATA_KEY, DIGEST_KEY), key=lambda key: key not in metadata)
        raise CheckpointError(
            f"the metadata has {present!r} but not {missing!r}",
            expected="both, or neither in a file of another tool",
            remedy="write it with ottava.checkpoint.save_file; another tool has rewritten it, or it is damaged",
        )
    place = LENGTH_BYTES + len(_PREFIX)
    begin, end = place + _HEX, place + _HEX * (1 + tensors)
    blank = zlib.crc32(raw[:place] + b"0" * _HEX + raw[begin:])
    sums = raw[begin:end]
    wrong = not raw.startswith(_PREFIX, LENGTH_BYTES) or raw[place:begin] != f"{blank:08x}".encode()
    if wrong or raw[end : end + 1] != b'"' or not set(sums) <= set(b"0123456789abcdef"):
        raise CheckpointError("the header is damaged: its checksum is another", expected="the file that was written")
    return [int(sums[i : i + _HEX], 16) for i in range(0, len(sums), _HEX)]


def _entry(name: str, fields: Any, start: int, crc32: int | None) -> Entry:
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise CheckpointError(f"tensor {name!r} is not described", expected=", ".join(sorted(_FIELDS)))
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"tensor {name!r} is of dtype {fields['dtype']!r:.80}", expected=", ".join(DTYPES))
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not _naturals(shape) or len(shape) > _MAX_DIMS or math.prod(max(size, 1) for size in shape) >= 1 << 63:
        raise CheckpointError(f"tensor {name!r} has shape {shape!r:.80}", expected="a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"tensor {name!r} has offsets {offsets!r:.80}", expected="two positions")
    spec = TensorSpec(dtype, tuple(shape))
    begin, end = offsets
    if end - begin != spec.nbytes:
        what = f"tensor {name!r}, {fields['dtype']} of shape {shape!r:.80}, has {end - begin} bytes"
        raise CheckpointError(what, expected=f"{spec.nbytes}")
    return Entry(spec, start + begin, start + end, crc32)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_places(entries: Mapping[str, Entry], start: int, file_size: int) -> None:
    """Tensors follow each other without gaps and fill the file."""
    at, before = start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = f"tensor {name!r} begins at {entry.begin}"
            after = f"after {before!r}" if before else "after the header"
            raise CheckpointError(what, expected=f"{at}, {after}")
        at, before = entry.end, name
        if at > file_size:
            raise CheckpointError(
                f"tensor {name!r} ends at {at}, the file at {file_size}", expected="a file that is whole"
            )
    if at != file_size:
        raise CheckpointError(f"the file has {file_size} bytes", expected=f"{at}, the end of its last tensor")
