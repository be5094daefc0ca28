"""States as bytes, and files that are taken apart and put together again by hand, as the
documentation describes them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ottava import checkpoint
from ottava.errors import OttavaError
from ottava.tensors import InnerTensor, QuantizedTensorStorage, StaticField

BLANK = "0" * 8
#: The names of torch of the dtypes that the tests forge.
NAMES = {"BOOL": "bool", "I64": "int64", "F32": "float32", "BF16": "bfloat16"}
NAMES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U8": "uint8"}


def contents(value: Any) -> Any:
    """A model or a nested state with the bytes of its tensors, to compare bit by bit."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, QuantizedTensorStorage):
        return [contents(tensor) for tensor in value.inner_list()]
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg()
        flat = plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: contents(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [contents(entry) for entry in value]
    return type(value), repr(value)


def refusal(call: Callable[[], object]) -> str:
    """The message of Ottava's error in a call; empty if the call succeeds."""
    try:
        call()
    except OttavaError as error:
        return str(error)
    return ""


def zeros_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same kinds with all bytes zero."""
    bits = {name: torch.zeros(value.nbytes, dtype=torch.uint8) for name, value in state.items()}
    return {name: bits[name].view(v.dtype).reshape(v.shape) for name, v in state.items()}


class Rows(QuantizedTensorStorage):
    """A third party's storage: nothing but its declaration."""

    inner_tensors = (
        InnerTensor("_codes", "codes", native="_element", gather=True),
        InnerTensor("_factor", "factor", gather=True),
    )
    static_fields = (StaticField("_element", "element"), StaticField("_sizes", "sizes"))

    def __init__(
        self, *, codes: Any, factor: Any, element: Any, sizes: Any, quantizer: Any = None
    ) -> None:
        self._codes, self._factor, self._quantizer = codes, factor, quantizer
        self._element, self._sizes = element, sizes

    def size(self, dim: int | None = None) -> Any:
        return self._sizes if dim is None else self._sizes[dim]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._codes.view(self._element).to(dtype) * self._factor.to(dtype)[:, None]


def rows(sizes: Any = (2, 3)) -> Rows:
    codes = torch.arange(6, dtype=torch.uint8).view(2, 3)
    return Rows(codes=codes, factor=torch.rand(2), element=torch.float8_e5m2, sizes=sizes)


def pickles(trace: Path) -> list[bytes]:
    """Files of pickle and of torch.save that make a folder where they are unpickled."""

    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(trace),)

    found = [pickle.dumps(Runs(), protocol) for protocol in range(6)]
    for new in (True, False):
        with io.BytesIO() as file:
            torch.save({"layer.weight": Runs()}, file, _use_new_zipfile_serialization=new)
            found.append(file.getvalue())
    return found


def lines_of(job: Callable[[], object]) -> int:
    """The number of lines of Python that a job runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job()
    finally:
        sys.settrace(before)
    return count


class Parts:
    """A safetensors file: the tensors of the header, the description, and the bytes."""

    def __init__(self, raw: bytes) -> None:
        length = int.from_bytes(raw[:8], "little")
        self.body: dict[str, Any] = json.loads(raw[8 : 8 + length])
        self.metadata: dict[str, str] = self.body.pop("__metadata__")
        self.described: Any = json.loads(self.metadata["ottava"])
        self.data = raw[8 + length :]

    def seal(self) -> bytes:
        """The file again, with a checksum that fits whatever it says now."""
        metadata = self.metadata | {"ottava": json.dumps(self.described), "ottava.crc32": BLANK}
        return seal(json.dumps({"__metadata__": metadata, **self.body}), self.data)


def seal(text: str, data: bytes) -> bytes:
    """A file with a header and data; the checksum replaces a blank one, if it can be computed."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        body = json.loads(text)
        metadata = body.pop("__metadata__")
        metadata.pop("ottava.crc32")
        entries = {}
        for name, fields in body.items():
            begin, end = fields["data_offsets"]
            dtype = NAMES.get(fields["dtype"], fields["dtype"])
            entries[name] = [dtype, fields["shape"], zlib.crc32(data[begin:end])]
        blank, crc32 = f'"ottava.crc32": "{BLANK}"', checksum(metadata, entries)
        text = text.replace(blank, f'"ottava.crc32": "{crc32}"')
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + data


def checksum(metadata: dict[str, str], entries: dict[str, list[Any]]) -> str:
    """The checksum of a file, of ``[dtype, shape, CRC-32 of the bytes]`` by name."""
    body = json.dumps([metadata, entries], sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(body.encode()):08x}"


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index of a sharded checkpoint, and give it the right checksum."""
    body = json.loads((folder / "ottava.json").read_bytes())["checkpoint"]
    change(body)
    rest = json.dumps(body).encode() + b"}"
    text = b'{"crc32":"%08x","checkpoint":' % zlib.crc32(rest) + rest
    (folder / "ottava.json").write_bytes(text)


def save_sharded(state: Any, path: Path) -> None:
    checkpoint.save_sharded(state, path, overwrite=True)


def save_model(state: Any, path: Path) -> None:
    checkpoint.save_model(module_of(state), path)


def module_of(state: Any) -> torch.nn.Module:
    """A module with these tensors as its buffers."""
    module = torch.nn.Module()
    for name, tensor in state.items():
        module.register_buffer(name, tensor)
    return module
