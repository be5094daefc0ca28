"""Shards of weights: from master weights in one process and on two ranks, and FSDP2."""

from __future__ import annotations

import pytest
import torch

from ottava.distributed import quantize_master_weights, replace_raw_data
from ottava_rowwise import Float8RowwiseQuantizer
from tests import ranks
from tests.comparing import assert_same
from tests.grids import E4M3, E5M2, inner, wide

CASES = ["train", "gathered", "masters"]


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    return ranks.failures("tests.recipes_rowwise.fsdp_cases", CASES)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, failures: dict[str, str | None]) -> None:
    assert failures[case] is None, failures[case]


def test_weights_of_one_batch_have_their_own_options() -> None:
    quantizers = [
        Float8RowwiseQuantizer(E4M3),
        Float8RowwiseQuantizer(E5M2, force_pow_2_scales=True),
        Float8RowwiseQuantizer(E4M3, amax_epsilon=0.5),
        Float8RowwiseQuantizer(E4M3, columnwise=False),
    ]
    masters = [wide(140, 300, seed=seed) for seed in range(len(quantizers))]
    for dtype in (torch.float32, torch.bfloat16):
        weights = [quantizer(torch.ones(140, 300, dtype=dtype)) for quantizer in quantizers]
        quantize_master_weights(weights, masters, None)
        for weight, quantizer, master in zip(weights, quantizers, masters, strict=True):
            assert_same(inner(weight), inner(quantizer(master.to(dtype))))


def test_raw_data_moves_into_buffers() -> None:
    weight = Float8RowwiseQuantizer(E4M3)(wide(140, 300))
    before, buffer = (
        [t.clone() for t in inner(weight)],
        torch.empty(2, 140 * 300, dtype=torch.uint8),
    )
    replace_raw_data(weight, list(buffer))
    assert weight._rowwise_data.data_ptr() == buffer[0].data_ptr()
    assert weight._columnwise_data.data_ptr() == buffer[1].data_ptr()
    assert_same(inner(weight), before)
