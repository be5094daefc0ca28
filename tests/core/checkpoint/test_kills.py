"""Saves in forked processes that are killed at a call that changes the disk: what is left is
whole, and the next writer removes the rest."""

from __future__ import annotations

import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ottava.checkpoint import (
    files,
    latest_checkpoint,
    load_file,
    load_sharded,
    save_file,
    save_sharded,
    save_step,
)
from tests.core import forking


def state(value: int) -> dict[str, Any]:
    return {"x": torch.full((4,), float(value)), "y": torch.full((4, 3), value), "value": value}


def value_of(path: Path) -> int:
    """The one value that everything in a file or a checkpoint has."""
    loaded: Any = load_sharded(state(-1), path) if path.is_dir() else load_file(path)
    value = int(loaded["x"][0])
    assert (loaded["x"] == value).all(), path
    assert (loaded["y"] == value).all(), path
    return value


def killed_at(number: int, save: Callable[[], object]) -> bool:
    """Run ``save`` in a fork that kills itself before the call ``number`` of those that change the
    disk; whether it came there."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        return status != 0
    calls = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return function(*args, **kwargs)

        return call

    try:
        for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        # Between the blocks of a file.
        files.zlib = SimpleNamespace(crc32=counted(zlib.crc32))  # type: ignore[attr-defined]
        save()
        os._exit(0)
    finally:
        os._exit(1)


def file(folder: Path, value: int) -> None:
    save_file({name: state(value)[name] for name in "xy"}, folder / "saved")


def replaced(folder: Path, value: int) -> None:
    save_sharded(state(value), folder / "saved", overwrite=True)


def pruned(folder: Path, value: int) -> None:
    save_step(state(value), folder, value, keep=1)


def at_calls(save: Callable[[Path, int], None], folder: Path, step: int) -> None:
    """A first save, a second one that is killed, and a third one, for every ``step``-th place."""
    values = set()
    for number in range(0, 1000, step):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save(folder, 1)
        killed = killed_at(number, lambda: save(folder, 2))
        path = folder / "saved"
        if not path.exists():
            path = latest_checkpoint(folder) or path
            assert path.name == f"step-{value_of(path):07d}"
        value = value_of(path)
        values.add(value)
        assert value == 2 or killed
        save(folder, 3)
        names = sorted(entry.name for entry in folder.iterdir())
        assert names == ["step-0000003" if save is pruned else "saved"], number
        if not killed:
            assert values == {1, 2}
            assert number > 5
            return


@pytest.mark.xdist_group("forked processes")
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_save_that_is_killed(step: int, tmp_path: Path) -> None:
    program = "import sys; from tests.core.checkpoint import test_kills as t; t.main(*sys.argv[1:])"
    done = forking.python(program, tmp_path, str(step), path=Path(__file__).parents[3])
    assert done.returncode == 0, done.stdout + done.stderr


def main(folder: str, step: str) -> None:
    import torch.distributed.checkpoint

    torch.set_num_threads(1)
    for save in (file, replaced, pruned):
        at_calls(save, Path(folder) / save.__name__, int(step))
