"""One rank of test_fsdp.py: trains with FP8-primary weights under FSDP2 and compares with one process, bit for bit.

Usage: fsdp_worker.py RANK STORE CASE, a CASE of ``train``, ``unequal``. The ranks run on gloo and the CPU.
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

import ottava
from ottava.errors import UsageError
from ottava.tensors import Float8Tensor, QuantizedTensor, columnwise_layout

WORLD = 2


def model(rows: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    with ottava.quantized_model_init("current"):
        return torch.nn.Sequential(
            ottava.nn.Linear(16, rows, dtype=torch.bfloat16, recipe="current"),
            torch.nn.GELU(),
            ottava.nn.Linear(rows, 8, dtype=torch.bfloat16, recipe="current"),
        )


def shard(net: torch.nn.Sequential, mesh: Any, reshard: bool) -> None:
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh, reshard_after_forward=reshard)


def losses(net: torch.nn.Module, count: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    torch.manual_seed(5)
    seen = []
    for _ in range(count):
        x, y = torch.randn(32, 16).bfloat16(), torch.randn(32, 8).bfloat16()
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
            self.handed.append((size.numel(), sum(i.numel() * i.element_size() for i in inputs)))
            return inputs, plan

        QuantizedTensor.fsdp_pre_all_gather = counted
        return self

    def __exit__(self, *error: object) -> None:
        QuantizedTensor.fsdp_pre_all_gather = self.original


def train(mesh: Any) -> None:
    for rows in (32, 33, 1):
        for layout in ("shared", "transpose"):
            for reshard in (True, False):
                case = f"rows={rows} layout={layout} reshard={reshard}"
                with columnwise_layout(layout):
                    alone, sharded = model(rows), model(rows)
                    expected = losses(alone)
                    shard(sharded, mesh, reshard)
                    with GatheredBytes() as gathered:
                        seen = losses(sharded)
                    assert seen == expected, (case, seen, expected)
                    for a, b in ((alone[0], sharded[0]), (alone[2], sharded[2])):
                        b.unshard()
                        assert isinstance(b.weight, Float8Tensor), case
                        assert b.weight.dtype == torch.bfloat16, case
                        assert torch.equal(a.weight._data, b.weight._data), case
                        assert torch.equal(a.weight._scale_inv, b.weight._scale_inv), case
                        b.reshard()
                if rows == 32:
                    # One byte for an element, in the backward too where the weight was given up after the forward.
                    assert len(gathered.handed) == 3 * 2 * (2 if reshard else 1), (case, gathered.handed)
                    assert all(handed * WORLD == whole for whole, handed in gathered.handed), (case, gathered.handed)


def unequal(mesh: Any) -> None:
    net = model(32)
    shard(net, mesh, True)
    with torch.no_grad():
        net[0].weight.to_local()._scale_inv.mul_(1 + dist.get_rank())
    with pytest.raises(UsageError, match="different 'fp8_scale_inv'"):
        net(torch.ones(1, 16, dtype=torch.bfloat16))


def main() -> None:
    rank, store, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=dist.FileStore(store, WORLD))
    {"train": train, "unequal": unequal}[case](init_device_mesh("cpu", (WORLD,)))
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
