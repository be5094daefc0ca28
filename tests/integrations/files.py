"""A model, and what files of tensors hold, read by the library of the format alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.torch
import torch

from ottava import checkpoint
from ottava.tensors import QuantizedTensor
from ottava_integrations.formats import Scheme, published_tensors
from tests.comparing import assert_same

#: Dtypes of numpy by the names in the header of a file.
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64}
NUMPY |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
NUMPY |= {"F8_E8M0": ml_dtypes.float8_e8m0fnu}


class Net(torch.nn.Module):
    """Two linear layers with a norm between, a tied head, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(16, 128)
        self.up = torch.nn.Linear(128, 256)
        self.norm = torch.nn.LayerNorm(256)
        self.down = torch.nn.Linear(256, 128, bias=False)
        self.lm_head = torch.nn.Linear(128, 16, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.nn.functional.gelu(self.norm(self.up(x))))
        return self.lm_head(y) + self.shift


def published_parts(weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The tensors of a weight in a published format, by the suffixes of their names."""
    quantizer = scheme.exports_as.make().quantizer("weight").with_usage(True, False)
    return published_tensors(quantizer(weight.detach()), scheme, weight.dtype)


def sources_of(state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """A state dict in each form that checkpoints have: files, and folders of files."""
    names = "plain.safetensors", "own.safetensors", "one.pt", "sharded", "indexed", "folder"
    plain, own, pickled, sharded, indexed, whole = places = [folder / name for name in names]
    indexed.mkdir(parents=True)
    whole.mkdir()
    safetensors.torch.save_file(state, plain)
    safetensors.torch.save_file(state, whole / "model.safetensors")
    checkpoint.save_file(state, own)
    torch.save(state, pickled)
    checkpoint.save_sharded(state, sharded)
    for name, tensor in state.items():
        safetensors.torch.save_file({name: tensor}, indexed / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in state}}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    return places


def plain(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays in a file, by json and numpy."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__")
    arrays = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        data = np.frombuffer(raw[begin + first : begin + last], NUMPY[entry["dtype"]])
        arrays[name] = data.reshape(entry["shape"])
    return arrays


def dequantized(path: Path, name: str, block: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The values of a weight in a file whose rowwise data has a scale for each block."""
    arrays = plain(path)
    if name in arrays:
        return arrays[name].astype(np.float32)
    old_names = f"{name}.data" in arrays
    parts = ("data", "fp8_scale_inv") if old_names else ("rowwise_data", "rowwise_scale_inv")
    data, scales = (arrays[f"{name}.{part}"].astype(np.float32) for part in parts)
    scales = scales.reshape(-(-data.shape[0] // block[0]), -1)
    for axis, size in enumerate(block):
        scales = scales.repeat(size, axis)
    return data * scales[: data.shape[0], : data.shape[1]]


def same_files(a: Path, b: Path) -> None:
    """The same tensors by name, byte for byte."""
    one, two = (safetensors.torch.load_file(path) for path in (a, b))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert_same(tensor, two[name], note=name)


def quantized_names(path: Path) -> set[str]:
    state = checkpoint.load_file(path)
    return {name for name, value in state.items() if isinstance(value, QuantizedTensor)}


def inner(value: Any) -> list[torch.Tensor | None]:
    return value.inner_list() if isinstance(value, QuantizedTensor) else [value]
