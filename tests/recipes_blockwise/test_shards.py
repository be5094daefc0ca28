"""Shards of weights: from master weights in one process and on two ranks, and FSDP2."""

from __future__ import annotations

import pytest
import torch

from ottava.distributed import quantize_master_weights, replace_raw_data
from ottava.errors import ShapeError
from ottava_blockwise import Float8BlockQuantizer
from tests import ranks
from tests.comparing import assert_same
from tests.grids import E4M3, E5M2, inner, wide

CASES = ["train", "gathered", "refused", "files", "masters"]


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    return ranks.failures("tests.recipes_blockwise.fsdp_cases", CASES)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, failures: dict[str, str | None]) -> None:
    assert failures[case] is None, failures[case]


def test_weights_of_one_batch_have_their_own_options() -> None:
    quantizers = [
        Float8BlockQuantizer(E4M3),
        Float8BlockQuantizer(E5M2, force_pow_2_scales=False),
        Float8BlockQuantizer(E4M3, block_scaling_dim=1),
        Float8BlockQuantizer(E4M3, block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=0.5),
        Float8BlockQuantizer(E4M3, block_scaling_dim=1, columnwise=False),
    ]
    masters = [wide(140, 300, seed=seed) for seed in range(len(quantizers))]
    for dtype in (torch.float32, torch.bfloat16):
        weights = [quantizer(torch.ones(140, 300, dtype=dtype)) for quantizer in quantizers]
        quantize_master_weights(weights, masters, None)
        for weight, quantizer, master in zip(weights, quantizers, masters, strict=True):
            expected = quantizer(master.to(dtype))
            for columnwise in (False, True) if quantizer.columnwise_usage else (False,):
                assert_same(weight.for_usage(columnwise), expected.for_usage(columnwise))


@pytest.mark.parametrize("dim", [1, 2])
def test_a_shard_of_rows_is_that_of_the_whole(dim: int) -> None:
    """Columns, too, of whole blocks of rows; others are refused before anything is written."""
    quantizer = Float8BlockQuantizer(E4M3, block_scaling_dim=dim)
    master = wide(256, 300)
    whole, part = quantizer(torch.ones(256, 300)), quantizer(torch.ones(128, 300))
    quantize_master_weights([whole], [master[128:]], [128 * 300], None, [part])
    for columnwise in (False, True):
        assert_same(part.for_usage(columnwise), quantizer(master[128:]).for_usage(columnwise))
    part = quantizer(torch.ones(128, 300))
    before = [t.clone() for t in inner(part)]
    with pytest.raises(ShapeError, match="rows 100 to 228 of 256, which cut the blocks"):
        quantize_master_weights([whole], [master[100:228]], [100 * 300], None, [part])
    assert_same(inner(part), before)


@pytest.mark.parametrize("dim", [1, 2])
def test_raw_data_moves_into_a_buffer(dim: int) -> None:
    weight = Float8BlockQuantizer(E4M3, block_scaling_dim=dim)(wide(140, 300))
    before, buffer = weight.dequantize(), torch.empty(2 * 140 * 300, dtype=torch.uint8)
    columns = weight.for_usage(True)
    replace_raw_data(weight, buffer[: 140 * 300])
    assert weight._rowwise_data.data_ptr() == buffer.data_ptr()
    assert torch.equal(weight.dequantize(), before)
    assert_same(weight.for_usage(True), columns)
