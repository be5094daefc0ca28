"""What files of tensors hold, read by the library of the format alone."""

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
from tests.comparing import assert_same

#: Dtypes of numpy by the names in the header of a file.
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "U8": np.uint8}
NUMPY |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
NUMPY |= {"F8_E8M0": ml_dtypes.float8_e8m0fnu}


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


def dequantized(path: Path, name: str) -> np.ndarray[Any, Any]:
    """The values of a weight in a file: data times scales, each for a block of equal size."""
    arrays = plain(path)
    mine = {key.removeprefix(f"{name}."): array for key, array in arrays.items() if name in key}
    if name in arrays:
        return arrays[name].astype(np.float32)
    data = mine.get("rowwise_data", mine.get("data")).astype(np.float32)
    scales = mine.get("rowwise_scale_inv", mine.get("fp8_scale_inv")).astype(np.float32)
    if scales.size == 1:
        return data * scales.reshape(())
    for axis, size in enumerate(data.shape):
        block = -(-size // scales.shape[axis])
        block = 1 << (block - 1).bit_length() if scales.shape[axis] > 1 else size
        scales = scales.repeat(block, axis)[(slice(None),) * axis + (slice(size),)]
    return data * scales


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
