"""Saves in forked processes that are killed at every call that matters; what is left is whole.

Usage: interrupted_worker.py FOLDER. It ends with an error where it is not.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint

from ottava.checkpoint import (
    files,
    is_complete,
    latest_checkpoint,
    load_sharded,
    save_sharded,
    save_step,
)


def state(value: int) -> dict[str, Any]:
    return {
        "x": torch.full((40,), float(value)),
        "deep": {"y": torch.full((40, 3), value)},
        "value": value,
    }


def value_of(path: Path) -> int:
    """The one value that everything in a checkpoint has."""
    loaded = load_sharded(state(-1), path)
    value: int = loaded["value"]
    assert (loaded["x"] == value).all(), path
    assert (loaded["deep"]["y"] == value).all(), path
    return value


def killed_at(number: int) -> None:
    """Have this process killed before the call ``number`` of those that change the disk."""
    calls = [0]

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            calls[0] += 1
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    # Between the writes of blocks.
    files.zlib = SimpleNamespace(crc32=counted(zlib.crc32))  # type: ignore[attr-defined]


def in_child(number: int, save: Callable[[], object]) -> bool:
    """Run ``save`` in a forked process; whether it was killed."""
    child = os.fork()
    if not child:
        try:
            killed_at(number)
            save()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def at_every_call(
    folder: Path, prepare: Callable[[], None], save: Callable[[], object], after: Any
) -> None:
    for number in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        prepare()
        killed = in_child(number, save)
        after(killed)
        if not killed:
            assert number > 6, number
            return
    raise AssertionError("it never ends")


def new_step(folder: Path) -> None:
    def after(killed: bool) -> None:
        latest = latest_checkpoint(folder)
        assert latest is not None
        value = value_of(latest)
        assert latest.name == f"step-{value:07d}"
        assert value == 2 or killed
        # What was left disturbs nothing, and goes.
        save_step(state(3), folder, 2, overwrite=is_complete(folder / "step-0000002"))
        assert value_of(folder / "step-0000002") == 3
        assert sorted(entry.name for entry in folder.iterdir()) == ["step-0000001", "step-0000002"]

    at_every_call(
        folder,
        lambda: void(save_step(state(1), folder, 1)),
        lambda: save_step(state(2), folder, 2),
        after,
    )


def void(_: object) -> None: ...


def replaced(folder: Path) -> None:
    path, seen = folder / "saved", set()

    def after(killed: bool) -> None:
        # One or the other is found.
        assert is_complete(path)
        value = value_of(path)
        seen.add(value)
        assert value == 2 or killed
        save_sharded(state(3), path, overwrite=True)
        assert value_of(path) == 3
        assert [entry.name for entry in folder.iterdir()] == ["saved"]

    at_every_call(
        folder,
        lambda: save_sharded(state(1), path),
        lambda: save_sharded(state(2), path, overwrite=True),
        after,
    )
    assert seen == {1, 2}


def pruned(folder: Path) -> None:
    def prepare() -> None:
        for step in (1, 2):
            save_step(state(step), folder, step)

    def after(killed: bool) -> None:
        latest = latest_checkpoint(folder)
        assert latest is not None
        value = value_of(latest)
        assert latest.name == f"step-{value:07d}"
        assert value == 3 or (killed and value == 2)
        save_step(state(4), folder, 4, keep=1)
        assert [entry.name for entry in folder.iterdir()] == ["step-0000004"]

    at_every_call(folder, prepare, lambda: save_step(state(3), folder, 3, keep=1), after)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    new_step(folder / "new")
    replaced(folder / "replaced")
    pruned(folder / "pruned")


if __name__ == "__main__":
    main()
