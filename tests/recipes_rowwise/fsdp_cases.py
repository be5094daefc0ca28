"""Rowwise weights on two ranks, compared with one process bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ottava
from ottava.distributed import gather_quantized, quantize_master_weights
from ottava_rowwise import Float8RowwiseQuantizer, Float8RowwiseTensor
from tests.comparing import assert_same
from tests.fsdp import GatheredBytes, losses, model, shard
from tests.grids import E4M3, inner, wide
from tests.recipes_rowwise.kinds import RECIPES

ROWS, COLUMNS = 64, 40


def train(mesh: Any) -> None:
    """Weights are gathered as bytes; the scales of columns, which span all shards, stay equal on
    all of them."""
    for name, recipe in RECIPES.items():
        alone = model(COLUMNS, ROWS, 32, recipe)
        expected = losses(alone, COLUMNS, 32)
        for reshard in (True, False):
            sharded = model(COLUMNS, ROWS, 32, recipe)
            shard(sharded, mesh, reshard)
            with GatheredBytes() as gathered:
                assert losses(sharded, COLUMNS, 32) == expected, (name, reshard)
            assert all(sent < size * 2 for size, sent in gathered.handed), gathered.handed
            for a, b in ((alone[0], sharded[0]), (alone[2], sharded[2])):
                b.unshard()
                assert type(b.weight) is Float8RowwiseTensor
                for mine, theirs in zip(inner(b.weight), inner(a.weight), strict=True):
                    assert mine is None or torch.equal(mine, theirs), (name, reshard)
                b.reshard()


def gathered(mesh: Any) -> None:
    """Weights in high precision, quantized before or after the gather."""
    for name, recipe in RECIPES.items():
        for rows in (64, 33):
            nets = []
            for _ in range(3):
                torch.manual_seed(0)
                net = torch.nn.Sequential(
                    torch.nn.Linear(40, rows), torch.nn.GELU(), torch.nn.Linear(rows, 32)
                ).bfloat16()
                nets.append(ottava.convert(net, recipe))
            gather_quantized(nets[2])
            expected = losses(nets[0], 40, 32)
            for net in nets[1:]:
                shard(net, mesh, True)
                assert losses(net, 40, 32) == expected, (name, rows)


def masters(mesh: Any) -> None:
    """Ranges of master weights that cut rows anywhere give the bytes of the whole."""
    rank = dist.get_rank()
    quantizers = [Float8RowwiseQuantizer(E4M3, force_pow_2_scales=pow_2) for pow_2 in (True, False)]
    values = [wide(200 + number, 300, seed=number) for number in range(2)]
    weights = [
        q(torch.zeros(v.shape, dtype=torch.bfloat16))
        for q, v in zip(quantizers, values, strict=True)
    ]
    ranges = [
        (0, cut) if rank == 0 else (cut, v.numel())
        for cut, v in zip((30017, 1), values, strict=True)
    ]
    shards = [v.flatten()[first:last] for v, (first, last) in zip(values, ranges, strict=True)]
    quantize_master_weights(weights, shards, [first for first, _ in ranges])
    for weight, quantizer, value, (first, last) in zip(
        weights, quantizers, values, ranges, strict=True
    ):
        expected = quantizer(value.bfloat16())
        for name in ("_rowwise_data", "_columnwise_data"):
            mine, theirs = (getattr(w, name).flatten()[first:last] for w in (weight, expected))
            assert_same(mine, theirs)
        for name in ("_rowwise_scale_inv", "_columnwise_scale_inv"):
            assert_same(getattr(weight, name), getattr(expected, name))
