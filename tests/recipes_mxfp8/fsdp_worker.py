"""One rank of test_fsdp.py: trains with MXFP8 weights under FSDP2 and compares with one process, bit for bit.

Usage: fsdp_worker.py RANK STORE CASE. The ranks run on gloo and the CPU.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.errors import ShapeError, UsageError
from ottava.tensors import QuantizedTensor
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Tensor

WORLD = 2
INNER = [inner.attribute for inner in MXFP8Tensor.inner_tensors]


def model(rows: int, columns: int, recipe: MXFP8BlockScaling) -> torch.nn.Sequential:
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe):
        return torch.nn.Sequential(
            ottava.nn.Linear(columns, rows, dtype=torch.bfloat16, recipe=recipe),
            torch.nn.GELU(),
            ottava.nn.Linear(rows, 64, dtype=torch.bfloat16, recipe=recipe),
        )


def shard(net: torch.nn.Sequential, mesh: Any, reshard: bool) -> None:
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh, reshard_after_forward=reshard)


def losses(net: torch.nn.Module, columns: int, count: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    torch.manual_seed(5)
    seen = []
    for _ in range(count):
        x, y = torch.randn(32, columns).bfloat16(), torch.randn(32, 64).bfloat16()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


class GatheredBytes:
    """What the weights of this rank hand to the all-gathers of FSDP: bytes by the number of elements of the whole."""

    def __init__(self) -> None:
        self.handed: list[tuple[int, int]] = []

    def __enter__(self) -> GatheredBytes:
        self.original = QuantizedTensor.fsdp_pre_all_gather

        def counted(tensor: QuantizedTensor, mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> Any:
            inputs, plan = self.original(tensor, mesh, size, stride, module, policy)
            assert all(data.dtype == torch.uint8 for data in inputs)
            self.handed.append((size.numel(), sum(data.numel() for data in inputs)))
            return inputs, plan

        QuantizedTensor.fsdp_pre_all_gather = counted
        return self

    def __exit__(self, *error: object) -> None:
        QuantizedTensor.fsdp_pre_all_gather = self.original


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
            for reshard in (True, False):
                case = f"{kind} rows={rows} columns={columns} reshard={reshard}"
                alone, sharded = model(rows, columns, recipe), model(rows, columns, recipe)
                expected = losses(alone, columns)
                shard(sharded, mesh, reshard)
                with GatheredBytes() as gathered:
                    seen = losses(sharded, columns)
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
                # What is kept between the passes comes at once, in both directions unless one serves both.
                directions = 1 if reshard or kind == "2d" else 2
                assert len(gathered.handed) == 3 * 2 * (2 if reshard else 1), (case, gathered.handed)
                if columns == 64:
                    scales = [whole // 32 for whole, _ in gathered.handed]
                    sent = [handed * WORLD for _, handed in gathered.handed]
                    expected_bytes = [directions * (w + s) for (w, _), s in zip(gathered.handed, scales, strict=True)]
                    assert sent == expected_bytes, (case, sent, expected_bytes)


def alone(mesh: Any) -> None:
    """A mesh of one rank each, where FSDP gathers nothing."""
    own = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ranks", "own"))["own"]
    for recipe in (MXFP8BlockScaling(), MXFP8BlockScaling(with_2d_quantization=True)):
        for reshard in (True, False):
            for rows, columns in ((64, 64), (33, 40)):
                plain, sharded = model(rows, columns, recipe), model(rows, columns, recipe)
                expected = losses(plain, columns)
                shard(sharded, own, reshard)
                assert losses(sharded, columns) == expected, (recipe, reshard, rows)
                sharded[0].unshard()
                same_weight(plain[0].weight, sharded[0].weight, f"{recipe} {reshard} {rows}")


def master(mesh: Any) -> None:
    """High-precision parameters, quantized after the gather: any number of rows."""
    for rows in (64, 33):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, rows), torch.nn.GELU(), torch.nn.Linear(rows, 64)).bfloat16()
        alone, sharded = ottava.convert(net, "mxfp8"), None
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, rows), torch.nn.GELU(), torch.nn.Linear(rows, 64)).bfloat16()
        sharded = ottava.convert(net, "mxfp8")
        shard(sharded, mesh, True)
        assert losses(sharded, 40) == losses(alone, 40), rows


def refused(mesh: Any) -> None:
    """Shards that would cut blocks are named, with what to do."""
    for rows, message in ((96, "48 on each, which cut the blocks"), (65, "rows of another size")):
        net = model(rows, 64, MXFP8BlockScaling())
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
        alone, sharded = ((Recomputed(model(64, 64, recipe))) for _ in range(2))
        fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        loss = sharded(x).square().sum()
        if not works:
            with pytest.raises(UsageError, match="reshard_after_forward=False or with_2d_quantization=True"):
                loss.backward()
            continue
        loss.backward()
        grad, x.grad = x.grad, None
        alone(x).square().sum().backward()
        assert torch.equal(grad, x.grad)


def main() -> None:
    rank, store, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=dist.FileStore(store, WORLD))
    cases = {"train": train, "alone": alone, "master": master, "refused": refused, "recomputed": recomputed}
    cases[case](init_device_mesh("cpu", (WORLD,)))
    dist.barrier()


if __name__ == "__main__":
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # Without the interpreter's finalization, which gloo's threads can abort (a group that is still referenced).
    os._exit(code)
