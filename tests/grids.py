"""What is left of the checks of grids, for the tests that still use it."""

from __future__ import annotations

from typing import Any

import torch

from tests.samples import wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


def inner(q: Any) -> list[Any]:
    return [getattr(q, name) for name in INNER]


__all__ = ["E4M3", "E5M2", "inner", "wide"]
