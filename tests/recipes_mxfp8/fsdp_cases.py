"""MXFP8 weights under FSDP2: compared with one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.errors import ShapeError, UsageError
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Tensor
from tests.fsdp import GatheredBytes, losses, model, shard

WORLD = 2
INNER = [inner.attribute for inner in MXFP8Tensor.inner_tensors]


def same_weight(alone: MXFP8Tensor, gathered: MXFP8Tensor, case: str) -> None:
    assert type(gathered) is MXFP8Tensor, case
    assert gathered.dtype == torch.bfloat16, case
    held = 0
    for name in INNER:
        mine, theirs = getattr(gathered, name), getattr(alone, name)
        if mine is not None:
            held += 1
            assert torch.equal(mine, theirs), (case, name)
    assert held in (2, 4), (case, held)


def train(mesh: Any) -> None:
    recipes = {"1d": MXFP8BlockScaling(), "2d": MXFP8BlockScaling(with_2d_quantization=True)}
    # 40 columns: blocks at the right edge are smaller, and rows have fewer scales than columns.
    for kind, recipe in recipes.items():
        for rows, columns in ((64, 64), (128, 40)):
            alone = model(columns, rows, 64, recipe)
            expected = losses(alone, columns, 64)
            for reshard in (True, False):
                case = f"{kind} rows={rows} columns={columns} reshard={reshard}"
                sharded = model(columns, rows, 64, recipe)
                shard(sharded, mesh, reshard)
                with GatheredBytes() as gathered:
                    seen = losses(sharded, columns, 64)
                assert seen == expected, (case, seen, expected)
                for a, b in ((alone[0], sharded[0]), (alone[2], sharded[2])):
                    b.unshard()
                    same_weight(a.weight, b.weight, case)
                    b.reshard()
                for layer in (sharded[0], sharded[2]):
                    for parameter in layer._get_fsdp_state()._fsdp_param_group.fsdp_params:
                        if isinstance(parameter._sharded_local_tensor, MXFP8Tensor):
                            # No copy in high precision stays behind.
                            assert isinstance(parameter._sharded_param_data, MXFP8Tensor), case
                # What is kept between the passes comes at once, in both directions unless one
                # serves both.
                directions = 1 if reshard or kind == "2d" else 2
                assert len(gathered.handed) == 3 * 2 * (2 if reshard else 1), (
                    case,
                    gathered.handed,
                )
                if columns == 64:
                    scales = [whole // 32 for whole, _ in gathered.handed]
                    sent = [handed * WORLD for _, handed in gathered.handed]
                    expected_bytes = [
                        directions * (w + s)
                        for (w, _), s in zip(gathered.handed, scales, strict=True)
                    ]
                    assert sent == expected_bytes, (case, sent, expected_bytes)


def alone(mesh: Any) -> None:
    """A mesh of one rank each, where FSDP gathers nothing."""
    own = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ranks", "own"))["own"]
    for recipe in (MXFP8BlockScaling(), MXFP8BlockScaling(with_2d_quantization=True)):
        for rows, columns in ((64, 64), (33, 40)):
            plain = model(columns, rows, 64, recipe)
            expected = losses(plain, columns, 64)
            for reshard in (True, False):
                sharded = model(columns, rows, 64, recipe)
                shard(sharded, own, reshard)
                assert losses(sharded, columns, 64) == expected, (recipe, reshard, rows)
                sharded[0].unshard()
                same_weight(plain[0].weight, sharded[0].weight, f"{recipe} {reshard} {rows}")


def master(mesh: Any) -> None:
    """High-precision parameters, quantized after the gather: any number of rows."""
    for rows in (64, 33):
        nets = []
        for _ in range(2):
            torch.manual_seed(0)
            net = torch.nn.Sequential(
                torch.nn.Linear(40, rows), torch.nn.GELU(), torch.nn.Linear(rows, 64)
            ).bfloat16()
            nets.append(ottava.convert(net, "mxfp8"))
        shard(nets[1], mesh, True)
        assert losses(nets[1], 40, 64) == losses(nets[0], 40, 64), rows


def refused(mesh: Any) -> None:
    """Shards that would cut blocks are named, with what to do."""
    for rows, message in (
        (96, "rows 0 to 48 of 96, which cut the blocks"),
        (65, "rows of another size"),
    ):
        net = model(64, rows, 64, MXFP8BlockScaling())
        shard(net, mesh, True)
        with pytest.raises(ShapeError, match=message):
            net(torch.ones(1, 64, dtype=torch.bfloat16))


class Recomputed(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def recomputed(mesh: Any) -> None:
    """Activation checkpointing inside what is sharded needs the rows again in the backward pass."""
    ways = [
        (MXFP8BlockScaling(), False, True),
        (MXFP8BlockScaling(with_2d_quantization=True), True, True),
        (MXFP8BlockScaling(), True, False),
    ]
    for recipe, reshard, works in ways:
        alone, sharded = (Recomputed(model(64, 64, 64, recipe)) for _ in range(2))
        fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)
        x = (
            torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
            .bfloat16()
            .requires_grad_()
        )
        loss = sharded(x).square().sum()
        if not works:
            with pytest.raises(
                UsageError, match="reshard_after_forward=False or with_2d_quantization=True"
            ):
                loss.backward()
            continue
        loss.backward()
        grad, x.grad = x.grad, None
        alone(x).square().sum().backward()
        assert torch.equal(grad, x.grad)
