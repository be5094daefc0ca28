"""Weights that are quantized from shards of their master weights, on one process that holds all
there is of a batch."""

from __future__ import annotations

import pytest
import torch

from ottava.distributed import quantize_master_weights
from ottava_mxfp8 import MXFP8Quantizer
from tests.recipes_mxfp8.blocks import check_bytes, wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_weights_of_one_batch_have_their_own_options() -> None:
    quantizers = [
        MXFP8Quantizer(E4M3),
        MXFP8Quantizer(E5M2),
        MXFP8Quantizer(E4M3, scale_rounding="floor"),
        MXFP8Quantizer(E5M2, with_2d_quantization=True),
    ]
    masters = [wide((40, 70), seed=seed) for seed in range(4)]
    for count in (3, 4):
        weights = [quantizer(torch.ones(40, 70)) for quantizer in quantizers[:count]]
        quantize_master_weights(weights, masters[:count], None)
        for weight, quantizer, master in zip(weights, quantizers, masters, strict=False):
            check_bytes(weight, quantizer(master))


@pytest.mark.parametrize("square", [False, True])
def test_a_part_of_a_weight_with_leading_dimensions_has_its_own_scales(square: bool) -> None:
    quantizer = MXFP8Quantizer(E4M3, with_2d_quantization=square)
    master = wide((4, 32, 40))
    for first, last in ((0, 2), (2, 4), (1, 4)):
        whole, part = quantizer(torch.ones(4, 32, 40)), quantizer(torch.ones(last - first, 32, 40))
        quantize_master_weights([whole], [master[first:last]], [first * 32 * 40], None, [part])
        check_bytes(part, quantizer(master[first:last]))
