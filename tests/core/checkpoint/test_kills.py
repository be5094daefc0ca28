"""Saves of processes that are killed at a call that changes the disk: what is left is whole, and
the next writer removes the rest.

After its death none of a process's calls changes the disk, nor do those that would clean up.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava.checkpoint import (
    latest_checkpoint,
    load_file,
    load_sharded,
    save_file,
    save_sharded,
    save_step,
)

CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "fchmod")


class Killed(BaseException):
    """What stands for the death of the process."""


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
    """Run ``save`` in a process that is killed before the call ``number`` of those that change the
    disk; whether it came there."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > number:
                raise Killed
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            save()
        except Killed:
            return True
    return False


def file(folder: Path, value: int) -> None:
    save_file({name: state(value)[name] for name in "xy"}, folder / "saved")


def replaced(folder: Path, value: int) -> None:
    save_sharded(state(value), folder / "saved", overwrite=True)


def pruned(folder: Path, value: int) -> None:
    save_step(state(value), folder, value, keep=1)


@pytest.mark.parametrize("save", [file, replaced, pruned])
def test_a_save_that_is_killed(save: Callable[[Path, int], None], tmp_path: Path) -> None:
    """A first save, a second one that is killed, and a third one, for every place."""
    folder, values, number, killed = tmp_path / "folder", set(), 0, True
    while killed:
        folder.mkdir()
        save(folder, 1)
        killed = killed_at(number, lambda: save(folder, 2))
        path = folder / "saved"
        if save is pruned:
            path = latest_checkpoint(folder) or path
            assert path.name == f"step-{value_of(path):07d}"
        values.add(value_of(path))
        assert killed or value_of(path) == 2
        save(folder, 3)
        names = [entry.name for entry in folder.iterdir()]
        assert names == ["step-0000003" if save is pruned else "saved"], number
        shutil.rmtree(folder)
        number += 1
    assert values == {1, 2}
    assert number > 5
