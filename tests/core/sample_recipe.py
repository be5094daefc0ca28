"""A recipe written on core's base classes alone."""

from __future__ import annotations

from typing import Any

import torch

from ottava import Recipe
from tests.core.layouts.layouts import PerTensor


class SampleQuantizer(PerTensor):
    """Per-tensor scaling with the kernels that core has."""


class SampleRecipe(Recipe):
    """E4M3 forward, E5M2 for gradients."""

    name = "sample"

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> SampleQuantizer:
        return SampleQuantizer(torch.float8_e5m2 if role.is_gradient else torch.float8_e4m3fn)
