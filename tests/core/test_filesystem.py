"""Hidden folders of writers, found by nobody else and gone in the end; files that are replaced
while they are read."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ottava.errors import CheckpointError
from ottava.filesystem import Partial, remove_leftovers, unreplaced


def test_a_folder_that_is_taken_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is locked, at its opening and at its locking, another writer may remove it."""
    real_mkdir, real_flock, made = os.mkdir, fcntl.flock, []

    def mkdir(path: Any, *mode: int) -> None:
        real_mkdir(path, *mode)
        made.append(path)
        if len(made) == 1:
            os.rmdir(path)

    def flock(descriptor: int, how: int) -> None:
        if len(made) == 2:
            os.rmdir(made[1])
        real_flock(descriptor, how)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(fcntl, "flock", flock)
    descriptors = len(os.listdir("/dev/fd"))
    with Partial(tmp_path / "x") as partial:
        assert len(made) == 3
        assert [partial.path] == list(tmp_path.iterdir())
        remove_leftovers(tmp_path, ".x")
        assert partial.path.exists()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == descriptors


def test_without_locks_nothing_of_others_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with Partial(tmp_path / "x") as one, Partial(tmp_path / "x") as two:
        (two.path / "file").write_text("whole")
        two.put_file("file")
        assert one.path.exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "whole"


def test_what_was_left_goes_before_something_is_written(tmp_path: Path) -> None:
    """So that a disk that it filled has room; names are no patterns."""
    for name in ("[x]", "x"):
        with Partial(tmp_path / name) as partial:
            shutil.copytree(partial.path, tmp_path / f"{partial.path.name[:-8]}-left.partial")
    assert len(list(tmp_path.iterdir())) == 2
    with Partial(tmp_path / "[x]"):
        assert sum(entry.name.startswith(".[x]") for entry in tmp_path.iterdir()) == 1
    assert [entry.name[:3] for entry in tmp_path.iterdir()] == [".x-"]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (KeyboardInterrupt, KeyboardInterrupt),
        (ValueError, CheckpointError),
        (None, CheckpointError),
    ],
)
def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, raised: Any, seen: Any) -> None:
    """What was read of two files is said to be that; an interrupt stays an interrupt."""
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(seen), unreplaced(path):
        (tmp_path / "new").write_text("another")
        (tmp_path / "new").replace(path)
        if raised is not None:
            raise raised
