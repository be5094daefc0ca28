"""Recipe files that are no files, no text, or too large are refused."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from ottava.errors import OptionError

sys.path.insert(0, str(Path(__file__).parent))

from file_plugins import recipe_file_packages  # noqa: F401

from ottava_custom.files import FileFactory, load_factory
from ottava_custom.files.source import MAX_BYTES


@pytest.mark.parametrize("kind", ["yaml", "toml"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            "default".encode("utf-16"),
            "line 1: byte 0xff is not UTF-8. Expected: UTF-8. Remedy: save the file as UTF-8",
        ),
        (b"# \xc3\xa9\n# a\r\n# \xff", "line 3: byte 0xff is not UTF-8"),
        ("default: alpha # \u00e9".encode("latin-1"), "line 1: byte 0xe9 is not UTF-8"),
        (b"default\x00", "model"),
        (b"#" * (MAX_BYTES + 1), f"is larger than {MAX_BYTES} bytes.*Remedy: use fewer patterns"),
    ],
)
def test_bytes_that_are_no_text(tmp_path: Path, kind: str, data: bytes, said: str) -> None:
    path = tmp_path / f"model.{kind}"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=said) as caught:
        load_factory(path)
    assert str(path) in str(caught.value)


def test_a_text_that_is_too_large() -> None:
    with pytest.raises(OptionError, match=f"a.yaml is larger than {MAX_BYTES} bytes"):
        FileFactory("a.yaml", "#" * (MAX_BYTES + 1))


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, said in (
        ("missing.yaml", "cannot be read: No such file or directory"),
        ("folder.yaml", "is no regular file"),
        ("pipe.yaml", "is no regular file"),
        ("model.json", "has the suffix '.json'. Expected: one of .yaml, .yml, .toml"),
        ("model", "has the suffix ''"),
    ):
        with pytest.raises(OptionError, match=re.escape(said)) as caught:
            load_factory(tmp_path / name)
        assert name in str(caught.value)


def test_a_rule_for_each_of_many_layers() -> None:
    rules = "".join(
        f"  - {{match: blocks.{n}.attention.query, all: identity}}\n" for n in range(4000)
    )
    factory = FileFactory("a.yaml", f"default: alpha\nlayers:\n{rules}")
    assert len(factory.rules()) == 4000
