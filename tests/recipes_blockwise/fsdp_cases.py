"""Blockwise weights on two ranks, compared with one process bit for bit. Weights have several
blocks on each rank."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ottava
from ottava.checkpoint import load_sharded, save_sharded
from ottava.distributed import gather_quantized, quantize_master_weights
from ottava.errors import ShapeError
from ottava_blockwise import Float8BlockQuantizer, Float8BlockScaling, Float8BlockwiseQTensor
from tests.comparing import assert_same
from tests.fsdp import GatheredBytes, losses, model, shard
from tests.grids import E4M3, wide

ROWS, COLUMNS = 512, 300
RECIPES = [Float8BlockScaling(), Float8BlockScaling(force_pow_2_scales=False)]
ONE_DIMENSIONAL = Float8BlockScaling(w_block_scaling_dim=1)


def train(mesh: Any) -> None:
    """Square blocks are gathered as bytes, once; others by rows for the forward pass, by columns
    for the backward."""
    for recipe in (*RECIPES, ONE_DIMENSIONAL):
        alone = model(COLUMNS, ROWS, 256, recipe)
        expected = losses(alone, COLUMNS, 256)
        square = recipe is not ONE_DIMENSIONAL
        for reshard in (True, False):
            sharded = model(COLUMNS, ROWS, 256, recipe)
            shard(sharded, mesh, reshard)
            with GatheredBytes() as gathered:
                assert losses(sharded, COLUMNS, 256) == expected, (recipe, reshard)
            sizes = {
                ROWS * COLUMNS: ROWS * COLUMNS // 2 + 4 * 2 * 3,
                256 * ROWS: 256 * ROWS // 2 + 4 * 4,
            }
            if square:
                assert set(gathered.handed) == set(sizes.items()), gathered.handed
            for a, b in ((alone[0], sharded[0]), (alone[2], sharded[2])):
                b.unshard()
                assert type(b.weight) is Float8BlockwiseQTensor
                for columnwise in (False, True) if square or not reshard else (False,):
                    assert_same(b.weight.for_usage(columnwise), a.weight.for_usage(columnwise))
                b.reshard()


def gathered(mesh: Any) -> None:
    """Weights in high precision, quantized before or after the gather: blocks of every kind, any
    number of rows."""
    for recipe in (*RECIPES, ONE_DIMENSIONAL):
        for rows in (256, 33):
            nets = []
            for _ in range(3):
                torch.manual_seed(0)
                net = torch.nn.Sequential(
                    torch.nn.Linear(40, rows), torch.nn.GELU(), torch.nn.Linear(rows, 256)
                ).bfloat16()
                nets.append(ottava.convert(net, recipe))
            gather_quantized(nets[2])
            expected = losses(nets[0], 40, 256)
            for net in nets[1:]:
                shard(net, mesh, True)
                assert losses(net, 40, 256) == expected, (recipe, rows)


def refused(mesh: Any) -> None:
    """Shards that cut blocks, of rows or of columns, are named, with what to do."""
    for recipe in (RECIPES[0], ONE_DIMENSIONAL):
        net = model(COLUMNS, 320, 256, recipe)
        shard(net, mesh, True)
        with pytest.raises(ShapeError, match="rows 0 to 160 of 320, which cut the blocks"):
            net(torch.ones(1, COLUMNS, dtype=torch.bfloat16))


def files(mesh: Any) -> None:
    """Shards of rows and of columns, saved by two ranks, are loaded by them and by each as a
    whole."""
    folder = [f"{tempfile.mkdtemp()}/step" if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    alone, sharded, other, whole = (model(COLUMNS, ROWS, 256, ONE_DIMENSIONAL) for _ in range(4))
    for net in (other, whole):
        with torch.no_grad():
            net[0].weight.copy_(wide(ROWS, COLUMNS, seed=5))
    shard(sharded, mesh, True)
    shard(other, mesh, True)
    save_sharded(sharded.state_dict(), folder[0])
    load_sharded(other.state_dict(), folder[0])
    x = wide(24, COLUMNS, seed=3).bfloat16()
    assert_same(other(x), alone(x))
    load_sharded(whole.state_dict(), folder[0])
    for columnwise in (False, True):
        assert_same(whole[0].weight.for_usage(columnwise), alone[0].weight.for_usage(columnwise))


def masters(mesh: Any) -> None:
    """Ranges of master weights that cut blocks anywhere give the bytes of the whole, in one batch
    of every kind."""
    rank = dist.get_rank()
    quantizers = [
        Float8BlockQuantizer(E4M3, block_scaling_dim=dim, force_pow_2_scales=pow_2)
        for dim in (1, 2)
        for pow_2 in (True, False)
    ]
    values = [wide(200 + number, COLUMNS, seed=number) for number in range(4)]
    weights = [
        q(torch.zeros(v.shape, dtype=torch.bfloat16))
        for q, v in zip(quantizers, values, strict=True)
    ]
    cuts = [COLUMNS * 100 + 17, COLUMNS * 130, 1, 200 * COLUMNS]
    ranges = [
        (0, cut) if rank == 0 else (cut, v.numel()) for cut, v in zip(cuts, values, strict=True)
    ]
    shards = [v.flatten()[first:last] for v, (first, last) in zip(values, ranges, strict=True)]
    quantize_master_weights(weights, shards, [first for first, _ in ranges])
    for weight, quantizer, value, (first, last) in zip(
        weights, quantizers, values, ranges, strict=True
    ):
        expected = quantizer(value.bfloat16())
        mine, theirs = (w._rowwise_data.flatten()[first:last] for w in (weight, expected))
        assert_same(mine, theirs)
        assert_same(weight._rowwise_scale_inv, expected._rowwise_scale_inv)
        # The elements of the other rank come by the caller's own gather.
        whole = copy.deepcopy(expected._rowwise_data)
        weight._rowwise_data.copy_(whole)
        weight.mark_written()
        assert_same(weight.for_usage(True), expected.for_usage(True))
