"""What Ottava's times are compared with: the same arithmetic in plain torch, and torchao where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

E4M3 = torch.float8_e4m3fn
Run = Callable[[torch.Tensor], Any]


def torch_cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Cast with a known scale."""
    return (x.float() * scale).clamp(-448.0, 448.0).to(E4M3)


def torch_cast_transpose(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with its transpose."""
    codes = torch_cast(x, scale)
    return codes, codes.t().contiguous()


def torch_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Current scaling."""
    amax = x.abs().amax().float()
    return (x.float() * (448.0 / amax)).clamp(-448.0, 448.0).to(E4M3), amax


def torch_quantize_transpose(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with its transpose."""
    codes, _ = torch_quantize(x)
    return codes, codes.t().contiguous()


def _blocks(blocks: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of values without NaN: the exponent rounded up, and codes."""
    bits = (blocks.abs().amax(dim, keepdim=True).float() * (1 / 448)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    scale = (exponent + torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)).clamp(max=254)
    multiplier = torch.where(scale == 254, 0x400000, (254 - scale) << 23).view(torch.float32)
    codes = (blocks.float() * multiplier).clamp(-448.0, 448.0).to(E4M3)
    return codes, scale.to(torch.uint8)


def torch_mx(x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """MX blocks along rows and along columns; sizes are multiples of 32."""
    rows, columns = x.shape
    return _blocks(x.view(rows, columns // 32, 32), 2), _blocks(x.view(rows // 32, 32, columns), 1)


def torchao_version() -> str | None:
    """Its version, or None."""
    try:
        return str(importlib.import_module("torchao").__version__)
    except Exception:  # an installation that does not fit the torch at hand may raise anything
        return None


def torchao_linear(recipe: str, inner: int, outer: int, device: torch.device, bias: bool) -> torch.nn.Module:
    """torchao's float8 Linear, ``"tensorwise"`` or ``"rowwise"``, bfloat16, to be compiled."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = torch.nn.Sequential(torch.nn.Linear(inner, outer, bias=bias, device=device, dtype=torch.bfloat16))
    made: torch.nn.Module = convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    return made


def torchao_casts() -> dict[str, Run]:
    """Its own ways to quantize a bfloat16 matrix, those that this release has."""
    found: dict[str, Run] = {}
    try:
        scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
        training = importlib.import_module("torchao.float8.float8_training_tensor")
        mm_config = training.LinearMMConfig()
        found["quantize"] = torch.compile(
            lambda x: scaling.hp_tensor_to_float8_dynamic(x, E4M3, mm_config), fullgraph=True, dynamic=False
        )
    except Exception:
        pass
    try:
        mx = importlib.import_module("torchao.prototype.mx_formats.kernels")
        found["mx rows"] = lambda x: mx.triton_to_mxfp8_dim0(x, 32)
        found["mx columns"] = lambda x: mx.triton_to_mxfp8_dim1(x, 32)
    except Exception:
        pass
    return found
