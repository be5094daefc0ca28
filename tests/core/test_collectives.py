"""Collectives on two ranks: for any tensor and any group, and a failure of one is one of all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ottava import GridQuantizer, Layout
from ottava.collectives import (
    Ranks,
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    group_of_this_rank,
    spans_ranks,
)
from ottava.errors import CheckpointError
from tests.comparing import assert_same
from tests.ranks import on_ranks
from tests.samples import wide


@on_ranks(2)
def test_results_and_arguments_of_collectives(mesh: DeviceMesh) -> None:
    both = torch.stack([torch.arange(6.0).view(2, 3).t() * sign for sign in (1, -1)])
    own = both[dist.get_rank()].t().contiguous().t()
    assert_same(all_reduce_max(own), both[0])
    assert_same(all_reduce_sum(own), torch.zeros(3, 2))
    assert_same(all_gather(own), both)
    assert_same(own, both[dist.get_rank()])


@on_ranks(2)
def test_a_group_of_one_rank_spans_no_others(mesh: DeviceMesh) -> None:
    group = group_of_this_rank()
    assert [spans_ranks(each) for each in (None, group)] == [True, False]
    assert (Ranks(group).rank, Ranks(None).rank) == (0, dist.get_rank())
    assert Ranks(group).gather(dist.get_rank()) == [dist.get_rank()]


@on_ranks(2)
def test_columns_alone_have_the_scale_of_all_ranks(mesh: DeviceMesh) -> None:
    quantizer = GridQuantizer(
        Layout(torch.float8_e4m3fn, (None, None), columnwise="transposed"), rowwise=False
    )
    x = wide(64, 32)
    expected = quantizer(x).dequantize()
    sharing = quantizer.for_shards(mesh.get_group())
    rows = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
    assert_same(sharing(x[rows]).dequantize(), expected[rows])


@on_ranks(2, seconds=20)
def test_an_interrupt_of_one_rank_is_a_failure_of_the_other(mesh: DeviceMesh) -> None:
    def interrupt_the_last() -> None:
        if dist.get_rank():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if dist.get_rank() else CheckpointError):
        Ranks(None).each(interrupt_the_last)
