"""Configurations that are no text, too large or too deep are refused."""

import os
import re

import pytest
from eight_layers import GOOD

from ottava.errors import OptionError
from ottava_custom.files.source import MAX_BYTES, MAX_DEPTH
from ottava_debug.located import read

DEEP = "it: " + "[" * 50_000

# The file, and what the error says.
REFUSED = {
    "brackets": (DEEP, "values are nested too deeply"),
    "one level too many": (
        "it:\n  " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        f"line 2: values are nested too deeply.*at most {MAX_DEPTH} levels",
    ),
    "sequences": ("- " * 50_000, "values are nested too deeply"),
    "bytes": (GOOD + "#" * MAX_BYTES, f"larger than {MAX_BYTES} bytes.*fewer sections"),
    "digits": ("it: " + "9" * 5000, "not a value"),
    "a date that there is not": ("it: 2001-99-99", "not a value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_beyond_the_limits_is_refused(case, tmp_path):
    text, told = REFUSED[case]
    path = tmp_path / "debug.yaml"
    path.write_text(text)
    with pytest.raises(OptionError, match=told) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_no_file(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "utf16.yaml").write_bytes(GOOD.encode("utf-16"))
    for name, told in (
        ("folder.yaml", "is no regular file. Expected: a YAML file"),
        ("pipe.yaml", "is no regular file. Expected: a YAML file"),
        ("utf16.yaml", "line 1: byte 0xff is not UTF-8. Expected: UTF-8"),
    ):
        with pytest.raises(OptionError, match=re.escape(told)):
            read(str(tmp_path / name))


def test_what_is_within_the_limits_is_read(tmp_path):
    path = tmp_path / "debug.yaml"
    path.write_text(f"base: &base {{enabled: True}}\na: {{<<: *base, list: [{'1, ' * 1000}]}}\n")
    assert len(read(path)["a"]["list"]) == 1000
    assert read(path)["a"]["enabled"] is True
    path.write_text("it: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert list(read(path)) == ["it"]
