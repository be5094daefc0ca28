"""Checkpoints as other tools publish them quantized: tensors by name, and the configuration beside
the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]
ROWS, COLUMNS = 256, 128
E4M3, U8, F32, BF16 = torch.float8_e4m3fn, torch.uint8, torch.float32, torch.bfloat16
_Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Published(NamedTuple):
    """A format: dtypes and shapes of a layer's tensors by the ends of their names, and what the
    error calls it with and without the configuration."""

    tensors: _Specs
    config: dict[str, Any]
    title: str
    title_by_names: str


DATA = (E4M3, (ROWS, COLUMNS))
PACKED = (U8, (ROWS, COLUMNS // 2))
MX = (U8, (ROWS, COLUMNS // 32))
NV = (E4M3, (ROWS, COLUMNS // 16))
ONE, SCALAR = (F32, (1,)), (F32, ())


def _compressed(kind: str, tensors: _Specs, by_names: str = "") -> Published:
    config = {"quant_method": "compressed-tensors", "format": kind}
    title = f"compressed-tensors {kind}"
    return Published(tensors, config, title, by_names or title)


def _float_quantized(*scale: int) -> Published:
    tensors = {"weight": DATA, "weight_scale": (BF16, scale)}
    by_names = "compressed-tensors float-quantized, or ModelOpt FP8"
    return _compressed("float-quantized", tensors, by_names)


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMATS = {
    "float-quantized, tensor": _float_quantized(1),
    "float-quantized, channel": _float_quantized(ROWS, 1),
    "float-quantized, block": _float_quantized(ROWS // 128, COLUMNS // 128),
    "mxfp8": _compressed("mxfp8-quantized", {"weight": DATA, "weight_scale": MX}),
    "mxfp4": _compressed(
        "mxfp4-pack-quantized",
        {"weight_packed": PACKED, "weight_scale": MX},
        "compressed-tensors mxfp4-pack-quantized or mxfp6-pack-quantized",
    ),
    "nvfp4": _compressed(
        "nvfp4-pack-quantized",
        {"weight_packed": PACKED, "weight_scale": NV, "weight_global_scale": ONE}
        | {"input_global_scale": ONE},
    ),
    "int4": _compressed(
        "pack-quantized",
        {"weight_packed": (torch.int32, (ROWS, COLUMNS // 8)), "weight_scale": (BF16, (ROWS, 1))},
    ),
    "Hugging Face FP8": Published(
        {"weight": DATA, "weight_scale_inv": (F32, (2, 1))},
        BLOCKS,
        "Hugging Face FP8",
        "Hugging Face FP8",
    ),
    "ModelOpt FP8": Published(
        {"weight": DATA, "weight_scale": SCALAR, "input_scale": SCALAR},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "ModelOpt FP8",
        "compressed-tensors float-quantized, or ModelOpt FP8",
    ),
    "ModelOpt NVFP4": Published(
        {"weight": PACKED, "weight_scale": NV, "weight_scale_2": SCALAR, "input_scale": SCALAR},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "ModelOpt NVFP4",
        "ModelOpt NVFP4",
    ),
    "MXFP4 of experts": Published(
        {"weight_blocks": PACKED, "weight_scales": MX},
        {"quant_method": "mxfp4"},
        "Hugging Face MXFP4",
        "Hugging Face MXFP4",
    ),
    "another tool": Published(
        {"weight": DATA, "scale_weight": SCALAR},
        {"quant_method": "tomorrow"},
        "'tomorrow'",
        "scaled FP8 of ComfyUI",
    ),
}


def state_of(name: str) -> Tensors:
    """A model of two linear layers, the first one quantized."""
    specs = FORMATS[name].tensors.items()
    quantized = {f"0.{end}": torch.ones(shape).to(dtype) for end, (dtype, shape) in specs}
    rest = {"0.bias": ROWS, "1.weight": (64, ROWS), "1.bias": 64}
    return quantized | {name: torch.ones(shape, dtype=BF16) for name, shape in rest.items()}


def write(name: str, folder: Path, *, config: bool) -> Path:
    """The checkpoint in a folder, with its configuration beside it if ``config``."""
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state_of(name), folder / "model.safetensors")
    if config:
        text = json.dumps({"quantization_config": FORMATS[name].config})
        (folder / "config.json").write_text(text)
    return folder / "model.safetensors"


def model() -> torch.nn.Module:
    """The model of the checkpoint."""
    layers = torch.nn.Linear(COLUMNS, ROWS), torch.nn.Linear(ROWS, 64)
    return torch.nn.Sequential(*layers).to(BF16)
