"""FP8-primary weights under FSDP2, and amaxes that ranks share: compared with one process, bit for
bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ottava.errors import UsageError
from ottava.tensors import Float8Tensor, columnwise_layout
from ottava_current import Float8CurrentScalingQuantizer
from tests.fsdp import GatheredBytes, losses, model, shard


def train(mesh: Any) -> None:
    """Losses, bytes and scales, for even, uneven and empty shards, in both layouts."""
    for rows in (32, 33, 1):
        for layout in ("shared", "transpose"):
            with columnwise_layout(layout):
                alone = model(16, rows, 8, "current")
                expected = losses(alone, 16, 8)
                for reshard in (True, False):
                    case = f"rows={rows} layout={layout} reshard={reshard}"
                    sharded = model(16, rows, 8, "current")
                    shard(sharded, mesh, reshard)
                    with GatheredBytes() as gathered:
                        seen = losses(sharded, 16, 8)
                    assert seen == expected, (case, seen, expected)
                    for a, b in ((alone[0], sharded[0]), (alone[2], sharded[2])):
                        b.unshard()
                        assert isinstance(b.weight, Float8Tensor), case
                        assert b.weight.dtype == torch.bfloat16, case
                        assert torch.equal(a.weight._data, b.weight._data), case
                        assert torch.equal(a.weight._scale_inv, b.weight._scale_inv), case
                        b.reshard()
                    if rows == 32:
                        # One byte for an element, in the backward too where the weight was given up
                        # after the forward.
                        assert len(gathered.handed) == 3 * 2 * (2 if reshard else 1), (
                            case,
                            gathered.handed,
                        )
                        assert all(2 * handed == whole for whole, handed in gathered.handed), (
                            case,
                            gathered.handed,
                        )


def unequal(mesh: Any) -> None:
    """Scales that differ between ranks are refused."""
    net = model(16, 32, 8, "current")
    shard(net, mesh, True)
    with torch.no_grad():
        net[0].weight.to_local()._scale_inv.mul_(1 + dist.get_rank())
    with pytest.raises(UsageError, match="different 'fp8_scale_inv'"):
        net(torch.ones(1, 16, dtype=torch.bfloat16))


def one_scale(mesh: Any) -> None:
    """A quantizer that reduces amaxes gives each rank the bytes of the whole."""
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True)
    shards = torch.tensor([[1.0, -2.0], [8.0, 0.5]])
    whole = Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(shards)
    mine = quantizer(shards[dist.get_rank()])
    assert torch.equal(mine._scale_inv, whole._scale_inv)
    assert torch.equal(mine._data, whole._data[dist.get_rank()])
