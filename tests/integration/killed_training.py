"""What the ranks of kill_cases.py run: training that is killed, and the points where a rank kills
itself.

The library knows nothing of this: the points are put around the functions that it calls.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.checkpoint import files
from ottava.distributed import gather_quantized
from ottava.tensors import QuantizedTensorStorage

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from common import Checkpoints
from fsdp2 import ShardedAdamW
from zero import ZeroOptimizer

#: Of each way to train: a recipe and its options. Rows are whole blocks on four ranks.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero-delayed": ("delayed", {"amax_history_len": 4}),
    "zero-mxfp8": ("mxfp8", {}),
    "primary-delayed": ("delayed", {"amax_history_len": 4}),
    "primary-mxfp8": ("mxfp8", {}),
    "gathered-delayed": ("delayed", {"amax_history_len": 4}),
}
SIZES = (64, 128, 128)
SAVE_EVERY = 2


# -- points where a rank kills itself --


def arm(point: str) -> None:
    """Have this process kill itself at a point: what is called, ``before``, ``half`` or ``after``,
    and the how manieth.

    ``rename after 2`` is when the second rename has been done.
    """
    wanted, moment, number = point.split()
    seen: Counter[str] = Counter()

    def reached(name: str, at: str) -> None:
        if (name, at) == (wanted, moment):
            seen[name] += 1
            if seen[name] == int(number):
                os.kill(os.getpid(), signal.SIGKILL)

    def around(module: Any, name: str) -> None:
        original = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            reached(name, "before")
            result = original(*args, **kwargs)
            reached(name, "after")
            return result

        setattr(module, name, called)

    for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
        around(os, name)
    for name in (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ):
        around(dist, name)

    original = files.serialize_file

    def torn(tensors: Any, path: Any, metadata: Any) -> None:
        """A file of which half has come to the disk."""
        reached("write", "before")
        original(tensors, path, metadata)
        if (wanted, moment) == ("write", "half"):
            os.truncate(path, os.path.getsize(path) // 2)
        reached("write", "half")
        reached("write", "after")

    files.serialize_file = torn


# -- training --


class Training:
    """A small model with its optimizer, and its checkpoints in a folder."""

    def __init__(self, kind: str, mesh: DeviceMesh, folder: Path, steps: int) -> None:
        way = kind.split("-")[0]
        name, options = KINDS[kind]
        recipe = ottava.get_recipe(name, **options)
        torch.manual_seed(5)
        with ottava.quantized_model_init(recipe, enabled=way != "gathered"):
            self.net = torch.nn.Sequential(
                ottava.nn.Linear(SIZES[0], SIZES[1], dtype=torch.bfloat16),
                torch.nn.GELU(),
                ottava.nn.Linear(SIZES[1], SIZES[2], dtype=torch.bfloat16),
            )
        ottava.convert(self.net, recipe)
        self.optimizer: Any
        if way == "zero":
            self.optimizer = ZeroOptimizer(self.net, mesh, stage=2, lr=0.01)
        else:
            if way == "gathered":
                gather_quantized(self.net)
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=mesh)
            self.optimizer = ShardedAdamW(self.net, seed=5, lr=0.01, max_norm=1.0)
        self.rank = mesh.get_local_rank()
        options_ = argparse.Namespace(checkpoint=folder, save_every=SAVE_EVERY, steps=steps)
        self.checkpoints = Checkpoints(self.net, self.optimizer, options_)

    def step(self, step: int) -> float:
        """Every rank has data of its own."""
        data = torch.Generator().manual_seed(100 * step + self.rank)
        x = torch.randn(32, SIZES[0], generator=data).bfloat16() * (1 + self.rank + step % 3)
        loss = torch.nn.functional.mse_loss(
            self.net(x), torch.randn(32, SIZES[2], generator=data).bfloat16()
        )
        loss.backward()
        if isinstance(self.optimizer, ZeroOptimizer):
            self.optimizer.reduce_gradients()
        self.optimizer.step()
        return loss.item()

    def state(self, step: int) -> dict[str, Any]:
        """Model, optimizer and recipe state that this rank has: bytes by name, and the values that
        are no tensors."""
        held: dict[str, Any] = {}
        _add(self.checkpoints._state(step), "", held)
        return held


def _add(value: Any, name: str, held: dict[str, Any]) -> None:
    if isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            _add(entry, f"{name}.{key}" if name else str(key), held)
        return
    if not isinstance(value, torch.Tensor):
        held[name] = value
        return
    local = getattr(value, "_local_tensor", value)
    sharded = local is not value
    local = local.high_precision() if hasattr(local, "high_precision") else local
    if not isinstance(local, QuantizedTensorStorage):
        held[name] = (sharded, _bytes(local))
        return
    for inner in local.inner_tensors:
        data = getattr(local, inner.attribute)
        if data is not None:
            held[f"{name}:{inner.argument}"] = (sharded and inner.gather, _bytes(data))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def log(folder: Path, name: str, text: str) -> None:
    """One write, which the system keeps when the process is killed."""
    descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def train(kind: str, mesh: DeviceMesh, folder: Path, steps: int, point: str | None) -> None:
    """Train to the end, from the latest checkpoint on, and keep the state."""
    training = Training(kind, mesh, folder / "checkpoints", steps)
    first = training.checkpoints.resume()
    rank = training.rank
    if point is not None:
        arm(point)
    for step in range(first, steps):
        loss = training.step(step)
        log(folder, f"losses-{rank}", f"{step} {loss.hex()}")
        training.checkpoints.save(step + 1)
        if (step + 1) % SAVE_EVERY == 0:
            log(folder, f"saved-{rank}", str(step + 1))
    torch.save(training.state(steps), folder / f"state-{rank}")


def reshard(kind: str, mesh: DeviceMesh, folder: Path, steps: int) -> None:
    """Keep the state as it is after loading, or as it was saved where there is nothing to load;
    then go on."""
    world = mesh.size()
    training = Training(kind, mesh, folder / "checkpoints", steps)
    first = training.checkpoints.resume()
    if first:
        torch.save(training.state(first), folder / f"loaded-{world}-{training.rank}")
    losses = [training.step(step) for step in range(first, steps)]
    assert all(loss == loss for loss in losses), losses
    if not first:
        training.checkpoints.save(steps)
        torch.save(training.state(steps), folder / f"state-{training.rank}")
