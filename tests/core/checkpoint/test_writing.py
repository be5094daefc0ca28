"""Writers beside each other and beside readers, full disks, permissions, and names that no file may
take."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava import checkpoint
from ottava.checkpoint import files, storage
from ottava.errors import CheckpointError, OttavaError, UsageError
from ottava.filesystem import Partial
from tests.core.checkpoint.files import save_sharded

ONE = {"a": torch.ones(3)}


def value_of(path: Path) -> float:
    """The value of ``a`` in a file or a folder."""
    if path.is_dir():
        return float(checkpoint.load_sharded({"a": torch.zeros(3)}, path)["a"][0])
    return float(checkpoint.load_file(path)["a"][0])  # type: ignore[index]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# -- several writers, and readers --


def test_a_save_beside_a_training_can_be_loaded(tmp_path: Path) -> None:
    """The checksum is that of the bytes in the file, whatever another thread writes meanwhile."""
    state = {str(number): torch.zeros(20_000) for number in range(5)}
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            for tensor in state.values():
                tensor.add_(1.0)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(6):
            checkpoint.save_file(state, tmp_path / "file")
            assert checkpoint.load_file(tmp_path / "file").keys() == state.keys()
            save_sharded(state, tmp_path / "folder")
            target = {name: torch.zeros(20_000) for name in state}
            assert checkpoint.load_sharded(target, tmp_path / "folder").keys() == state.keys()
    finally:
        stop.set()
        thread.join()


def test_writers_of_other_names_are_left_alone(tmp_path: Path) -> None:
    """Of long names that begin alike, as those of ranks do."""
    one, two = (tmp_path / f"checkpoint-{'x' * 60}-rank-{rank}" for rank in range(2))
    longest = tmp_path / ("é" * 127)
    with Partial(one) as writing:
        (writing.path / "tensors").write_bytes(b"half")
        for target in (two, one, longest):
            checkpoint.save_file(ONE, target)
        save_sharded(ONE, tmp_path / "folder")
        assert (writing.path / "tensors").read_bytes() == b"half"
    assert {*names(tmp_path)} == {one.name, two.name, longest.name, "folder"}


def test_two_replacements_of_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes while the other is about to give its folder a name."""
    path, real = tmp_path / "saved", os.rename
    for exists in (False, True):

        def rename(source: Any, target: Any) -> None:
            monkeypatch.undo()
            save_sharded(ONE, path)
            real(source, target)

        if exists:
            checkpoint.save_sharded({"a": torch.zeros(3)}, path)
        monkeypatch.setattr(os, "rename", rename)
        save_sharded({"a": torch.full((3,), 2.0)}, path)
        assert value_of(path) == 2
        assert len(names(path)) == 2
        assert names(tmp_path) == ["saved"]
        shutil.rmtree(path)
    # The other one is first, and is not to be replaced.
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match=r"saved exists.*overwrite=True"):
        checkpoint.save_sharded({"a": torch.full((3,), 2.0)}, path)
    assert value_of(path) == 1


@pytest.mark.parametrize("verify", [True, False])
def test_a_reader_is_told_of_a_replacement(
    verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, real = torch.full((3,), 7.0), files.safe_open
    calls: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "file": (checkpoint.save_file, checkpoint.load_file),
        "folder": (save_sharded, partial(checkpoint.load_sharded, {"a": target})),
    }
    for name, (save, load) in calls.items():
        path = tmp_path / name
        save({"a": torch.zeros(3)}, path)

        def replaced(*arguments: Any, save: Any = save, path: Path = path) -> Any:
            opened = real(*arguments)
            monkeypatch.undo()
            save(ONE, path)
            return opened

        monkeypatch.setattr(files, "safe_open", replaced)
        with pytest.raises(CheckpointError, match=r"replaced while.*load it again|cannot be read"):
            load(path, verify=verify)
        assert target.tolist() == [7.0] * 3
        load(path, verify=verify)
    assert target.tolist() == [1.0] * 3


def test_another_file_of_the_same_length_is_noticed(tmp_path: Path) -> None:
    for name, state in (("x", {"a": torch.zeros(3)}), ("y", ONE)):
        checkpoint.save_sharded(state, tmp_path / name)
    mine, other = (next((tmp_path / name).glob("rank-*")) for name in "xy")
    other.replace(mine)
    for verify in (True, False):
        with pytest.raises(CheckpointError, match="is another file than was written"):
            checkpoint.load_sharded({"a": torch.zeros(3)}, tmp_path / "x", verify=verify)


def test_a_checkpoint_that_is_replaced_all_the_time_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reads of its index and of its files; a writer without end is not waited for."""
    path, real, left = tmp_path / "step-0000001", Path.is_file, 0

    def replaced(file: Path) -> bool:
        nonlocal left
        if left and file.parent == path:
            left -= 1
            with monkeypatch.context() as patch:
                patch.setattr(Path, "is_file", real)
                save_sharded(ONE, path)
        return real(file)

    checkpoint.save_sharded({"a": torch.zeros(3)}, path)
    monkeypatch.setattr(Path, "is_file", replaced)
    for times in (1, 3):
        left = times
        assert checkpoint.latest_checkpoint(tmp_path) == path
        left = times
        assert value_of(path) == 1
        assert not left
    left = 1000
    assert not checkpoint.is_complete(path)
    assert left > 900


# -- the disk --


def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine is no different from one of the process."""
    calls: list[str] = []
    real_sync, real_replace, real_rename = os.fsync, os.replace, os.rename

    def sync(descriptor: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name[:6]}")
        real_sync(descriptor)

    def naming(real: Any) -> Any:
        def rename(source: Any, target: Any) -> None:
            calls.append(f"rename {Path(target).name[:6]}")
            real(source, target)

        return rename

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", naming(real_replace))
    monkeypatch.setattr(os, "rename", naming(real_rename))
    top = f"sync {tmp_path.name[:6]}"
    checkpoint.save_file(ONE, tmp_path / "x")
    assert calls == ["sync tensor", "rename x", top]
    calls.clear()
    save_sharded(ONE, tmp_path / "run")
    assert [call[:10] for call in calls[:3]] == ["sync rank-", "sync ottav", "sync .run-"]
    assert calls[3:] == ["rename run", top]
    calls.clear()
    save_sharded(ONE, tmp_path / "run")
    assert calls[4:] == ["rename rank-0", "sync run", "rename ottava", "sync run", top]


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """Sets the size that files of this process may have, in bytes."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(tmp_path: Path, limit_files: Callable[[int], None]) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    saves: list[tuple[Callable[..., object], Path]]
    saves = [(checkpoint.save_file, file), (save_sharded, folder)]
    for save, path in saves:
        save({"a": torch.zeros(3)}, path)
        for size, count in itertools.product((0, 1, 100, 200), (1, 10, 100_000)):
            state = {"a": torch.ones(count), "b": torch.ones(1)}
            limit_files(size)
            with pytest.raises(OttavaError, match="cannot be written"):
                save(state, path)
            limit_files(resource.RLIM_INFINITY)
            assert value_of(path) == 0
    assert names(tmp_path) == ["file", "folder"]
    assert len(names(folder)) == 2


def test_a_short_file_never_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library says of what it wrote."""
    path, real = tmp_path / "saved", files.serialize_file
    checkpoint.save_file(ONE, path)
    length = path.stat().st_size
    for size in (0, 4, 50, length - 1):

        def serialize(specs: Any, file: Path, texts: Any, size: int = size) -> None:
            real(specs, file, texts)
            os.truncate(file, size)

        monkeypatch.setattr(files, "serialize_file", serialize)
        with pytest.raises(UsageError, match="something is missing from what was written"):
            checkpoint.save_file({"a": torch.zeros(3)}, path)
        assert value_of(path) == 1
    assert names(tmp_path) == ["saved"]


def test_a_save_that_fails_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders above it, which it made, and what another one has put there stay."""

    def fails(path: Path, *_: Any) -> None:
        (path.parent.parent / "other").touch()
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_tensors", fails)
        for save in (
            lambda: checkpoint.save_sharded(ONE, tmp_path / "new" / "deep" / "x"),
            lambda: checkpoint.save_step(ONE, tmp_path / "new" / "deep", 3),
        ):
            with pytest.raises(CheckpointError, match="no room"):
                save()
    # A name that is too long, below folders that it makes.
    for path in (tmp_path / "one" / ("x" * 300) / "x", tmp_path / "two" / ("x" * 300)):
        with pytest.raises(CheckpointError, match="cannot be written"):
            checkpoint.save_sharded(ONE, path)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["new", "new/deep", "new/deep/other", "one", "two"]
    checkpoint.save_sharded(ONE, tmp_path / "new" / "deep" / "x")
    assert checkpoint.is_complete(tmp_path / "new" / "deep" / "x")


# -- names and permissions --


def test_only_files_and_checkpoints_are_replaced(tmp_path: Path) -> None:
    """Pipes are not waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    (tmp_path / "text").write_text("mine")
    (tmp_path / "device").symlink_to("/dev/null")
    checkpoint.save_step(ONE, tmp_path, 1)
    (tmp_path / "step-0000002").mkdir()
    os.mkfifo(tmp_path / "step-0000002" / "ottava.json")
    (tmp_path / "link").symlink_to("step-0000001")
    before = names(tmp_path)
    for name in ("pipe", "folder", "device", "step-0000001", "/dev/null"):
        with pytest.raises(UsageError, match=r"written: it is (a folder|no regular file)"):
            checkpoint.save_file(ONE, tmp_path / name)
    for name in ("pipe", "folder", "device", "text", "link", "step-0000002"):
        with pytest.raises(CheckpointError, match="is not a sharded checkpoint and is not repl"):
            save_sharded(ONE, tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} exists.*overwrite=True"):
            checkpoint.save_sharded(ONE, tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.save_sharded(ONE, tmp_path / "text" / "below")
    with pytest.raises(CheckpointError, match="pipe is no regular file"):
        checkpoint.load_file(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"ottava\.json cannot be read: it is no regular"):
        checkpoint.load_sharded(ONE, tmp_path / "step-0000002")
    assert checkpoint.latest_checkpoint(tmp_path) == tmp_path / "step-0000001"
    assert names(tmp_path) == before
    assert (tmp_path / "folder" / "mine").read_text() == (tmp_path / "text").read_text() == "mine"
    assert not os.path.isfile("/dev/null")
    assert value_of(tmp_path / "step-0000001") == 1


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """And no hidden folder in it."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "absent" / "x")
    for name, words in (
        ("absent/x", "absent"),
        ("file/x", "file"),
        ("link", "absent"),
        ("absent/deep/x", "absent/deep"),
    ):
        message = rf"{name} cannot be written: .*{tmp_path / words}\b"
        with pytest.raises(UsageError, match=message) as caught:
            checkpoint.save_file(ONE, tmp_path / name)
        assert "partial" not in str(caught.value)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    for value in (0.0, 1.0):
        checkpoint.save_file({"a": torch.full((3,), value)}, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert value_of(tmp_path / "real") == value


def modes_while(write: Callable[[], object], folder: Path) -> set[int]:
    """The permissions of files in hidden folders at any time while ``write`` runs."""
    modes: set[int] = set()

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def look() -> None:
            hidden = (entry for entry in folder.rglob("*") if ".partial/" in str(entry))
            modes.update(stat.S_IMODE(entry.stat().st_mode) for entry in hidden)

        def call(*arguments: Any, **options: Any) -> Any:
            look()
            result = real(*arguments, **options)
            look()
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fsync", "fchmod", "chmod", "replace", "rename"):
            patch.setattr(os, name, watched(getattr(os, name)))
        patch.setattr(files, "serialize_file", watched(files.serialize_file))
        write()
    return modes


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o666])
def test_what_replaces_another_is_open_to_nobody_else(mode: int, tmp_path: Path) -> None:
    """Not even while it is written, and whatever new files are open to."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    before = os.umask(0)
    try:
        folder.mkdir(mode=0o750)
        save_sharded(ONE, folder)
        assert {stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()} == {0o640}
        checkpoint.save_file(ONE, file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o666
        for old in (file, *folder.iterdir()):
            old.chmod(mode)
        modes = modes_while(lambda: checkpoint.save_file(ONE, file), tmp_path)
        modes |= modes_while(lambda: save_sharded(ONE, folder), tmp_path)
    finally:
        os.umask(before)
    assert mode in modes
    assert not any(found & ~(mode | stat.S_IRUSR | stat.S_IWUSR) for found in modes), modes
    assert {stat.S_IMODE(new.stat().st_mode) for new in (file, *folder.iterdir())} == {mode}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


# -- steps --


def test_steps_are_found_and_pruned(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert checkpoint.latest_checkpoint(run) is None
    for step in (7, 100, 20):
        assert checkpoint.save_step({"n": step}, run, step) == run / f"step-{step:07d}"
    for name in ("step-0000999", ".step-0000998-a.b.partial", "step-x", "other"):
        (run / name).mkdir()
    shutil.copytree(run / "step-0000100", run / "step-0000200")
    (run / "step-0000200" / "ottava.json").unlink()
    assert checkpoint.latest_checkpoint(run) == run / "step-0000100"
    checkpoint.save_step({"n": 30}, run, 30, keep=2)
    whole = ["step-0000030", "step-0000100"]
    # Those two, and what is no checkpoint of anybody's.
    assert names(run) == ["other", *whole, "step-0000200", "step-0000999", "step-x"]
    assert checkpoint.load_sharded({}, run / "step-0000100") == {"n": 100}
    checkpoint.save_step({"n": 31}, run, 30, overwrite=True, keep=1)
    assert checkpoint.latest_checkpoint(run) == run / "step-0000030"
    assert checkpoint.load_sharded({}, run / "step-0000030") == {"n": 31}


def test_old_steps_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is whole all the same."""
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if Path(target).name == "removed":
            raise PermissionError("not yours")
        real(source, target)

    for step in (1, 2):
        checkpoint.save_step(ONE, tmp_path, step)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.warns(RuntimeWarning, match="cannot be removed: not yours") as warned:
        path = checkpoint.save_step(ONE, tmp_path, 3, keep=1)
    assert len(warned) == 2
    assert checkpoint.is_complete(path)
    assert len(names(tmp_path)) == 3
