"""The files against the library of the format, in both directions, and tensor by tensor."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import checkpoint
from ottava.errors import CheckpointError, DeviceError, DTypeError, UsageError

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
]
DTYPES += [
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
DTYPES += [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
SHAPES = st.lists(st.integers(0, 5), max_size=4)


def filled(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bytes at all; of booleans, those that there are."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).reshape(shape)


TENSORS = st.builds(filled, st.sampled_from(DTYPES), SHAPES, st.integers(0, 2**32))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


def by_the_library(path: Path) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(NAMES, TENSORS, max_size=8))
def test_the_library_reads_what_is_written(tensors: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        checkpoint.save_file(tensors, path)
        for read in (by_the_library(path), checkpoint.load_file(path)):
            assert read.keys() == tensors.keys()
            assert all(same(read[name], tensor) for name, tensor in tensors.items())
        # The checksum is that of the documentation, and the contents are the same for any order.
        with safetensors.safe_open(path, "pt") as file:
            texts = file.metadata()
        claimed = texts.pop("ottava.crc32")
        about = {
            n: [str(t.dtype)[6:], list(t.shape), zlib.crc32(bytes_of(t))]
            for n, t in tensors.items()
        }
        told = json.dumps([texts, about], sort_keys=True, separators=(",", ":"))
        assert claimed == f"{zlib.crc32(told.encode()):08x}"
        checkpoint.save_file(dict(reversed(tensors.items())), path)
        assert by_the_library(path).keys() == tensors.keys()


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(NAMES, TENSORS, max_size=8),
    # Of an empty dict the library makes a file that it does not read itself.
    st.one_of(
        st.none(), st.dictionaries(NAMES.map("its {}".format), st.text(max_size=5), min_size=1)
    ),
)
def test_what_the_library_writes_is_read(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        try:
            safetensors.torch.save_file({n: t.clone() for n, t in tensors.items()}, path, metadata)
        except (UnicodeEncodeError, safetensors.SafetensorError):
            return
        read = checkpoint.load_file(path)
        assert read.keys() == tensors.keys()
        assert all(same(read[name], tensor) for name, tensor in tensors.items())


def test_booleans_are_0_and_1(tmp_path: Path) -> None:
    """torch reads any other byte as it likes."""
    header = b'{"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}'
    for last in range(4):
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes([1, last]))
        if last < 2:
            assert checkpoint.load_file(tmp_path / "x")["a"].tolist() == [True, bool(last)]
            continue
        with pytest.raises(CheckpointError, match="'a' has values besides 0 and 1"):
            checkpoint.load_file(tmp_path / "x")


def test_a_file_that_another_tool_has_rewritten(tmp_path: Path) -> None:
    """The description without the checksums, or with those of another file."""
    checkpoint.save_file({"a": torch.ones(3)}, tmp_path / "x")
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        metadata = file.metadata()
    for kept, said in (
        (["ottava"], "not 'ottava.crc32'"),
        (["ottava.crc32"], "not 'ottava'"),
        (metadata, "checksum"),
    ):
        # Other values: the library writes metadata in any order, at times in ours.
        safetensors.torch.save_file(
            {"a": torch.zeros(3)}, tmp_path / "y", {key: metadata[key] for key in kept}
        )
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load_file(tmp_path / "y")


def test_what_the_format_does_not_have(tmp_path: Path) -> None:
    for value, error, said in (
        ({"x": torch.ones(2, dtype=torch.complex128)}, DTypeError, "'x' is of torch.complex128"),
        ({"__metadata__": torch.ones(1)}, UsageError, "__metadata__"),
        ({"\ud800": torch.ones(1)}, UsageError, r"'\\ud800' cannot be written.*half characters"),
    ):
        with pytest.raises(error, match=said):
            checkpoint.save_file(value, tmp_path / "x")
    metadata: Any
    for metadata, error, said in (
        ({"a": 1}, DTypeError, r"metadata is \{'a': 1\}.*texts by name"),
        ({1: "a"}, DTypeError, "texts by name"),
        (["a"], DTypeError, r"metadata is \['a'\]"),
        (0, DTypeError, "metadata is 0"),
        ({"a": "\udcff"}, UsageError, r"'\\udcff' cannot be written.*half characters"),
        ({"\ud83d": "a"}, UsageError, r"'\\ud83d' cannot be written"),
    ):
        with pytest.raises(error, match=said):
            checkpoint.save_file({"x": torch.ones(1)}, tmp_path / "x", metadata=metadata)
    for name in ("x\0y", "\ud800"):
        with pytest.raises(UsageError, match="cannot be written"):
            checkpoint.save_file({"x": torch.ones(1)}, tmp_path / name)
        with pytest.raises(CheckpointError, match="cannot be written"):
            checkpoint.save_sharded({"x": torch.ones(1)}, tmp_path / name / "x")
        with pytest.raises(CheckpointError, match="cannot be written"):
            checkpoint.save_step({"x": torch.ones(1)}, tmp_path / name, 1)
        for read in (checkpoint.load_file, lambda path: checkpoint.load_sharded({}, path)):
            with pytest.raises(CheckpointError, match="cannot be read"):
                read(tmp_path / name)
        assert not checkpoint.is_complete(tmp_path / name)
        assert checkpoint.latest_checkpoint(tmp_path / name) is None
    with pytest.raises(UsageError, match="is a folder"):
        checkpoint.save_file({"x": torch.ones(1)}, tmp_path)
    assert not list(tmp_path.iterdir())
    checkpoint.save_file({"x": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(DeviceError, match="cuda:99"):
        checkpoint.load_file(tmp_path / "x", "cuda:99")


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    checkpoint.save_file({"a": torch.ones(2)}, real)
    real.chmod(0o600)
    link.symlink_to("real")
    checkpoint.save_file({"a": torch.zeros(2)}, link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o600
    assert not checkpoint.load_file(real)["a"].any()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is put on the disk and renamed, in order."""
    calls: list[tuple[str, str]] = []
    real_sync, real_replace, real_rename = os.fsync, os.replace, os.rename

    def sync(descriptor: int) -> None:
        calls.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real_sync(descriptor)

    def named(real: Any) -> Any:
        def rename(source: Any, target: Any) -> None:
            calls.append(("rename", os.path.basename(target)))
            real(source, target)

        return rename

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", named(real_replace))
    monkeypatch.setattr(os, "rename", named(real_rename))
    return calls


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="reads the names of open files there"
)
def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine is no different from one of the process."""
    calls = recorded(monkeypatch)
    checkpoint.save_file({"a": torch.ones(2)}, tmp_path / "x")
    kinds = [kind for kind, _ in calls]
    assert kinds == ["sync", "rename", "sync"]
    assert calls[0][1] == "tensors"
    assert calls[1:] == [("rename", "x"), ("sync", tmp_path.name)]
    calls.clear()
    checkpoint.save_sharded({"a": torch.ones(2)}, tmp_path / "run")
    place = calls.index(("rename", "run"))
    before = [name for kind, name in calls[:place] if kind == "sync"]
    assert "ottava.json" in before
    assert any(name.startswith("rank-00000") for name in before)
    assert any(name.startswith(".run-") for name in before)
    assert before.index("ottava.json") > next(
        i for i, name in enumerate(before) if name.startswith("rank-")
    )
    assert ("sync", tmp_path.name) in calls[place:]


OLD_INDEX = (
    '{"crc32":"994a069d","checkpoint":{"version":1,"world_size":1,"block_bytes":4194304,'
    '"files":{"rank-00000-of-00001.safetensors":[104,96,1144357824]},'
    '"tensors":{"x":{"dtype":"F32","shape":[2],'
    '"pieces":[{"file":"rank-00000-of-00001.safetensors","begin":96,"offsets":[0],"shape":[2],'
    '"crc32":[3573961104]}]}},'
    '"description":{"state":{"dict":[["x",{"tensor":"x"}]]},'
    '"quantized":{},"per_rank":{},"largest":[]}}}\n'
)


def test_what_the_version_before_wrote_is_refused_in_words_that_help(tmp_path: Path) -> None:
    texts = {"ottava": '{"version": 1, "quantized": {}}', "ottava.digest": "crc32:00000000"}
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "x", texts)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "ottava.json").write_text(OLD_INDEX)
    remedy = (
        "Remedy: load it in the ottava that wrote it, keep that with torch.save, and save it "
        "again in this one"
    )
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=rf"x is of an old format.*{remedy}"):
            checkpoint.load_file(tmp_path / "x", verify=verify)
        with pytest.raises(CheckpointError, match=rf"version 1\. Expected: version 2\. {remedy}"):
            checkpoint.load_sharded({"x": torch.ones(2)}, tmp_path / "folder", verify=verify)
