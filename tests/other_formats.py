"""Checkpoints as other tools publish them quantized: tensors by name, and the configuration beside
the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]
ROWS, COLUMNS = 256, 128


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def packed(columns: int) -> torch.Tensor:
    return torch.randint(0, 255, (ROWS, columns), dtype=torch.uint8)


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def compressed(kind: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
    }


class Published(NamedTuple):
    """A format: what a layer's tensors are by the ends of their names, and what the error calls it
    with and without the configuration."""

    tensors: Callable[[], Tensors]
    config: dict[str, Any]
    title: str
    title_by_names: str


def _float_quantized(*scale: int) -> Published:
    return Published(
        lambda: {"weight": e4m3(ROWS, COLUMNS), "weight_scale": ones(*scale)},
        compressed("float-quantized"),
        "compressed-tensors float-quantized",
        "compressed-tensors float-quantized, or ModelOpt FP8",
    )


FORMATS = {
    "float-quantized, tensor": _float_quantized(1),
    "float-quantized, channel": _float_quantized(ROWS, 1),
    "float-quantized, block": _float_quantized(ROWS // 128, COLUMNS // 128),
    "mxfp8-quantized": Published(
        lambda: {"weight": e4m3(ROWS, COLUMNS), "weight_scale": packed(COLUMNS // 32)},
        compressed("mxfp8-quantized"),
        "compressed-tensors mxfp8-quantized",
        "compressed-tensors mxfp8-quantized",
    ),
    "mxfp4-pack-quantized": Published(
        lambda: {"weight_packed": packed(COLUMNS // 2), "weight_scale": packed(COLUMNS // 32)},
        compressed("mxfp4-pack-quantized"),
        "compressed-tensors mxfp4-pack-quantized",
        "compressed-tensors mxfp4-pack-quantized or mxfp6-pack-quantized",
    ),
    "nvfp4-pack-quantized": Published(
        lambda: {
            "weight_packed": packed(COLUMNS // 2),
            "weight_scale": e4m3(ROWS, COLUMNS // 16),
            "weight_global_scale": ones(1, dtype=torch.float32),
            "input_global_scale": ones(1, dtype=torch.float32),
        },
        compressed("nvfp4-pack-quantized"),
        "compressed-tensors nvfp4-pack-quantized",
        "compressed-tensors nvfp4-pack-quantized",
    ),
    "Hugging Face FP8": Published(
        lambda: {
            "weight": e4m3(ROWS, COLUMNS),
            "weight_scale_inv": ones(2, 1, dtype=torch.float32),
        },
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "Hugging Face FP8",
        "Hugging Face FP8",
    ),
    "ModelOpt FP8": Published(
        lambda: {
            "weight": e4m3(ROWS, COLUMNS),
            "weight_scale": ones(dtype=torch.float32),
            "input_scale": ones(dtype=torch.float32),
        },
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "ModelOpt FP8",
        "compressed-tensors float-quantized, or ModelOpt FP8",
    ),
    "ModelOpt NVFP4": Published(
        lambda: {
            "weight": packed(COLUMNS // 2),
            "weight_scale": e4m3(ROWS, COLUMNS // 16),
            "weight_scale_2": ones(dtype=torch.float32),
            "input_scale": ones(dtype=torch.float32),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "ModelOpt NVFP4",
        "ModelOpt NVFP4",
    ),
    "MXFP4 of experts": Published(
        lambda: {"weight_blocks": packed(COLUMNS // 2), "weight_scales": packed(COLUMNS // 32)},
        {"quant_method": "mxfp4"},
        "Hugging Face MXFP4",
        "Hugging Face MXFP4",
    ),
    "another tool": Published(
        lambda: {"weight": e4m3(ROWS, COLUMNS), "scale_weight": ones(dtype=torch.float32)},
        {"quant_method": "tomorrow"},
        "'tomorrow'",
        "scaled FP8 of ComfyUI",
    ),
}


def state_of(name: str) -> Tensors:
    """A model of two linear layers, the first one quantized."""
    quantized = {f"0.{end}": tensor for end, tensor in FORMATS[name].tensors().items()}
    rest = {"0.bias": ones(ROWS), "1.weight": ones(64, ROWS), "1.bias": ones(64)}
    return quantized | rest


def write(name: str, folder: Path, *, config: bool, file: str = "model.safetensors") -> Path:
    """The checkpoint in a folder, its configuration beside it where asked."""
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state_of(name), folder / file)
    if config:
        (folder / "config.json").write_text(
            json.dumps({"quantization_config": FORMATS[name].config})
        )
    return folder / file


def model() -> torch.nn.Module:
    """What the checkpoint is of."""
    layers = torch.nn.Linear(COLUMNS, ROWS), torch.nn.Linear(ROWS, 64)
    return torch.nn.Sequential(*layers).to(torch.bfloat16)
