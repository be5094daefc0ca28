"""The kernels on many tensors, each of which has one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ottava import Layout, kernels

Tensor = torch.Tensor
DTypes = Sequence[torch.dtype]


def _places(xs: Sequence[Tensor], dtypes: DTypes, formats: DTypes) -> Any:
    """The arguments of a kernel of many tensors: each is a matrix of one row."""
    shapes = [(1, x.numel()) for x in xs]
    return (
        [*xs],
        [*dtypes],
        shapes,
        [0] * len(xs),
        [Layout(fp8_dtype, (None, None)) for fp8_dtype in formats],
    )


def multi_amax(xs: Sequence[Tensor], dtypes: DTypes) -> Tensor:
    """The largest magnitude of each, its elements rounded to a dtype."""
    return kernels.grid_multi_amax(*_places(xs, dtypes, [torch.float8_e4m3fn] * len(xs)))


def multi_cast(
    xs: Sequence[Tensor], dtypes: DTypes, scales: Tensor, formats: DTypes, outs: Sequence[Tensor]
) -> None:
    """Data of each, with one of ``scales``."""
    pairs = list(zip(scales.view(-1, 1, 1).unbind(), outs, strict=True))
    kernels.grid_multi_cast(*_places(xs, dtypes, formats), pairs, [None] * len(xs))
