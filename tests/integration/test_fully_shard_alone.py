"""``fully_shard`` in a process that has imported ``ottava`` alone: its hooks are there without an
import."""

from __future__ import annotations

import pytest

from tests.core import forking

# Tests of new processes share the one that they are forked from.
pytestmark = pytest.mark.xdist_group("forking")

CODE = """
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ottava

assert "ottava.distributed" not in sys.modules
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def losses(recipe, primary, sharded):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    model = ottava.convert(plain, recipe, primary=primary)
    if sharded:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


for recipe, primary in (("current", True), ("delayed", False)):
    alone, sharded = (list(losses(recipe, primary, each)) for each in (False, True))
    assert alone == sharded, recipe
dist.destroy_process_group()
"""


def test_it_trains_as_one_process() -> None:
    done = forking.python(CODE)
    assert done.returncode == 0, done.stderr
