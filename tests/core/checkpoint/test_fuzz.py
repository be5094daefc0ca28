"""Damaged and hostile files: a typed error each time, the model bit for bit as it was, no code run,
memory bounded."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forking
import pytest
import safetensors
import safetensors.torch
import torch
from sampling import VARIABLE, some

from ottava import checkpoint
from ottava.errors import OttavaError

Attack = Callable[[bytes], str]


@pytest.fixture
def attack(small: Any, contents: Any, tmp_path: Path) -> Attack:
    """Loads bytes into a model: they have to be refused, with the file's name, and nothing may
    change."""
    model, path = small(1), tmp_path / "attacked"
    before = contents(model)

    def refused(raw: bytes) -> str:
        path.write_bytes(raw)
        with pytest.raises(OttavaError) as caught:
            checkpoint.load_model(model, path)
        assert contents(model) == before
        assert str(path) in str(caught.value)
        return str(caught.value)

    return refused


def test_an_unchanged_file_is_loaded(
    saved: bytes, parts: Any, small: Any, contents: Any, tmp_path: Path
) -> None:
    """What the other tests rely on: the model takes the file, and the checksums made by hand are
    right."""
    for raw in (saved, parts.seal()):
        (tmp_path / "x").write_bytes(raw)
        model = small(1)
        assert checkpoint.load_model(model, tmp_path / "x") == ([], [])
        assert contents(model) == contents(small(0))


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_every_byte(saved: bytes, attack: Attack, bits: int) -> None:
    """With one of its bits the other way, each time another one, or every bit."""
    assert len(saved) > 800
    for place in range(len(saved)):
        for bit in ((place * 5 + more) % 8 for more in range(bits)):
            changed = bytearray(saved)
            changed[place] ^= 1 << bit
            attack(bytes(changed))


def test_every_length(saved: bytes, attack: Attack) -> None:
    for length in range(len(saved)):
        attack(saved[:length])
    for more in (b"\0", b"x" * 7, saved):
        attack(saved + more)


@pytest.mark.parametrize("times", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_damage_of_many_bytes(saved: bytes, attack: Attack, times: int) -> None:
    chance = random.Random(0)
    for _ in range(times):
        changed = bytearray(saved)
        kind = chance.randrange(4)
        begin = chance.randrange(len(saved))
        end = min(len(saved), begin + chance.randrange(1, 64))
        if kind == 0:
            changed[begin:end] = chance.randbytes(end - begin)
        elif kind == 1:
            changed[begin:end] = bytes(end - begin)
        elif kind == 2:
            del changed[begin:end]
        else:
            changed[begin:begin] = chance.randbytes(end - begin)
        if changed != saved:
            attack(bytes(changed))


def test_random_bytes(attack: Attack) -> None:
    chance = random.Random(1)
    for size in [*range(64), *(chance.randrange(64, 4096) for _ in range(60))]:
        attack(chance.randbytes(size))
        # The length of a header that fits, and no header.
        body = chance.randbytes(size)
        attack(size.to_bytes(8, "little") + body)
        attack((size + 1).to_bytes(8, "little") + b"{" + body)


@pytest.mark.parametrize(
    "length", [0, 1, 2, 10**8, 10**8 + 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, "size+1", "size"]
)
def test_lengths_of_the_header(saved: bytes, attack: Attack, length: Any) -> None:
    number = {"size+1": len(saved) + 1, "size": len(saved)}.get(length, length)
    attack(number.to_bytes(8, "little") + saved[8:])


JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 7, 35, 2**31, 2**62, 2**63, 2**64, 10**400, 0.0, 1.0, 1.5, -0.5,
    1e308, "", "x", "U8", "1", [], [[]], [0], [1], [-1], [5, 7], [7, 5], [35], [5, 7, 1],
    [5.0, 7.0], [True, 35], ["5", "7"], [None], [2**62, 2**62], [2**62, 4], [2**62] * 60,
    [0, 2**62, 2**62], [1] * 65, [1] * 100_000, [0, 0], [0, 2**63], [35, 0], [0, 1, 2], [4, 39], {},
    {"a": 1}, {"dtype": "float8_e5m2"}, {"dtype": "save"}, {"dtype": []}, {"dtype": "float32"},
]  # fmt: skip


def changes(parts: Any) -> Iterator[tuple[str, Any]]:
    """Every field of the header and of the description, with junk values in its place, and without
    it: with every value in the long run, else with some, which take turns."""
    turns = itertools.count()

    def junk_values() -> list[Any]:
        return some(JUNK[next(turns) % 5 :: 5], JUNK)

    for name, fields in parts.body.items():
        for field in (*fields, "more"):
            for junk in (*junk_values(), "missing"):
                changed = copy.deepcopy(parts)
                if junk == "missing":
                    changed.body[name].pop(field, None)
                else:
                    changed.body[name][field] = junk
                yield f"{name} {field} {str(junk)[:40]}", changed
        for junk in junk_values():
            changed = copy.deepcopy(parts)
            changed.body[name] = junk
            yield f"{name} {str(junk)[:40]}", changed
    described = parts.described
    places: list[tuple[str, ...]] = [(key,) for key in described]
    for name, entry in described["quantized"].items():
        places += [("quantized", name), *(("quantized", name, key) for key in entry)]
        places += [("quantized", name, "static", key) for key in entry["static"]]
    for place in places:
        for junk in (*junk_values(), "missing"):
            changed = copy.deepcopy(parts)
            at = changed.described
            for key in place[:-1]:
                at = at[key]
            at.pop(place[-1])
            if junk != "missing":
                at[place[-1]] = junk
            yield f"{place} {str(junk)[:40]}", changed


@pytest.mark.parametrize("every", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_an_adversary_who_mends_the_checksums(
    every: str,
    parts: Any,
    small: Any,
    contents: Any,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is accepted after all says what the file said before, or no more than other tools read
    in it too."""
    monkeypatch.setenv(VARIABLE, every)
    path, model = tmp_path / "attacked", small(1)
    (tmp_path / "as-is").write_bytes(parts.seal())
    meant, before = contents(checkpoint.load_file(tmp_path / "as-is")), contents(model)
    cases = accepted = 0
    for what, changed in changes(parts):
        cases += 1
        path.write_bytes(changed.seal())
        try:
            checkpoint.load_model(model, path)
        except OttavaError as error:
            refusal = str(error)
        else:
            refusal = ""
            accepted += 1
        if refusal:
            assert str(path) in refusal, what
            assert contents(model) == before, what
            continue
        assert contents(checkpoint.load_file(path)) == meant, what
        with safetensors.safe_open(path, "pt") as file:
            assert {*file.keys()} == {*changed.body}, what
        model = small(1)
    assert cases > some(400, 2000)
    # Fields that the format does not have, values in whose place the same stood, words that name
    # what made a tensor.
    assert 0 < accepted < cases / 5


def test_swapped_tensors(parts: Any, attack: Attack) -> None:
    names = list(parts.body)
    for a in names:
        for b in names:
            for fields in (
                ["data_offsets"],
                ["shape"],
                ["dtype"],
                ["dtype", "shape"],
                ["shape", "data_offsets"],
            ):
                changed = copy.deepcopy(parts)
                for field in fields:
                    changed.body[a][field], changed.body[b][field] = (
                        parts.body[b][field],
                        parts.body[a][field],
                    )
                if changed.body != parts.body:
                    attack(changed.seal())


def test_names(parts: Any, attack: Attack) -> None:
    for old in parts.body:
        for new in ("", "x", "__metadata", old + ".data", old.upper(), "\0", "../../x", "\ud800"):
            changed = copy.deepcopy(parts)
            changed.body = {
                new if name == old else name: fields for name, fields in parts.body.items()
            }
            attack(changed.seal())
        changed = copy.deepcopy(parts)
        del changed.body[old]
        attack(changed.seal())
    changed = copy.deepcopy(parts)
    changed.described["aliases"] = {"tied": "nothing"}
    assert "'nothing'" in attack(changed.seal())
    changed.described["aliases"] = {"first": "tied"}
    attack(changed.seal())


def test_text_that_is_no_plain_json(parts: Any, seal: Any, attack: Attack) -> None:
    text = json.dumps({"__metadata__": parts.metadata, **parts.body})
    name = '"layer.bias": '
    assert name in text
    for bad in (
        text.replace(name, name + "{}, " + name),  # a key twice
        text.replace('"dtype"', '"dtype": "BF16", "dtype"', 1),
        text[:-1] + ', "deep": ' + "[" * 200_000 + "]" * 200_000 + "}",
        text[:-1] + ', "deep": ' + '{"a":' * 200_000 + "1" + "}" * 200_000 + "}",
        text[:-1] + ', "deep": ' + "[" * 200_000,
        text[:-1] + ', "number": ' + "9" * 5000 + "}",
        text[:-1] + ', "number": NaN}',
        text + "x",
        text + text,
        "\ufeff" + text,
        text[:-1],
        "[" + text + "]",
    ):
        attack(seal(bad, parts.data))
    for encoding in ("utf-16", "utf-32", "utf-16-le"):
        raw = text.encode(encoding)
        attack(len(raw).to_bytes(8, "little") + raw + parts.data)
    deep = copy.deepcopy(parts)
    deep.described = 1
    deep.metadata["ottava"] = "1"
    for word in ("[" * 100_000, '{"a":' * 100_000, "", "nul", "1", '{"version": 1}', "\x00"):
        raw = json.dumps(
            {"__metadata__": {"ottava": word, "ottava.crc32": "00000000"}, **parts.body}
        )
        assert "damaged" in attack(seal(raw, parts.data))


@pytest.mark.parametrize(
    "reference",
    [
        "os:system", "builtins:eval", "builtins:exec", "subprocess:Popen", "torch:nn", "torch:load",
        "pickle:loads", "torch.nn.modules.linear:Linear", "ottava.tensors.storage:StorageSpec",
        "ottava.nn.linear:Linear", "antigravity:x", "this:s", ":", "", "x", "ottava",
        "ottava.tensors.float8:Float8Tensor.__new__", "\0:\0",
        "ottava.tensors.tensor:QuantizedTensor", "ottava.tensors.float8:Float8TensorStorage",
    ],
)  # fmt: skip
def test_classes(parts: Any, attack: Attack, reference: str) -> None:
    modules = set(sys.modules)
    for entry in parts.described["quantized"].values():
        entry["class"] = reference
    assert "'layer.weight'" in attack(parts.seal())
    assert not {"antigravity", "this"} & (set(sys.modules) - modules)


@pytest.mark.parametrize("bits", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_files_of_other_tools(bits: int, contents: Any, tmp_path: Path) -> None:
    """Without checksums: refused, or read as the library that has no part in this reads it."""
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.arange(5),
        "c": torch.tensor([True, False]),
        "d": torch.randn(2).half(),
    }
    raw, path = safetensors.torch.save(tensors, {"format": "pt"}), tmp_path / "other"
    agreed, messages = 0, set()
    for place in range(len(raw)):
        for bit in ((place * 5 + more) % 8 for more in range(bits)):
            changed = bytearray(raw)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                read = checkpoint.load_file(path)
            except OttavaError as error:
                messages.add(str(path) in str(error))
                continue
            with safetensors.safe_open(path, "pt") as file:
                other = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            assert contents(read) == contents(other)
            agreed += 1
    assert messages == {True}
    assert agreed > bits * 50


class Runs:
    """Pickled as a call of a function that leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickles_run_nothing(tmp_path: Path, attack: Attack) -> None:
    trace = tmp_path / "trace"
    kinds = [pickle.dumps(Runs(trace), protocol) for protocol in range(6)]
    for new in (True, False):
        with io.BytesIO() as file:
            torch.save({"layer.weight": Runs(trace)}, file, _use_new_zipfile_serialization=new)
            kinds.append(file.getvalue())
    for raw in kinds:
        attack(raw)
        attack(len(raw).to_bytes(8, "little") + raw)
        assert not trace.exists()
    # The test could fail.
    pickle.loads(kinds[0])
    assert trace.exists()


LIMITED = """
import resource, sys
import torch
from ottava import checkpoint
from ottava.errors import OttavaError
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + 200_000_000,) * 2)
refused = 0
for path in sys.argv[1:]:
    try:
        checkpoint.load_file(path)
    except OttavaError:
        refused += 1
try:
    torch.empty(300_000_000, dtype=torch.uint8)
except RuntimeError:
    print(refused)
"""


def test_memory_is_bounded_by_the_file(parts: Any, seal: Any, tmp_path: Path) -> None:
    """With room for 200 MB, of which a larger tensor is refused, every claim of more is an error of
    Ottava's."""
    files: list[bytes] = [
        n.to_bytes(8, "little") + b"{" + b" " * 1000
        for n in (10**8, 10**9, 2**40, 2**63, 2**64 - 1)
    ]
    for name, fields in parts.body.items():
        for shape in ([2**40], [2**62], [2**31, 2**31], [10**9], [0, 2**62, 2**62]):
            for offsets in (fields["data_offsets"], [0, 2**40], [0, 10**9]):
                changed = copy.deepcopy(parts)
                changed.body[name] = fields | {"shape": shape, "data_offsets": offsets}
                files.append(changed.seal())
    # A gigabyte that is said to be there, in a file with a hole: refused, for want of memory or for
    # its checksum.
    paths = []
    for number, raw in enumerate(files):
        paths.append(tmp_path / f"{number:03d}")
        paths[-1].write_bytes(raw)
    body = {"x": {"dtype": "U8", "shape": [10**9], "data_offsets": [0, 10**9]}}
    text = json.dumps({"__metadata__": {"ottava": '{"version": 1, "quantized": {}}'}, **body})
    paths.append(tmp_path / "hole")
    raw = seal(text, b"")
    paths[-1].write_bytes(raw)
    os.truncate(paths[-1], len(raw) + 10**9)
    done = forking.python(LIMITED, *paths)
    assert done.stdout.strip() == str(len(paths)), done.stderr[-2000:]


NO_IMPORT = """
import sys, ottava.checkpoint, ottava.errors
before = set(sys.modules)
for path in sys.argv[1:]:
    try:
        ottava.checkpoint.load_file(path)
    except ottava.errors.OttavaError:
        print("refused")
new = set(sys.modules) - before
print([name for name in new if name.startswith(("torch._dynamo", "torch.onnx"))])
"""


def test_a_dtype_by_name_imports_nothing(parts: Any, tmp_path: Path) -> None:
    """torch imports modules when it is asked for their names."""
    paths = []
    for module in ("_dynamo", "onnx"):
        changed = copy.deepcopy(parts)
        text = json.dumps(parts.described)
        forged = re.sub(r'"dtype": ?"[a-z0-9_]+"', f'"dtype": "{module}"', text)
        assert forged != text
        changed.described = json.loads(forged)
        paths.append(tmp_path / f"{module}.safetensors")
        paths[-1].write_bytes(changed.seal())
    done = forking.python(NO_IMPORT, *paths)
    assert done.stdout.split("\n")[:3] == ["refused", "refused", "[]"], (
        done.stdout + done.stderr[-2000:]
    )
