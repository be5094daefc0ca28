"""Code that the examples share.

It makes the demo's model and text, checkpoints, the process group and the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ottava
from ottava.checkpoint import latest_checkpoint, load_sharded, save_step
from ottava.tensors import QuantizedTensorStorage
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import GPT, Size

# The width of an attention head.
HEAD = 32


def make_gpt(options: argparse.Namespace, dtype: torch.dtype) -> GPT:
    """The demo's model, with layers in ``dtype``.

    Inside ``quantized_model_init`` the weights of the layers are quantized.
    """
    size = Size(options.layers, options.width, options.width // HEAD, options.length, options.batch)
    return GPT(size, partial(ottava.nn.Linear, dtype=dtype)).to(dtype)


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Name, parameter and initial values of each parameter.

    The values are float32, are not sharded, and are the same on all ranks.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        values = torch.zeros(parameter.shape)
        if parameter.dim() == 2:
            values.normal_(std=0.02, generator=torch.Generator().manual_seed(1000 * seed + number))
        elif name.endswith("weight"):
            values.fill_(1.0)
        yield name, parameter, values


def _seed(options: argparse.Namespace, step: int) -> int:
    return 1_000_000 * options.seed + step


def seed_step(options: argparse.Namespace, step: int) -> None:
    """Seed torch's generators for a step, on each rank with another number.

    Recipes that round at random draw from them. What a step draws does not depend on the steps
    before, so an interrupted run ends as another.
    """
    torch.manual_seed(_seed(options, step) + (dist.get_rank() << 32))


class Text:
    """Batches of the demo's text, the source code of Python's standard library.

    Args:
        options: ``batch``, the sequences in a step over all ranks and microbatches; ``length``, the
            bytes in a sequence; ``accumulate``, the microbatches in a step; and ``seed``. The batch
            of a step does not depend on the steps before.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data = load_corpus(1_000_000).train

    def batches(self, step: int, mesh: DeviceMesh) -> Iterator[tuple[torch.Tensor, ...]]:
        """The microbatches of this rank in a step, each as bytes and the next bytes."""
        options = self.options
        generator = torch.Generator().manual_seed(_seed(options, step))
        whole = batch(self.data, options.batch, options.length, generator)
        mine = [t.chunk(mesh.size())[mesh.get_local_rank()].to(mesh.device_type) for t in whole]
        return zip(*(t.chunk(options.accumulate) for t in mine), strict=True)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser of the options that the examples share."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--recipe", default="current", choices=[spec.name for spec in ottava.list_recipes()]
    )
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="options of the recipe"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--width", type=int, default=128, help="a multiple of 32, the width of an attention head"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=32, help="bytes in a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step, over all ranks")
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="microbatches in a step"
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="continue from the latest one there"
    )
    parser.add_argument(
        "--save-every", type=int, default=10, metavar="N", help="steps between checkpoints"
    )
    return parser


@contextlib.contextmanager
def ranks(options: argparse.Namespace) -> Iterator[DeviceMesh]:
    """A mesh of the ranks that torchrun started, or of this process alone.

    With CUDA the ranks use NCCL, which is not tested.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    own = not dist.is_initialized()
    if own and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    elif own:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", rank=0, world_size=1, store=dist.HashStore()
        )
    world = dist.get_world_size()
    if options.batch % (world * options.accumulate) or options.width % HEAD:
        raise SystemExit(
            f"--batch has to be a multiple of {world * options.accumulate}, and --width one of "
            f"{HEAD}"
        )
    try:
        yield init_device_mesh(device, (world,))
    finally:
        if own:
            dist.destroy_process_group()


def leave() -> None:
    """End the process without the interpreter's finalization, which gloo's threads can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Checkpoints:
    """The sharded checkpoints of a run, with model, optimizer and the number of steps.

    Args:
        model: the model; each rank saves its shards.
        optimizer: an object with ``state_dict`` and ``load_state_dict``.
        options: ``checkpoint``, the folder or None; ``save_every`` and ``steps``.
    """

    def __init__(self, model: nn.Module, optimizer: Any, options: argparse.Namespace) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": step,
        }

    def resume(self) -> int:
        """Load the latest whole checkpoint if there is one, and return its number of steps."""
        folder = self.options.checkpoint
        latest = None if folder is None else latest_checkpoint(folder)
        if latest is None:
            return 0
        # The tensors of the state are loaded in place. Any number of ranks may have saved them.
        loaded = load_sharded(self._state(0), latest)
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        say(f"continues from {latest.name}")
        return int(loaded["step"])

    def save(self, step: int) -> None:
        """Save after ``step`` steps if a checkpoint is due; it appears whole or not at all."""
        folder = self.options.checkpoint
        last = step == self.options.steps
        if folder is not None and (last or step % self.options.save_every == 0):
            save_step(self._state(step), folder, step, keep=2)


def mean(loss: torch.Tensor) -> float:
    """The mean of the ranks' losses."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def digest(tensors: Mapping[str, Any]) -> str:
    """A checksum of the values of tensors, which may be sharded by rows.

    It is the same for any number of ranks.
    """
    checksum = hashlib.sha256()
    for tensor in tensors.values():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        values = local.dequantize() if isinstance(local, QuantizedTensorStorage) else local.detach()
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            shards, values.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
        checksum.update(b"".join(shards if local is not tensor else shards[:1]))
    return checksum.hexdigest()[:16]
