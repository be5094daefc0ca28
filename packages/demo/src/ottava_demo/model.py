"""A small byte-level GPT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ottava.kernels.products import product_dtype
from ottava.tensors import QuantizedTensorStorage

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """Shape of the model and of its batches; ``length`` is in bytes."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int


SIZES = {
    "tiny": Size(layers=1, width=64, heads=2, length=32, batch=4),
    "small": Size(layers=4, width=128, heads=4, length=128, batch=8),
    "medium": Size(layers=6, width=512, heads=8, length=256, batch=16),
}


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, size: Size, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = linear(size.width, 3 * size.width)
        self.proj = linear(size.width, size.width)
        self.up = linear(size.width, 4 * size.width)
        self.down = linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[batch, length, width]`` to the same shape."""
        b, t, c = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, t, 3, self.heads, c // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        # On CPUs where the layers' bfloat16 products are slow, those of attention are slow too.
        dtype, compute_dtype = q.dtype, product_dtype(q.dtype, q.device)
        q, k, v = (t.to(compute_dtype) for t in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(dtype)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, c))
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    """Takes bytes and gives logits over the next byte.

    The embedding is tied to ``head``, which stays in high precision.

    Args:
        size: the shape of the model.
        linear: makes a linear layer of the blocks, ``linear(features_in, features_out)``.
    """

    def __init__(self, size: Size, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList([Block(size, linear) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            # A weight that is already quantized keeps its values.
            if parameter.dim() != 2 or isinstance(parameter, QuantizedTensorStorage):
                continue
            ends_branch = name.endswith(("proj.weight", "down.weight"))
            depth_factor = (2 * size.layers) ** -0.5 if ends_branch else 1.0
            nn.init.normal_(parameter, std=0.02 * depth_factor)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps bytes ``[batch, length]`` to logits ``[batch, length, 256]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
