"""``fully_shard`` in fresh processes that have imported ``ottava`` alone: its hooks are there
without an import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ottava

rank, world, store, kind, recipe = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
torch.manual_seed(0)
torch.set_num_threads(1)
if kind == "primary":
    with ottava.quantized_model_init(recipe):
        layers = [ottava.nn.Linear(64, 64, recipe=recipe), ottava.nn.Linear(64, 64, recipe=recipe)]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
else:
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    model = ottava.convert(plain, recipe)
if world > 1:
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
    fully_shard(model[0])
    fully_shard(model)
optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
for step in range(3):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(7)) * (1 + step % 2)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses), flush=True)
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""


def losses(folder: Path, world: int, kind: str, recipe: str) -> list[list[float]]:
    """Of every rank."""
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder / f"store-{world}"), kind, recipe],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(
        errors for _, errors in said
    )
    return [json.loads(printed) for printed, _ in said]


@pytest.mark.parametrize(("kind", "recipe"), [("primary", "current"), ("converted", "delayed")])
def test_ranks_that_import_ottava_alone_have_the_losses_of_one_process(
    tmp_path: Path, kind: str, recipe: str
) -> None:
    (alone,) = losses(tmp_path, 1, kind, recipe)
    assert alone[2] < alone[0]
    assert losses(tmp_path, 2, kind, recipe) == [alone, alone]
