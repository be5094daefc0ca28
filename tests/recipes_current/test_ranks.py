"""Ranks that reduce amaxes have the bytes of one process that quantizes the tensors of all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ottava.formats import Format
from ottava.tensors import columnwise_layout
from ottava_current import Float8CurrentScaling, Float8CurrentScalingQuantizer
from tests.comparing import assert_same
from tests.ranks import on_ranks
from tests.samples import wide

# One process forks all ranks.
pytestmark = pytest.mark.xdist_group("forks")
OPTIONS = ({}, {"force_pow_2_scales": True}, {"amax_epsilon": 1e6})


@on_ranks(2)
def test_the_amax_is_that_of_the_group(mesh: DeviceMesh) -> None:
    rank, parts = mesh.get_rank(), [wide(4, 6), 100 * wide(4, 6, seed=1)]
    alone = [dist.new_group([each]) for each in range(2)][rank]
    for group, whole in ((None, torch.cat(parts)), (alone, parts[rank])):
        for options in OPTIONS:
            recipe = Float8CurrentScaling(Format.E4M3, with_amax_reduction=True, **options)
            reduced = recipe.quantizer("input", amax_reduction_group=group)
            plain = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, **options)
            note = (group, options)
            for usages in ((True, True), (True, False), (False, True)):
                with columnwise_layout("transpose"):
                    q = reduced.with_usage(*usages)(parts[rank])
                assert tuple(q.get_usages().values()) == usages, note
                first = 0 if group else 4 * rank
                expected = plain(whole).dequantize()[first : first + 4]
                assert_same(q.dequantize(), expected, note=note)
            shards = plain.for_shards(group)
            assert_same(shards(parts[rank]).dequantize(), expected, note=note)
            assert not plain.with_amax_reduction, note
