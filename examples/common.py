"""What the examples share: the demo's model and text, checkpoints, the process group and the
command line."""

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
    """The demo's model, its layers in ``dtype``; inside ``quantized_model_init`` their weights are
    quantized."""
    size = Size(options.layers, options.width, options.width // HEAD, options.length, options.batch)
    return GPT(size, partial(ottava.nn.Linear, dtype=dtype)).to(dtype)


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Name, parameter and initial values in float32 of each; the values are whole, and the same on
    all ranks."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        values = torch.zeros(parameter.shape)
        if parameter.dim() == 2:
            values.normal_(std=0.02, generator=torch.Generator().manual_seed(1000 * seed + number))
        elif name.endswith("weight"):
            values.fill_(1.0)
        yield name, parameter, values


class Text:
    """Batches of the demo's text, the source code of Python's standard library.

    Args:
        options: sequences in a step, over all ranks and microbatches; bytes in a sequence; and the
            seed of the random places that are drawn. Those of a step do not depend on the steps
            before.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.data = options, load_corpus(1_000_000).train

    def batches(self, step: int, mesh: DeviceMesh) -> Iterator[tuple[torch.Tensor, ...]]:
        """This rank's share of the batch of a step, one microbatch after the other: bytes, and the
        next bytes."""
        options, generator = (
            self.options,
            torch.Generator().manual_seed(1_000_000 * self.options.seed + step),
        )
        whole = batch(self.data, options.batch, options.length, generator)
        mine = [t.chunk(mesh.size())[mesh.get_local_rank()].to(mesh.device_type) for t in whole]
        return zip(*(t.chunk(options.accumulate) for t in mine), strict=True)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that the examples share."""
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
    """The ranks that torchrun started, or this process alone; with CUDA (which is not tested) over
    NCCL."""
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
    """End the process without the interpreter's finalization, which threads of gloo that still run
    can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Checkpoints:
    """The sharded checkpoints of a run: model and optimizer, each rank its part, and the number of
    steps.

    Args:
        model, optimizer: have ``state_dict`` and ``load_state_dict``.
        options: the folder, and how often.
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
        """Load the latest checkpoint that is whole, if there is one; the number of steps that are
        done."""
        found = (
            None if self.options.checkpoint is None else latest_checkpoint(self.options.checkpoint)
        )
        if found is None:
            return 0
        # Into the tensors of the state, in place; from any number of ranks.
        loaded = load_sharded(self._state(0), found)
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        say(f"continues from {found.name}")
        return int(loaded["step"])

    def save(self, step: int) -> None:
        """Save after ``step`` steps if it is time to: the checkpoint appears whole or not at
        all."""
        folder, last = self.options.checkpoint, step == self.options.steps
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
    """A checksum of the values of tensors, whole or sharded in rows; the same for any number of
    ranks."""
    checksum = hashlib.sha256()
    for tensor in tensors.values():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        values = local.dequantize() if isinstance(local, QuantizedTensorStorage) else local.detach()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            parts, values.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
        checksum.update(b"".join(parts if local is not tensor else parts[:1]))
    return checksum.hexdigest()[:16]
