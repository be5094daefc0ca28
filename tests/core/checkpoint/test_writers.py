"""Writers beside each other, full disks, and names that no file may take: whole files, typed
errors, nothing left."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forking
import pytest
import torch

from ottava import checkpoint
from ottava.checkpoint import files, storage
from ottava.errors import CheckpointError, DTypeError, OttavaError, UsageError
from ottava.filesystem import Partial


def test_writers_of_other_files_are_left_alone(tmp_path: Path) -> None:
    """Long names that begin alike, as those of ranks do; while one is written another one comes and
    goes."""
    one, two = (
        tmp_path / ("checkpoint-" + "x" * 60 + "-rank-0"),
        tmp_path / ("checkpoint-" + "x" * 60 + "-rank-1"),
    )
    with Partial(one) as writing:
        (writing.path / "tensors").write_bytes(b"half")
        for target in (two, one):
            checkpoint.save_file({"a": torch.ones(2)}, target)
            checkpoint.save_sharded(
                {"a": torch.ones(2)}, target.with_name(target.name[:-2] + "s"), overwrite=True
            )
            assert (writing.path / "tensors").read_bytes() == b"half"
    longest = tmp_path / ("é" * 127)
    checkpoint.save_file({"a": torch.ones(2)}, longest)
    names = {one.name, two.name, one.name[:-2] + "s", longest.name}
    assert {entry.name for entry in tmp_path.iterdir()} == names


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """By the next one of the same name; those of other names stay."""
    program = (
        "import os, signal, sys, torch; from ottava import checkpoint; from ottava.checkpoint "
        "import files\n"
        "files.serialize_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save_file({'a': torch.ones(2)}, sys.argv[1])"
    )
    for name in ("x", "y"):
        with pytest.raises(subprocess.CalledProcessError):
            forking.python(program, tmp_path / name).check_returncode()
    assert len(list(tmp_path.iterdir())) == 2
    checkpoint.save_file({"a": torch.ones(2)}, tmp_path / "x")
    assert sorted(entry.name[:2] for entry in tmp_path.iterdir()) == [".y", "x"]


@pytest.mark.parametrize("times", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_two_writers_of_one_path(times: int, tmp_path: Path) -> None:
    """All succeed, and one whole file, and one whole checkpoint, is there."""
    failures: list[BaseException] = []

    def write(value: int) -> None:
        try:
            state = {name: torch.full((1000,), float(value)) for name in "abc"}
            checkpoint.save_file(state, tmp_path / "file")
            checkpoint.save_sharded(state, tmp_path / "folder", overwrite=True)
        except BaseException as error:
            failures.append(error)

    for _ in range(times):
        threads = [threading.Thread(target=write, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        loaded = {name: torch.zeros(1000) for name in "abc"}
        for read in (
            checkpoint.load_file(tmp_path / "file"),
            checkpoint.load_sharded(loaded, tmp_path / "folder"),
        ):
            assert len({float(value) for tensor in read.values() for value in tensor}) == 1
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
        assert len(list((tmp_path / "folder").iterdir())) == 2
    assert failures == []


def test_two_replacements_of_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes while the other is about to give its folder a name."""
    path, real = tmp_path / "saved", storage.publish
    for first in (False, True):
        if first:
            checkpoint.save_sharded({"x": torch.zeros(3)}, path)

        def publish(partial: Partial, overwrite: bool) -> None:
            monkeypatch.setattr(storage, "publish", real)
            checkpoint.save_sharded({"x": torch.ones(3)}, path, overwrite=True)
            real(partial, overwrite)

        monkeypatch.setattr(storage, "publish", publish)
        checkpoint.save_sharded({"x": torch.full((3,), 2.0)}, path, overwrite=True)
        target = {"x": torch.zeros(3)}
        checkpoint.load_sharded(target, path)
        assert target["x"].tolist() == [2.0] * 3
        assert len(list(path.iterdir())) == 2
        assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
        shutil.rmtree(path)


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """Sets the size that files of this process may have, in bytes."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 1, 100, 200])
@pytest.mark.parametrize("count", [1, 10, 100_000])
def test_a_full_disk_is_an_error_for_small_tensors_too(
    tmp_path: Path, limit_files: Callable[[int], None], size: int, count: int
) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    checkpoint.save_file({"a": torch.zeros(3)}, file)
    checkpoint.save_sharded({"a": torch.zeros(3)}, folder)
    state = {"a": torch.ones(count), "b": torch.ones(1)}
    for save in (
        lambda: checkpoint.save_file(state, file),
        lambda: checkpoint.save_sharded(state, folder, overwrite=True),
    ):
        limit_files(size)
        with pytest.raises(OttavaError, match="cannot be written"):
            save()
        limit_files(resource.RLIM_INFINITY)
    assert checkpoint.load_file(file)["a"].tolist() == [0.0] * 3  # type: ignore[union-attr]
    target = {"a": torch.ones(3)}
    assert checkpoint.load_sharded(target, folder)["a"].tolist() == [0.0] * 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
    assert len(list(folder.iterdir())) == 2


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/null")
    before = sorted(entry.name for entry in tmp_path.iterdir())
    for name in ("pipe", "folder", "link", "/dev/null"):
        with pytest.raises(
            UsageError, match=r"cannot be written: it is (a folder|no regular file)"
        ):
            checkpoint.save_file({"a": torch.ones(1)}, tmp_path / name)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    assert not os.path.isfile("/dev/null")
    for name in ("pipe", "link"):
        with pytest.raises(CheckpointError, match="not a sharded checkpoint"):
            checkpoint.save_sharded({"a": torch.ones(1)}, tmp_path / name, overwrite=True)


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    """By its name, not by that of a hidden folder in it."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "absent" / "x")
    for name, said in (
        ("absent/x", "absent"),
        ("file/x", "file"),
        ("link", "absent"),
        ("absent/deep/x", "absent/deep"),
    ):
        with pytest.raises(
            UsageError, match=rf"{name} cannot be written: .*{tmp_path / said}\b"
        ) as caught:
            checkpoint.save_file({"a": torch.ones(1)}, tmp_path / name)
        assert "partial" not in str(caught.value)


def test_a_reader_is_told_of_a_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of reading, of one file and of a folder; whether or not bytes are verified."""
    file, folder, real = tmp_path / "file", tmp_path / "folder", files.safe_open
    for verify in (True, False):
        checkpoint.save_file({"a": torch.zeros(3)}, file)
        checkpoint.save_sharded({"a": torch.zeros(3)}, folder, overwrite=True)

        def replaced(path: Any, framework: str) -> Any:
            opened = real(path, framework)
            monkeypatch.setattr(files, "safe_open", real)
            checkpoint.save_file({"a": torch.ones(3)}, file)
            return opened

        monkeypatch.setattr(files, "safe_open", replaced)
        with pytest.raises(
            CheckpointError, match=r"file was replaced while it was read.*load it again"
        ):
            checkpoint.load_file(file, verify=verify)
        reader = storage.FolderReader(folder)
        assert reader.index.files
        checkpoint.save_sharded({"a": torch.ones(3)}, folder, overwrite=True)
        monkeypatch.setattr(storage, "FolderReader", lambda path, reader=reader: reader)
        target = {"a": torch.full((3,), 7.0)}
        with pytest.raises(CheckpointError, match=r"folder/rank-\S+ .*"):
            checkpoint.load_sharded(target, folder, verify=verify)
        assert target["a"].tolist() == [7.0] * 3
        monkeypatch.undo()
        assert checkpoint.load_file(file)["a"].tolist() == [1.0] * 3  # type: ignore[union-attr]


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
                checkpoint.save_sharded({"a": torch.ones(3)}, path, overwrite=True)
        return real(file)

    checkpoint.save_sharded({"a": torch.zeros(3)}, path)
    monkeypatch.setattr(Path, "is_file", replaced)
    for times in (1, 3):
        left = times
        assert checkpoint.latest_checkpoint(tmp_path) == path
        left, target = times, {"a": torch.zeros(3)}
        assert checkpoint.load_sharded(target, path)["a"].tolist() == [1.0] * 3
        assert not left
    left = 1000
    assert not checkpoint.is_complete(path)
    assert left > 900


def test_a_save_that_fails_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders above it, which it made, and what another one has put there stay."""
    (tmp_path / "there").mkdir()
    state = {"a": torch.ones(1)}

    def fails(*_: Any) -> None:
        raise OSError("no room")

    def beside(path: Path, *_: Any) -> None:
        (path.parent.parent / "other").touch()
        fails()

    for write, left in (
        (fails, ["new", "new/deep"]),
        (beside, ["new", "new/deep", "new/deep/other"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write_tensors", write)
            for save in (
                lambda: checkpoint.save_sharded(state, tmp_path / "there" / "new" / "deep" / "x"),
                lambda: checkpoint.save_step(state, tmp_path / "there" / "new" / "deep", 3),
            ):
                with pytest.raises(CheckpointError, match="no room"):
                    save()
                found = sorted(
                    str(path.relative_to(tmp_path / "there"))
                    for path in tmp_path.glob("there/**/*")
                )
                assert found == left
    # A name in the way, below folders that it made.
    for path in (tmp_path / "one" / ("x" * 300) / "x", tmp_path / "two" / ("x" * 300)):
        with pytest.raises(CheckpointError, match="cannot be written"):
            checkpoint.save_sharded(state, path)
    assert not list(tmp_path.glob("**/*.partial"))
    checkpoint.save_sharded(state, tmp_path / "three" / "four" / "x")
    assert checkpoint.is_complete(tmp_path / "three" / "four" / "x")


def nested(layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_jagged_tensors_are_refused(layout: Any, tmp_path: Path) -> None:
    value = nested(layout)
    model = torch.nn.Module()
    model.register_buffer("x", value)
    for save in (
        lambda: checkpoint.save_file({"x": value}, tmp_path / "x"),
        lambda: checkpoint.save_model(model, tmp_path / "x"),
        lambda: checkpoint.save_sharded({"x": value}, tmp_path / "x"),
        lambda: checkpoint.flatten_state_dict({"x": value}),
    ):
        with pytest.raises(DTypeError, match="'x' is nested"):
            save()
    assert not list(tmp_path.iterdir())
    checkpoint.save_file({"x": torch.ones(3, 3)}, tmp_path / "file")
    checkpoint.save_sharded({"x": torch.ones(3, 3)}, tmp_path / "folder")
    with pytest.raises(OttavaError):
        checkpoint.load_model(model, tmp_path / "file")
    with pytest.raises(DTypeError, match="'x' is nested"):
        checkpoint.load_sharded({"x": value}, tmp_path / "folder")


#: What writes a file while the permissions of all files that are being written are looked at.
WATCHED = [(os, name) for name in ("open", "fsync", "fchmod", "chmod", "replace", "rename")]
WATCHED.append((files, "serialize_file"))


def modes_while(write: Callable[[], None], folder: Path) -> set[int]:
    """The permissions that a file in a hidden folder has at any time while ``write`` runs."""
    seen: set[int] = set()

    def look() -> None:
        for entry in folder.rglob("*"):
            if ".partial/" in str(entry):
                seen.add(stat.S_IMODE(entry.stat().st_mode))

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            look()
            made = real(*arguments, **options)
            look()
            return made

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in WATCHED:
            patch.setattr(module, name, watched(getattr(module, name)))
        write()
    return seen


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o666])
def test_a_file_that_replaces_another_is_open_to_nobody_else(mode: int, tmp_path: Path) -> None:
    """Not even while it is written, and whatever new files are open to."""
    file, folder, state = tmp_path / "file", tmp_path / "folder", {"a": torch.ones(3)}
    before = os.umask(0)
    try:
        checkpoint.save_file(state, file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o666
        checkpoint.save_sharded(state, folder)
        for old in (file, *folder.iterdir()):
            old.chmod(mode)
        seen = modes_while(lambda: checkpoint.save_file(state, file), tmp_path)
        seen |= modes_while(
            lambda: checkpoint.save_sharded(state, folder, overwrite=True), tmp_path
        )
    finally:
        os.umask(before)
    assert mode in seen
    assert all(found & ~(mode | stat.S_IRUSR | stat.S_IWUSR) == 0 for found in seen), list(
        map(oct, seen)
    )
    assert {stat.S_IMODE(new.stat().st_mode) for new in (file, *folder.iterdir())} == {mode}


def test_a_folder_that_replaces_another_is_open_to_nobody_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    for overwrite in (True, True):
        checkpoint.save_sharded({"a": torch.ones(3)}, folder, overwrite=overwrite)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()} == {0o600}


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends what waits for the other end of a pipe, which it would do for ever."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_pipes_are_never_waited_for(alarm: None, tmp_path: Path) -> None:
    """In the place of an index, of a file, and of a folder that a killed writer has left."""
    state, run = {"a": torch.ones(3)}, tmp_path / "run"
    checkpoint.save_file(state, tmp_path / "file")
    checkpoint.save_sharded(state, tmp_path / "sharded")
    checkpoint.save_step(state, run, 1)
    (run / "step-0000002").mkdir()
    pipe = run / "step-0000002" / "ottava.json"
    os.mkfifo(pipe)
    # Of the names of hidden folders, of which a killed writer may have left some.
    for target in ("file", "sharded"):
        with Partial(tmp_path / target) as partial:
            name = partial.path.name
        os.mkfifo(tmp_path / name)
    checkpoint.save_file(state, tmp_path / "file")
    checkpoint.save_sharded(state, tmp_path / "sharded", overwrite=True)
    assert checkpoint.latest_checkpoint(run) == run / "step-0000001"
    assert not checkpoint.is_complete(run / "step-0000002")
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: checkpoint.load_sharded(state, run / "step-0000002"),
            "ottava.json cannot be read: it is no regular file",
        ),
        (
            lambda: checkpoint.save_step(state, run, 2, overwrite=True),
            "is not a sharded checkpoint and is not replaced",
        ),
        (lambda: checkpoint.load_file(pipe), "is no regular file"),
        (lambda: checkpoint.save_file(state, pipe), "it is no regular file"),
    ]
    for call, said in calls:
        with pytest.raises(OttavaError, match=said):
            call()
