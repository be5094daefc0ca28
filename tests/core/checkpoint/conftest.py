"""A small model with everything that a file can hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from tests.core.checkpoint.files import Parts


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


@pytest.fixture
def saved(small: Any, tmp_path: Path) -> bytes:
    """A file of the small model."""
    checkpoint.save_model(small(0), tmp_path / "saved")
    return (tmp_path / "saved").read_bytes()


@pytest.fixture
def parts(saved: bytes) -> Parts:
    return Parts(saved)
