"""Rotations: the oracle's butterfly is the product with Sylvester's matrix, and rotations cancel in
a product."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ottava import GridQuantizer, Layout
from ottava.gemm import gemm
from ottava.layout import Rotation
from tests import oracle
from tests.comparing import assert_same
from tests.core.layouts.layouts import SIGNS


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_the_butterfly_is_the_product_with_the_matrix(size: int) -> None:
    """Of integers, whose sums float32 holds; a ragged group is padded with zeros."""
    random = np.random.default_rng(size)
    row, signs = random.integers(-50, 50, 2 * size - 5), random.integers(0, 2, size) == 1
    bits = sum(1 << i for i, minus in enumerate(signs.tolist()) if minus)
    padded = np.append(row, [0] * 5).reshape(2, size) * np.where(signs, -1, 1)
    # An entry is minus where row and column share an odd number of bits.
    places = range(size)
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in places] for i in places])
    expected = (padded @ matrix).ravel().astype(np.float32) * np.float32(1 / np.sqrt(size))
    got = oracle.rotate([float(value) for value in row], size, bits, torch.float32)
    assert got == expected.tolist()


@pytest.mark.parametrize("rows", [128, 121, 7])
@pytest.mark.parametrize("size", [16, 64])
def test_wgrad_of_rotated_operands_is_that_of_plain_ones(size: int, rows: int) -> None:
    """Exactly: the root of the size is a power of two, and so are the scales, by which the rotated
    values of -1, 0 and 1 become whole numbers."""
    random = torch.Generator().manual_seed(rows)
    grad, x = (torch.randint(-1, 2, (rows, n), generator=random).float() for n in (24, 40))
    signs = SIGNS & ((1 << size) - 1)
    layout = Layout(torch.int8, (1, None), rounding="floor", columnwise="transposed")
    rotated = dataclasses.replace(layout, rotation=Rotation(size, signs, "columnwise"))
    for chosen in (layout, rotated):
        quantizer = GridQuantizer(chosen)
        product = gemm(quantizer(grad), quantizer(x), "wgrad", out_dtype=torch.float32)
        assert_same(product, grad.t() @ x)
