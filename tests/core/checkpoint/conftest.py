"""A small model with everything a file can hold, and files written by hand: the format as the
documentation has it."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.tensors import QuantizedTensorStorage


class Small(torch.nn.Module):
    """A quantized weight, a bias in bfloat16, a tied weight, buffers of other kinds."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        with ottava.quantized_model_init(recipe):
            self.layer = ottava.nn.Linear(7, 5, recipe=recipe)
        self.layer.bias = torch.nn.Parameter(self.layer.bias.detach().bfloat16())
        self.first = torch.nn.Parameter(torch.randn(2, 3))
        self.tied = self.first
        self.register_buffer("step", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))


@pytest.fixture
def small(recipe: Any) -> Callable[[int], Small]:
    """Makes a model whose values depend on a seed."""

    def make(seed: int) -> Small:
        torch.manual_seed(seed)
        return Small(recipe)

    return make


def inner_bytes(value: Any) -> list[Any]:
    """All that a tensor holds, to be compared bit by bit."""
    parts = value.inner_list() if isinstance(value, QuantizedTensorStorage) else [value]
    held = [(t.dtype, tuple(t.shape), t.detach().contiguous()) for t in parts if t is not None]
    return [(*about, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for *about, t in held]


@pytest.fixture
def contents() -> Callable[[Any], dict[str, list[Any]]]:
    """Every byte of a model or of a state dict."""

    def read(of: Any) -> dict[str, list[Any]]:
        state = of.state_dict() if isinstance(of, torch.nn.Module) else of
        return {name: inner_bytes(value) for name, value in state.items()}

    return read


@pytest.fixture
def saved(small: Any, tmp_path: Path) -> bytes:
    """A file of the small model."""
    checkpoint.save_model(small(0), tmp_path / "saved")
    return (tmp_path / "saved").read_bytes()


class Parts:
    """A file taken apart: the tensors' part of the header, the description, and the bytes of the
    tensors."""

    def __init__(self, raw: bytes) -> None:
        length = int.from_bytes(raw[:8], "little")
        self.body: dict[str, Any] = json.loads(raw[8 : 8 + length])
        self.metadata: dict[str, str] = self.body.pop("__metadata__")
        self.described: Any = json.loads(self.metadata["ottava"])
        self.data = raw[8 + length :]

    def seal(self) -> bytes:
        """The file again, with a checksum that fits whatever it says now."""
        metadata = self.metadata | {"ottava": json.dumps(self.described), "ottava.crc32": BLANK}
        return seal_text(json.dumps({"__metadata__": metadata, **self.body}), self.data)


BLANK = "0" * 8
NAMES = {
    "BOOL": "bool",
    "I64": "int64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
}


def seal_text(text: str, data: bytes) -> bytes:
    """A file with this header and this data; the checksum is put in the place of a blank one, if it
    can be made."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        body = json.loads(text)
        metadata = body.pop("__metadata__")
        metadata.pop("ottava.crc32")
        about = {}
        for name, fields in body.items():
            begin, end = fields["data_offsets"]
            dtype = NAMES.get(fields["dtype"], fields["dtype"])
            about[name] = [dtype, fields["shape"], zlib.crc32(data[begin:end])]
        told = json.dumps([metadata, about], sort_keys=True, separators=(",", ":"))
        text = text.replace(
            f'"ottava.crc32": "{BLANK}"', f'"ottava.crc32": "{zlib.crc32(told.encode()):08x}"'
        )
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + data


@pytest.fixture
def parts(saved: bytes) -> Parts:
    return Parts(saved)


@pytest.fixture
def seal() -> Callable[[str, bytes], bytes]:
    return seal_text
