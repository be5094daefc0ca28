"""Compares saving and loading a model with the safetensors library alone.

``python -m benchmarks.checkpoints`` prints the times. Both sides write to the disk (fsync), and
loads read every page of the memory that they map. The alternatives run in turns, and the best of a
few rounds counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from ottava import checkpoint

#: What is done, by what, and the function that does it.
Job = tuple[str, str, Callable[[], object]]


def model(megabytes: int) -> torch.nn.Module:
    """A model of layers in bfloat16 with 16 MB each."""
    layers = [
        torch.nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16)
        for _ in range(max(1, megabytes // 16))
    ]
    return torch.nn.Sequential(*layers)


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def touch(state: object) -> None:
    """Read every page of a state dict."""
    for tensor in state.values():  # type: ignore[attr-defined]
        tensor.view(torch.uint8).reshape(-1)[::4096].sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    options = parser.parse_args()
    net, other = model(options.megabytes), model(options.megabytes)
    size = sum(p.nbytes for p in net.parameters())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        jobs = _jobs(net, other, Path(name))
        best = [float("inf")] * len(jobs)
        for _ in range(options.rounds):
            for number, (_, _, job) in enumerate(jobs):
                start = time.perf_counter()
                job()
                best[number] = min(best[number], time.perf_counter() - start)
    print(f"{size / 1e6:.0f} MB, best of {options.rounds}")
    first: dict[str, float] = {}
    for (kind, title, _), seconds in zip(jobs, best, strict=True):
        ratio = seconds / first.setdefault(kind, seconds)
        print(
            f"{kind:13} {title:40} {seconds:8.3f} s  {size / seconds / 1e9:7.2f} GB/s  "
            f"{ratio:6.2f} x"
        )


def _jobs(net: torch.nn.Module, other: torch.nn.Module, folder: Path) -> list[Job]:
    """What is timed; the first job of each kind is what the others are compared with."""
    ours, theirs, sharded = folder / "ours", folder / "theirs", folder / "sharded"

    def save_by_the_library() -> None:
        safetensors.torch.save_file(net.state_dict(), theirs)
        synced(theirs)

    def load_by_the_library() -> None:
        other.load_state_dict(safetensors.torch.load_file(theirs))

    def save() -> None:
        checkpoint.save_file(net.state_dict(), ours)

    def save_sharded() -> None:
        checkpoint.save_sharded(net.state_dict(), sharded, overwrite=True)

    def load(verify: bool) -> None:
        touch(checkpoint.load_file(ours, verify=verify))

    def load_model(verify: bool) -> None:
        checkpoint.load_model(other, ours, verify=verify)

    def load_sharded(verify: bool) -> None:
        checkpoint.load_sharded(other.state_dict(), sharded, verify=verify)

    return [
        ("save", "safetensors save_file, fsync", save_by_the_library),
        ("save", "ottava save_file", save),
        ("save", "ottava save_sharded", save_sharded),
        ("load", "safetensors load_file", lambda: touch(safetensors.torch.load_file(theirs))),
        ("load", "ottava load_file, verify=False", lambda: load(verify=False)),
        ("load", "ottava load_file", lambda: load(verify=True)),
        ("into a model", "safetensors load_file, load_state_dict", load_by_the_library),
        ("into a model", "ottava load_model, verify=False", lambda: load_model(verify=False)),
        ("into a model", "ottava load_model", lambda: load_model(verify=True)),
        ("into a model", "ottava load_sharded, verify=False", lambda: load_sharded(verify=False)),
        ("into a model", "ottava load_sharded", lambda: load_sharded(verify=True)),
    ]


if __name__ == "__main__":
    main()
