"""Hidden folders of writers, gone in the end; files that are replaced while they are read."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ottava.errors import CheckpointError
from ottava.filesystem import (
    Partial,
    open_text,
    read_bytes,
    remove_leftovers,
    replace_file,
    unreplaced,
)


def test_a_folder_that_is_taken_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is locked, at its opening and at its locking, another writer may remove it."""
    real_mkdir, real_flock, folders = os.mkdir, fcntl.flock, []

    def mkdir(path: Any, *mode: int) -> None:
        real_mkdir(path, *mode)
        folders.append(path)
        if len(folders) == 1:
            os.rmdir(path)

    def flock(descriptor: int, how: int) -> None:
        if len(folders) == 2:
            os.rmdir(folders[1])
        real_flock(descriptor, how)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(fcntl, "flock", flock)
    descriptors = len(os.listdir("/dev/fd"))
    with Partial(tmp_path / "x") as partial:
        assert len(folders) == 3
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


def test_leftovers_go_before_something_is_written(tmp_path: Path) -> None:
    """So that a disk that they filled has room; names are no patterns. A pipe is not waited for."""
    for name in ("[x]", "x"):
        with Partial(tmp_path / name) as partial:
            shutil.copytree(partial.path, tmp_path / f"{partial.path.name[:-8]}-left.partial")
    with Partial(tmp_path / "[x]") as partial:
        os.mkfifo(tmp_path / f"{partial.path.name[:-8]}-pipe.partial")
    with Partial(tmp_path / "[x]"):
        assert sum(entry.name.startswith(".[x]") for entry in tmp_path.iterdir()) == 2
    assert sorted(entry.name[:3] for entry in tmp_path.iterdir()) == [".[x", ".x-"]


def test_a_file_that_is_closed_to_others_meanwhile_stays_closed(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with Partial(tmp_path / "x") as partial:
        (partial.path / "file").write_text("new")
        (tmp_path / "x").chmod(0o600)
        partial.put_file("file")
    assert (tmp_path / "x").read_text() == "new"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_written_in_place_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text, time in (("new", 1), ("longer", 0)):
        path.write_text("old")
        os.utime(path, ns=(0, 0))
        with pytest.raises(CheckpointError, match="was replaced"), unreplaced(path):
            path.write_text(text)
            os.utime(path, ns=(time, time))


def test_ctrl_c_while_a_replaced_file_is_read_stays_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), unreplaced(path):
        (tmp_path / "new").write_text("another")
        (tmp_path / "new").replace(path)
        raise KeyboardInterrupt


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    with open_text(tmp_path / "text") as file:
        file.write("a\n")
        assert read_bytes(tmp_path / "text") == b"a\n"
        file.write("bc")
    assert read_bytes(tmp_path / "text", 3) == b"a\nb"
    with open_text(tmp_path / "text"):
        assert read_bytes(tmp_path / "text") == b""
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path, "folder"), (tmp_path / "pipe", "no regular file")):
        for use in (read_bytes, open_text):
            with pytest.raises(OSError, match=f"it is .*{words}"):
                use(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent")


def test_a_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    replace_file(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
