"""Recipe files that are no text, no files, or large and deep: refused, and soon."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from ottava.errors import OptionError, OttavaError

sys.path.insert(0, str(Path(__file__).parent))

from file_plugins import recipe_file_packages, write  # noqa: F401

from ottava_custom.files import FileFactory, load_factory
from ottava_custom.files.source import MAX_BYTES


@pytest.mark.parametrize("kind", ["yaml", "toml"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            "default".encode("utf-16"),
            r"line 1: the file is in UTF-16. Expected: UTF-8. Remedy: save the file as UTF-8",
        ),
        ("default".encode("utf-32"), r"line 1: the file is in UTF-32"),
        (b"# \xc3\xa9\n# a\r\n# \xff", r"line 3, column 3: byte 0xff is not UTF-8"),
        ("default: alpha # \u00e9".encode("latin-1"), r"line 1, column 18: byte 0xe9 is not UTF-8"),
        (b"default\x00", r"line 1, column 8"),
        (b"#" * (MAX_BYTES + 1), rf"is larger than {MAX_BYTES} bytes"),
    ],
)
def test_bytes_that_are_no_text(tmp_path: Path, kind: str, data: bytes, said: str) -> None:
    path = tmp_path / f"model.{kind}"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=said) as caught:
        load_factory(path)
    assert str(path) in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, said in (
        ("missing.yaml", "cannot be read: No such file or directory"),
        ("folder.yaml", "is a folder"),
        ("pipe.yaml", "is no regular file"),
        ("a\0b.yaml", "cannot be read: embedded null byte"),
        ("model.json", "has the suffix '.json'. Expected: one of .yaml, .yml, .toml"),
        ("model", "has the suffix ''"),
    ):
        with pytest.raises(OptionError, match=re.escape(said)) as caught:
            load_factory(tmp_path / name)
        assert name in str(caught.value)


BOMB = "\n".join(
    f"k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10 if n else ['x'] * 10)}]" for n in range(12)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "default: alpha\nlayers: [" + "a, " * 20_000 + "]",
        "default: " + "{a: " * 60_000,
        "- " * 100_000,
        "? " * 100_000,
        "default: " + "\n " * 100_000 + "x",
        "default: '" + "x" * 200_000 + "'",
        "layers:\n"
        + "".join(f"- {{match: 'blocks.{n}.*.up', all: identity}}\n" for n in range(700)),
    ],
    ids=["aliases", "list", "flow", "sequences", "keys", "lines", "text", "rules"],
)
def test_a_file_takes_no_minutes(tmp_path: Path, text: str) -> None:
    start = time.process_time()
    with pytest.raises(OttavaError) as caught:
        load_factory(write(tmp_path, text))
    assert time.process_time() - start < 10
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * 100_000 + " = 1",
        "a = [" + "1," * 100_000 + "]",
        "[a" + ".a" * 500 + "]\n" * 200,
        "a = '''" + "'" * 200_000,
    ],
)
def test_a_file_of_toml_takes_no_minutes(tmp_path: Path, text: str) -> None:
    start = time.process_time()
    with pytest.raises(OptionError) as caught:
        load_factory(write(tmp_path, text, "model.toml"))
    assert time.process_time() - start < 10
    assert len(str(caught.value)) < 1000


def calls(text: str, name: str) -> int:
    """How many functions reading a file calls."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        FileFactory(name, text)
    finally:
        sys.setprofile(None)
    return count


# Pattern, and what serves, in YAML and in TOML.
RULES = {
    "names": ("blocks.{}.up", "identity", "'identity'"),
    "wildcards": ("*.{}.up", "identity", "'identity'"),
    "wildcards in the middle": ("blocks.*{}*.up", "identity", "'identity'"),
    "hybrids": (
        "blocks.{}",
        "{rowwise: alpha, columnwise: identity}",
        "{rowwise = 'alpha', columnwise = 'identity'}",
    ),
}


@pytest.mark.parametrize("kind", ["yaml", "toml"])
@pytest.mark.parametrize("rules", RULES)
def test_reading_grows_as_the_file_does(kind: str, rules: str) -> None:
    """Four times as many rules take about four times as many calls, not sixteen times."""
    pattern, *served = RULES[rules]

    def text(count: int) -> str:
        patterns = [pattern.format(number) for number in range(10_000, 10_000 + count)]
        if kind == "yaml":
            return "default: alpha\nlayers:\n" + "".join(
                f"- {{match: '{p}', all: {served[0]}}}\n" for p in patterns
            )
        return "default = 'alpha'\n" + "".join(
            f"[[layers]]\nmatch = '{p}'\nall = {served[1]}\n" for p in patterns
        )

    calls(text(100), f"model.{kind}")  # what is done once
    assert calls(text(800), f"model.{kind}") < 5 * calls(text(200), f"model.{kind}")
