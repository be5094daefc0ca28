"""Damaged and hostile files: a typed error that names the file, nothing changed, no code run."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ottava import checkpoint
from ottava.errors import CheckpointError, OttavaError
from tests.core import forking
from tests.core.checkpoint.files import Parts, contents, forge, pickles, refusal, rows, seal

Attack = Callable[[bytes], str]


@pytest.fixture
def attack(small: Any, tmp_path: Path) -> Attack:
    """Loads bytes into a model: they are refused with the file's name, and nothing changes."""
    model, path = small(1), tmp_path / "attacked"
    before = contents(model)

    def refused(raw: bytes) -> str:
        path.write_bytes(raw)
        error = refusal(partial(checkpoint.load_model, model, path))
        assert str(path) in error
        assert contents(model) == before
        return error

    return refused


@pytest.fixture
def attacks(
    saved: bytes, attack: Attack, small: Any, tmp_path: Path
) -> Callable[[], Iterator[tuple[bytes, Attack]]]:
    """A file, and each file of a sharded checkpoint: what is in it, and what loads other bytes."""
    target, original, path = small(1).state_dict(), tmp_path / "original", tmp_path / "folder"
    checkpoint.save_sharded(small(0).state_dict(), original)
    before = contents(target)

    def each() -> Iterator[tuple[bytes, Attack]]:
        yield saved, attack
        for file in sorted(original.iterdir()):
            raw = file.read_bytes()
            shutil.copytree(original, path, dirs_exist_ok=True)

            def refused(changed: bytes, file: Path = path / file.name) -> str:
                file.write_bytes(changed)
                error = refusal(partial(checkpoint.load_sharded, target, path))
                assert file.name in error
                assert contents(target) == before
                return error

            yield raw, refused

    return each


def damages(raw: bytes, chance: random.Random, step: int) -> Iterator[bytes]:
    """The bytes with one bit flipped at every ``step``-th place, cut there, or changed at
    random."""
    for place in range(0, len(raw), step):
        changed = bytearray(raw)
        changed[place] ^= 1 << place * 5 // step % 8
        yield bytes(changed)
        yield raw[:place]
    for more in (b"\0", b"x" * 7, raw):
        yield raw + more
    for _ in range(200 // step + 10):
        begin, length = chance.randrange(len(raw)), chance.randrange(1, 64)
        junk, zeros = chance.randbytes(length), bytes(length)
        yield raw[:begin] + junk + raw[begin + length :]
        yield raw[:begin] + zeros + raw[begin + length :]
        yield raw[:begin] + raw[begin + length :]
        yield raw[:begin] + junk + raw[begin:]
        # The length of a header that fits, and no header.
        yield length.to_bytes(8, "little") + junk
        yield (length + 1).to_bytes(8, "little") + b"{" + junk


@pytest.mark.parametrize("step", [29, pytest.param(3, marks=pytest.mark.slow)])
def test_every_damage(step: int, attacks: Any) -> None:
    for original, attack in attacks():
        for raw in damages(original, random.Random(0), step):
            assert raw == original or attack(raw), "it was loaded"


@pytest.mark.parametrize("name", ["ottava.json", "rank-*"])
def test_a_checkpoint_that_lacks_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    checkpoint.save_sharded({"x": torch.ones(2)}, path)
    (file,) = path.glob(name)
    assert checkpoint.is_complete(path)
    for remove in (file.unlink, file.mkdir):
        remove()
        assert not checkpoint.is_complete(path)
        with pytest.raises(CheckpointError, match=file.name):
            checkpoint.load_sharded({"x": torch.zeros(2)}, path)


# -- one file --

GIT_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"
#: What stands in the place of a file, and what the error calls it.
OTHER_FILES = [(b"", "is empty"), (GIT_LFS, "Git LFS.*git lfs pull"), (b"GGUF" * 9, "a GGUF file")]
OTHER_FILES += [(pickle.dumps({"a": 1}), "a pickle.*weights_only=True.*ottava export")]
OTHER_FILES += [(bytes(100), "no safetensors file"), (b"\x10\0\0", "no safetensors file")]


@pytest.mark.parametrize(("raw", "words"), OTHER_FILES)
def test_files_of_other_kinds_are_named(raw: bytes, words: str, attack: Attack) -> None:
    assert re.search(words, attack(raw))


def test_headers_that_are_no_plain_json(saved: bytes, parts: Parts, attack: Attack) -> None:
    sizes = [0, 1, 2, len(saved), len(saved) + 1, 10**8, 10**8 + 1, 2**31, 2**32, 2**62, 2**63]
    for size in [*sizes, 2**64 - 1]:
        assert attack(size.to_bytes(8, "little") + saved[8:]), size
    text, name = json.dumps({"__metadata__": parts.metadata, **parts.body}), '"layer.bias": '
    assert name in text
    deep = [f"{begin * 200_000}1{end * 200_000}" for begin, end in ("[]", ('{"a":', "}"))]
    ends = [*(f', "more": {value}' for value in (*deep, "[" * 200_000, "9" * 5000, "NaN")), ""]
    for bad in (
        text.replace(name, name + "{}, " + name),  # a key twice
        text.replace('"dtype"', '"dtype": "BF16", "dtype"', 1),
        *(text[:-1] + end + "}" * (end != "") for end in ends),
        text + "x",
        text + text,
        "\ufeff" + text,
        f"[{text}]",
    ):
        assert attack(seal(bad, parts.data)), bad[:100]
    for encoding in ("utf-16", "utf-32", "utf-16-le"):
        raw = text.encode(encoding)
        assert attack(len(raw).to_bytes(8, "little") + raw + parts.data), encoding
    for word in ("[" * 100_000, '{"a":' * 100_000, "", "nul", "1", '{"version": 1}', "\x00"):
        metadata = {"ottava": word, "ottava.crc32": "00000000"}
        text = json.dumps({"__metadata__": metadata, **parts.body})
        assert "damaged" in attack(seal(text, parts.data))


JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 7, 35, 2**31, 2**62, 2**63, 2**64, 10**400, 0.0, 1.0, 1.5, -0.5,
    1e308, "", "x", "U8", "1", [], [[]], [0], [1], [-1], [5, 7], [7, 5], [35], [5, 7, 1],
    [5.0, 7.0], [True, 35], ["5", "7"], [None], [2**62, 2**62], [2**62, 4], [2**62] * 60,
    [0, 2**62, 2**62], [1] * 65, [1] * 100_000, [0, 0], [0, 2**63], [35, 0], [0, 1, 2], [4, 39], {},
    {"a": 1}, {"dtype": "float8_e5m2"}, {"dtype": "save"}, {"dtype": []}, {"dtype": "float32"},
    "missing",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in nested dicts."""
    for key, entry in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from places(entry, (*path, key))


@pytest.mark.parametrize("share", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_junk_under_checksums_that_fit(
    share: int, parts: Parts, small: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """What is accepted says what the file said before; a ``share``-th of the junk at each place."""
    path, model = tmp_path / "attacked", small(1)
    (tmp_path / "as-is").write_bytes(parts.seal())
    meant, before = contents(checkpoint.load_file(tmp_path / "as-is")), contents(model)
    accepted, cases = 0, []
    for of in ("body", "described"):
        cases += [(of, place) for place in places(getattr(parts, of))]
    cases += [("body", (name, "more")) for name in parts.body]
    for turn, (of, place) in enumerate(cases):
        for junk in JUNK[turn % share :: share]:
            changed = copy.deepcopy(parts)
            at = getattr(changed, of)
            for key in place[:-1]:
                at = at[key]
            at.pop(place[-1], None)
            if junk != "missing":
                at[place[-1]] = junk
            path.write_bytes(changed.seal())
            if error := refusal(partial(checkpoint.load_model, model, path)):
                assert str(path) in error, (place, junk)
                assert contents(model) == before, (place, junk)
                continue
            accepted += 1
            assert contents(checkpoint.load_file(path)) == meant, (place, junk)
            model = small(1)
    # Fields that the format does not have, and junk that equals the value that stood there.
    assert 0 < accepted < len(cases) * len(JUNK) / share / 5


@pytest.mark.parametrize(
    "reference",
    [
        "os:system", "builtins:eval", "subprocess:Popen", "torch:load", "pickle:loads", "this:s",
        "torch.nn.modules.linear:Linear", "ottava.tensors.storage:StorageSpec", "antigravity:x",
        ":", "", "x", "ottava.tensors.float8:Float8Tensor.__new__", "\0:\0",
        "ottava.tensors.tensor:QuantizedTensor", "ottava.tensors.float8:Float8TensorStorage",
    ],
)  # fmt: skip
def test_references_to_other_classes(parts: Parts, attack: Attack, reference: str) -> None:
    parts.described["quantized"]["layer.weight"]["class"] = reference
    assert "'layer.weight'" in attack(parts.seal())
    assert not {"antigravity", "this"} & {*sys.modules}


def at(*path: Any, to: Any) -> Callable[[Any, Any], object]:
    """Puts a value at a place of a description."""

    def change(tensors: Any, described: Any) -> None:
        for key in path[:-1]:
            described = described[key]
        described[path[-1]] = to

    return change


def put(name: str, value: Any) -> Callable[[Any, Any], object]:
    return lambda tensors, described: tensors.update({name: value})


W = ("quantized", "w")
E5M2 = torch.ones(5, 7).to(torch.float8_e5m2)
#: Changes of a flattened state, and words of the error.
DESCRIPTIONS: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda tensors, _: tensors.pop("w.data"), "'w.data' is missing"),
    (put("w", torch.ones(1)), "'w' is both a tensor and a quantized one"),
    (put("w.fp8_scale_inv", torch.ones(2)), "'w'.*one element"),
    (put("w.data", torch.ones(())), "'data' is of torch.float32"),
    (put("w.data", E5M2), "e5m2"),
    (at("version", to=2), "version 2.*read it with the ottava that wrote it"),
    (at("quantized", to=[]), "damaged"),
    (at("quantized", to={"w": {}}), "damaged"),
    (at("aliases", to={"x": 1}), "damaged"),
    (at("aliases", to={"x": "nothing"}), "'x' is said to be 'nothing'"),
    (at("aliases", to={"step": "w.data"}), "'step' is said to be"),
    (at(*W, "class", to="os:system"), "not installed.*the package that has the module 'os'"),
    (at(*W, "tensors", to=[]), r"has the tensors \[\]"),
    (at(*W, "tensors", to=["data", "more"]), "'w.more' is missing"),
    (at(*W, "static", to={}), "cannot be restored"),
    (at(*W, "static", "more", to=1), "cannot be restored.*'more'"),
    (at(*W, "static", "shape", to=[7, 5]), r"'w'.*\(7, 5\)"),
    (at(*W, "static", "fp8_dtype", to={"dtype": "save"}), "cannot be restored"),
    (at(*W, "static", "fp8_dtype", to={"dtype": "float32"}), "'w'"),
]


@pytest.mark.parametrize(("change", "words"), DESCRIPTIONS)
def test_descriptions(change: Any, words: str, quantizer: Any) -> None:
    state = {"w": quantizer(torch.randn(5, 7)), "step": torch.tensor(3)}
    tensors, metadata = checkpoint.flatten_state_dict(state)
    described = json.loads(metadata["ottava"])
    # A later version may say more.
    described["quantized"]["w"]["later"] = 1
    more = {"ottava": json.dumps(described)}
    assert contents(checkpoint.unflatten_state_dict(tensors, more)) == contents(state)
    change(tensors, described)
    with pytest.raises(OttavaError, match=words):
        checkpoint.unflatten_state_dict(tensors, {"ottava": json.dumps(described)})


def test_a_class_that_checks_nothing(tmp_path: Path) -> None:
    """A weight is of the right shape, or refused."""
    weight, bias, path = rows(), torch.ones(2), tmp_path / "x"
    checkpoint.save_file({"weight": weight, "bias": bias}, path)
    original, loaded = Parts(path.read_bytes()), 0
    there = [{"dtype": "float8_e5m2"}, [2, 3]]
    values = [*(value for value in JUNK[::3] if value not in there), *there, [3, 2], "23"]
    for field, value in itertools.product(("element", "sizes"), values):
        changed = copy.deepcopy(original)
        changed.described["quantized"]["weight"]["static"][field] = value
        path.write_bytes(changed.seal())
        model = torch.nn.Linear(3, 2)
        before = contents(model)
        if error := refusal(partial(checkpoint.load_model, model, path)):
            assert str(path) in error
            assert contents(model) == before
            continue
        loaded += 1
        assert torch.equal(model.weight, weight.dequantize(torch.float32))
    # The values that stood there.
    assert loaded == 2


def test_files_of_other_tools(tmp_path: Path) -> None:
    """They have no checksums: refused, or read as the library reads them."""
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor([True, False])}
    raw, path, agreed = safetensors.torch.save(tensors, {"format": "pt"}), tmp_path / "other", 0
    for place in range(0, len(raw), 2):
        changed = bytearray(raw)
        changed[place] ^= 1 << place * 5 % 8
        path.write_bytes(changed)
        if error := refusal(partial(checkpoint.load_file, path)):
            assert str(path) in error
            continue
        with safetensors.safe_open(path, "pt") as file:
            expected = {name: file.get_tensor(name) for name in file.offset_keys()}
        assert contents(checkpoint.load_file(path)) == contents(expected)
        agreed += 1
    assert 25 < agreed < len(raw) / 2


def test_a_file_that_another_tool_has_rewritten(tmp_path: Path) -> None:
    """The description without the checksum, or with that of another file."""
    checkpoint.save_file({"a": torch.ones(3)}, tmp_path / "x")
    metadata = Parts((tmp_path / "x").read_bytes()).metadata
    for keys, words in (
        (["ottava"], "not 'ottava.crc32'"),
        (["ottava.crc32"], "not 'ottava'"),
        (metadata, "its checksum is"),
    ):
        texts = {key: metadata[key] for key in keys}
        safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "y", texts)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load_file(tmp_path / "y")


# -- a folder --


def shards(body: dict[str, Any]) -> list[dict[str, Any]]:
    return body["tensors"]["x"]["shards"]  # type: ignore[no-any-return]


def outside(body: dict[str, Any]) -> None:
    """The very file, by a name that leaves the folder."""
    ((name, file),) = body["files"].items()
    body["files"] = {f"../saved/{name}": file}
    shards(body)[0]["file"] = f"../saved/{name}"


def boxes(*boxes: tuple[list[int], list[int]], shape: list[int] | None = None) -> Any:
    """The shards as offsets and shapes, all of them in the one file."""

    def change(body: dict[str, Any]) -> None:
        first = shards(body)[0]
        entries = [first | {"offsets": at, "shape": size} for at, size in boxes]
        body["tensors"]["x"].update(shards=entries, shape=shape or [4, 3])

    return change


def half(body: dict[str, Any]) -> None:
    body["tensors"]["half \ud800"] = body["tensors"]["x"]


INDICES: dict[str, Callable[[dict[str, Any]], object]] = {
    "outside": outside,
    "version": lambda body: body.update(version=1),
    "files": lambda body: body.update(files={"../outside.safetensors": [1, "2"]}),
    "length": lambda body: body["files"].update({key: [True, ""] for key in body["files"]}),
    "description": lambda body: body.update(description=[]),
    "two kinds": lambda body: body["description"].update(state={"tensor": "x", "value": 1}),
    "state": lambda body: body["description"].update(state=[]),
    "unhashable": lambda body: body["description"].update(state={"dict": [[["k"], {"value": 1}]]}),
    "per rank": lambda body: body["description"].update(per_rank={"x": ["x", "y"]}),
    "largest": lambda body: body["description"].update(largest=["x"]),
    "entry": lambda body: body["description"].update(quantized={"x": 1}),
    "empty entry": lambda body: body["description"].update(quantized={"x": {}}),
    "half a name": half,
    "dtype": lambda body: body["tensors"]["x"].update(dtype="F4"),
    "negative": boxes(([0, 0], [4, 3]), shape=[-4, -3]),
    "other shape": boxes(([0, 0], [4, 3]), shape=[4, 4]),
    "huge": boxes(([0, 0], [4, 3]), shape=[1 << 70, 0]),
    "none": boxes(),
    "missing": lambda body: body["tensors"].pop("x"),
    "key": lambda body: shards(body)[0].update(key="y"),
    "file": lambda body: shards(body)[0].update(file="absent"),
    "beyond": boxes(([1, 0], [4, 3])),
    "rank": boxes(([0], [4])),
    "twice": boxes(([0, 0], [4, 3]), ([0, 0], [4, 3])),
    "one place": boxes(([0, 0], [2, 3]), ([0, 0], [2, 3])),
    "overlap": boxes(([0, 0], [2, 3]), ([1, 0], [3, 3])),
    "gap": boxes(([0, 0], [2, 3]), ([2, 0], [1, 3])),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_forged_index(name: str, tmp_path: Path) -> None:
    checkpoint.save_sharded({"x": torch.ones(4, 3)}, tmp_path / "saved")
    forge(tmp_path / "saved", INDICES[name])
    # Only a load compares the state and the files with the index.
    later = name in ("two kinds", "unhashable", "missing", "key")
    assert checkpoint.is_complete(tmp_path / "saved") == later
    target = {"x": torch.zeros(4, 3)}
    words = "has version 1.*Expected: version 2.*load it in the ottava that wrote it"
    with pytest.raises(CheckpointError, match=words if name == "version" else "saved"):
        checkpoint.load_sharded(target, tmp_path / "saved")
    assert not target["x"].any()


def test_a_file_whose_name_only_begins_as_one_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint.save_sharded({"x": torch.ones(4, 3)}, tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("rank-*")
    longer = file.rename(f"{file}.bak").name

    def change(body: dict[str, Any]) -> None:
        body["files"] = {longer: body["files"].pop(file.name)}
        shards(body)[0]["file"] = longer

    forge(tmp_path / "saved", change)
    with pytest.raises(CheckpointError, match="names other files than those of a checkpoint"):
        checkpoint.load_sharded({"x": torch.zeros(4, 3)}, tmp_path / "saved")


def test_an_index_that_is_unusual(tmp_path: Path) -> None:
    """An empty shard, and a key that this version does not know."""
    path = tmp_path / "saved"
    checkpoint.save_sharded({"x": torch.ones(4, 3)}, path)
    forge(path, boxes(([0, 0], [4, 3]), ([4, 0], [0, 3])))
    forge(path, lambda body: body["description"].update(more=1))
    target = {"x": torch.zeros(4, 3)}
    checkpoint.load_sharded(target, path)
    assert target["x"].all()


# -- no code, no memory --


def test_pickles_run_nothing(attacks: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for _, load in attacks():
        for raw in pickles(trace):
            assert load(raw)
            assert load(len(raw).to_bytes(8, "little") + raw)
    for raw in pickles(trace):
        (tmp_path / "pickle.pt").write_bytes(raw)
        assert "pickle.pt" in refusal(partial(checkpoint.read_state, tmp_path / "pickle.pt"))
    # What torch would unpickle is not even looked at.
    checkpoint.save_sharded({"x": torch.ones(1)}, tmp_path / "run")
    (tmp_path / "run" / ".metadata").write_bytes(pickles(trace)[0])
    assert checkpoint.load_sharded({"x": torch.zeros(1)}, tmp_path / "run")["x"].all()
    assert not trace.exists()
    # The test could fail.
    pickle.loads(pickles(trace)[0])
    assert trace.exists()


LIMITED = """
import resource, sys
import torch, ottava.checkpoint, ottava.errors
before = set(sys.modules)
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + 200_000_000,) * 2)
refused = 0
for path in sys.argv[1:]:
    try:
        ottava.checkpoint.load_file(path)
    except ottava.errors.OttavaError:
        refused += 1
new = set(sys.modules) - before
assert not [name for name in new if name.startswith(("torch._dynamo", "torch.onnx"))], new
try:
    torch.empty(300_000_000, dtype=torch.uint8)
except RuntimeError:
    print(refused)
"""


@pytest.mark.xdist_group("forked processes")
def test_memory_and_imports_are_bounded(parts: Parts, tmp_path: Path) -> None:
    """Each claim of more memory than a file has is refused, and so is the name of a module of torch
    as a dtype, which would be imported if torch were asked for it."""
    files = [
        size.to_bytes(8, "little") + b"{" + b" " * 1000
        for size in (10**8, 10**9, 2**40, 2**63, 2**64 - 1)
    ]
    for name in ("layer.weight.data", "step"):
        fields = parts.body[name]
        for shape in ([2**40], [2**62], [2**31, 2**31], [10**9], [0, 2**62, 2**62]):
            for offsets in (fields["data_offsets"], [0, 2**40], [0, 10**9]):
                changed = copy.deepcopy(parts)
                changed.body[name] = fields | {"shape": shape, "data_offsets": offsets}
                files.append(changed.seal())
    for module in ("_dynamo", "onnx"):
        changed = copy.deepcopy(parts)
        changed.described["quantized"]["layer.weight"]["static"]["dtype"] = {"dtype": module}
        files.append(changed.seal())
    # A gigabyte that a file with a hole has.
    body = {"x": {"dtype": "U8", "shape": [10**9], "data_offsets": [0, 10**9]}}
    hole = {"__metadata__": {"ottava": '{"version": 1, "quantized": {}}'}, **body}
    paths = [tmp_path / str(number) for number in range(len(files) + 1)]
    for path, raw in zip(paths, [*files, seal(json.dumps(hole), b"")], strict=True):
        path.write_bytes(raw)
    os.truncate(paths[-1], paths[-1].stat().st_size + 10**9)
    done = forking.python(LIMITED, *paths)
    assert done.stdout.strip() == str(len(paths)), done.stderr[-2000:]
