"""What is left of the helpers of MXFP8's tests, for those of shards."""

from __future__ import annotations

from typing import Any

import torch

from tests import samples
from tests.comparing import assert_same
from tests.grids import inner


def wide(shape: Any, seed: int = 0) -> torch.Tensor:
    return samples.wide(*shape, seed=seed)


def check_bytes(q: Any, expected: Any) -> None:
    assert_same(inner(q), inner(expected))
