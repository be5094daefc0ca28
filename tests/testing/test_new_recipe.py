"""``ottava new-recipe``: what it writes, what it refuses, and that it writes all or nothing."""

from __future__ import annotations

import ast
import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ottava.cli.main import app
from ottava.errors import OptionError, UsageError
from ottava_testing.new_recipe.names import LONGEST, Names, checked_names
from ottava_testing.new_recipe.rendering import compatible_versions, render
from tests.published import published

FILES = render(Names("acme-rows"))
LONG = "a" + "-b" * 19 + "c"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def new_recipe(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["new-recipe", *arguments])
    return done.exit_code, done.output


def everything(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of the files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


# -- what is written --


def test_it_writes_every_file_and_says_what_is_next() -> None:
    code, output = new_recipe("acme-rows")
    assert code == 0, output
    assert os.listdir(".") == ["acme-rows"]
    written = everything(Path("acme-rows"))
    texts = {path: data.decode() for path, data in written.items() if data is not None}
    assert texts == FILES
    assert len(FILES) == 10
    for text in FILES.values():
        assert "$" not in text.replace("${{ matrix.python }}", "")
    for word in ("cd acme-rows", 'pip install -e ".[test]"', "--recipe acme-rows", "license"):
        assert word in output


def test_a_project_needs_versions_that_are_compatible() -> None:
    assert [compatible_versions(v) for v in ("0.1.0", "0.12.3", "1.0.0", "3.4.5rc1")] == [
        ">=0.1,<0.2",
        ">=0.12,<0.13",
        ">=1.0,<2",
        ">=3.4,<4",
    ]


def shown_in_the_readme(files: dict[str, str]) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", files["README.md"], re.M | re.S)


@pytest.mark.parametrize("name", ["x", "acme-rows", "a1_b2-c3", LONG])
def test_names_of_every_length_give_python_that_compiles(name: str) -> None:
    names = checked_names(name, Path("out"))
    files = render(names)
    shown = shown_in_the_readme(files)
    sources = [text for path, text in files.items() if path.endswith(".py")]
    assert (len(shown), len(sources)) == (3, 5)
    for text in (*sources, *shown):
        ast.parse(text)
        assert max(map(len, text.splitlines()), default=0) <= 100
    assert names.package.isidentifier()


def test_an_empty_folder_is_filled_and_stays_the_one_that_it_was() -> None:
    Path("acme").mkdir(mode=0o700)
    before = os.stat("acme")
    previous = os.umask(0o027)
    try:
        assert new_recipe("acme")[0] == 0
        assert new_recipe("acme-rows", "--out", "other name")[0] == 0
    finally:
        os.umask(previous)
    assert (os.stat("acme").st_ino, os.stat("acme").st_mode) == (before.st_ino, before.st_mode)
    assert (Path("acme") / ".github" / "workflows" / "tests.yml").is_file()
    # New files have the modes of other new files.
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in ("other name", "other name/README.md")]
    assert modes == [0o750, 0o640]


# -- names that are refused --

CHARACTERS = "lower-case letters, digits, - and _"
TAKEN = "installed already"
OWN, IN_THE_PACKAGE = "Ottava's own", "module or folder in the package"
REFUSED: list[tuple[type[Exception], str, tuple[str, ...]]] = [
    (OptionError, CHARACTERS, ("", "Acme", "1acme", "-acme", "_acme", "acme rows", "acme.rows")),
    (OptionError, CHARACTERS, ("acme/rows", "../acme", "acme\n", "äcme", "acme-", "acme_")),
    (OptionError, CHARACTERS, ("acme--rows", "acme-_rows")),
    (OptionError, f"at most {LONGEST}", ("a" * (LONGEST + 1),)),
    (OptionError, "keyword", ("class", "lambda")),
    (OptionError, "standard library", ("json",)),
    (OptionError, IN_THE_PACKAGE, ("tests", "conformance", "conftest")),
    (OptionError, OWN, ("ottava", "ottava-rows", "ottava_current")),
    (UsageError, TAKEN, ("test", "torch", "pytest")),
    (UsageError, "a recipe 'served-here' is installed already, of some-dist 1.0", ("served-here",)),
    (UsageError, "ottava-recipes-broken.one 1.0 is installed already", ("broken-one",)),
    (UsageError, TAKEN, ("spacious",)),
]
PLUGIN = """
from ottava import RecipeSpec, hookimpl

@hookimpl
def ottava_recipes():
    return [RecipeSpec(name="served-here", summary="s", factory="m:Thing")]
"""


def test_names_that_something_else_has_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two/spacious/inner"):
        (tmp_path / folder).mkdir(parents=True)
    with (
        published(tmp_path / "one", "some-dist", some_module=PLUGIN),
        published(tmp_path / "two", "ottava-recipes-broken.one", broken="raise ZeroDivisionError"),
    ):
        for error, message, names in REFUSED:
            for name in names:
                with pytest.raises(error, match=message):
                    checked_names(name, Path("out"))
        code, output = new_recipe("served-here")
        assert code == 2
        assert output.startswith("error: a recipe 'served-here' is installed already")
        assert "Remedy: choose" in output
    assert os.listdir(".") == []


def test_names_that_can_be_imported_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a" * LONGEST, "match"):
        assert checked_names(name, Path("out")).package == name
    # If Python searches the current folder, the empty target looks like a package.
    monkeypatch.syspath_prepend("")
    Path("acme").mkdir()
    assert new_recipe("acme")[0] == 0


# -- nothing is overwritten, and nothing left behind --


def _full(target: Path) -> None:
    target.mkdir()
    (target / ".hidden").write_text("mine")


def _link_to_empty(target: Path) -> None:
    target.with_name("elsewhere").mkdir()
    target.symlink_to("elsewhere")


THERE: dict[str, tuple[Any, str, str]] = {
    "a file": (lambda target: target.write_text("mine"), "acme-rows", "--out"),
    "a full folder": (_full, "acme-rows", "--out"),
    "a dangling link": (lambda target: target.symlink_to("nowhere"), "acme-rows", "--out"),
    "a link to an empty folder": (_link_to_empty, "acme-rows", "--out"),
    "no folder around it": (lambda target: None, "a/b", "make it first"),
    "a file around it": (lambda target: target.write_text("mine"), "acme-rows/new", "error: "),
}


@pytest.mark.parametrize("name", THERE)
def test_what_is_there_is_not_touched(name: str) -> None:
    make, out, word = THERE[name]
    make(Path("acme-rows"))
    before = everything(Path())
    code, output = new_recipe("acme-rows", "--out", out)
    assert code == 2
    assert word in output
    assert everything(Path()) == before


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(Path, "write_text"), (os, "rename")])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(
    existing: bool, owner: Any, name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existing:
        Path("acme-rows").mkdir()
    calls = [getattr(owner, name)] * 3

    def failing(*arguments: Any, **options: Any) -> Any:
        if not calls:
            raise error
        return calls.pop()(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)
    code, output = new_recipe("acme-rows")
    assert not calls
    assert everything(Path()) == ({"acme-rows": None} if existing else {})
    if isinstance(error, OSError):
        assert (code, "cannot be written: No space left" in output) == (2, True)


def test_what_comes_to_be_there_meanwhile_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_text

    def late(self: Path, *arguments: Any) -> int:
        Path("acme-rows").mkdir(exist_ok=True)
        Path("acme-rows/README.md").touch()
        return real(self, *arguments)

    monkeypatch.setattr(Path, "write_text", late)
    code, output = new_recipe("acme-rows")
    assert code == 2, output
    assert everything(Path()) == {"acme-rows": None, "acme-rows/README.md": b""}
