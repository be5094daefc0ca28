"""Configurations have the limits that recipe files have: what is beyond them is refused, and
soon."""

import os
import re

import pytest
from eight_layers import GOOD

from ottava.errors import OptionError
from ottava_custom.files.limits import MAX_BYTES, MAX_DEPTH, MAX_VALUES
from ottava_debug.located import read

# A few lines that stand for 10^12 values.
TENFOLD = [", ".join([f"*a{n - 1}"] * 10 if n else ["x"] * 10) for n in range(12)]
BOMB = "\n".join(f"k{n}: &a{n} [{values}]" for n, values in enumerate(TENFOLD))
MERGED = "\n".join(
    f"m{n}: &m{n} "
    f"{{{', '.join(f'{key}: *m{n - 1}' if n else f'{key}: 1' for key in 'abcdefghij')}}}"
    for n in range(9)
)
DEEP = "it: " + "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2)
INDENTED = "".join(f"{' ' * n}a:\n" for n in range(MAX_DEPTH + 3))

# The file, and what the error says.
REFUSED = {
    "aliases": (BOMB, rf"line 5: these are \d+ values, .* Expected: at most {MAX_VALUES}"),
    "aliases in mappings": (MERGED, rf"these are \d+ values.*at most {MAX_VALUES}"),
    "values": ("it: [" + "a, " * (MAX_VALUES + 1) + "]", r"line 1: these are \d+ values"),
    "a circle": (
        "it: &a [*a]",
        "line 1: an alias stands for what it is in. Expected: no such circle",
    ),
    "brackets": (
        DEEP,
        f"line 1: values are nested too deeply. Expected: at most {MAX_DEPTH} levels",
    ),
    "indents": (
        INDENTED,
        rf"line \d+: values are nested too deeply. Expected: at most {MAX_DEPTH} levels",
    ),
    "sequences": ("- " * 50_000, "values are nested too deeply"),
    "keys": ("? " * 50_000, "values are nested too deeply"),
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
        ("folder.yaml", "is a folder. Expected: a YAML file"),
        ("pipe.yaml", "is no regular file. Expected: a YAML file"),
        ("utf16.yaml", "line 1: the file is in UTF-16. Expected: UTF-8"),
        ("a\0b.yaml", "cannot be read: embedded null byte"),
    ):
        with pytest.raises(OptionError, match=re.escape(told)):
            read(str(tmp_path / name))


def test_what_is_within_the_limits_is_read(tmp_path):
    path = tmp_path / "debug.yaml"
    path.write_text(f"base: &base {{enabled: True}}\na: {{<<: *base, list: [{'1, ' * 40_000}]}}\n")
    assert len(read(path)["a"]["list"]) == 40_000
    assert read(path)["a"]["enabled"] is True
