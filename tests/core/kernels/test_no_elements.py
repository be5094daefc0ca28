"""Tensors without elements have scales all the same where rows or columns of nothing do: 1, as
amaxes of 0 have."""

from __future__ import annotations

import pytest
import torch

from ottava import Layout, kernels


@pytest.mark.parametrize("columnwise", ["own", "transposed"])
@pytest.mark.parametrize("block", [(1, None), (None, 1), (None, None), (8, 64), (4, None)], ids=str)
@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0,), (2, 3, 0)], ids=str)
def test_scales_of_nothing_are_written(
    shape: tuple[int, ...], block: tuple[int | None, int | None], columnwise: str
) -> None:
    layout = Layout(torch.int8, block, columnwise=columnwise)
    made = []
    for backend in ("cpu", "reference"):
        # What was not written would be what was here.
        torch.full((64,), 7.5)
        with kernels.use_backend(backend):
            made.append(kernels.grid_quantize(torch.empty(shape), layout))
    for own, other in zip(*made, strict=True):
        assert torch.equal(own, other)
    assert all(bool((scales == 1.0).all()) for scales in made[0][1::2])
