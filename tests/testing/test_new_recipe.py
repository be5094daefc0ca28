"""``ottava new-recipe``: what it writes, what it refuses, and that it writes all or nothing."""

from __future__ import annotations

import ast
import errno
import importlib
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import HOOK, plugin, run
from typer.testing import CliRunner

import ottava
from ottava.cli.main import app
from ottava.errors import OptionError, UsageError
from ottava_testing import check_recipe
from ottava_testing.new_recipe import command
from ottava_testing.new_recipe.names import LONGEST, Names, checked_names
from ottava_testing.new_recipe.rendering import TEMPLATE, compatible_versions, render


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
    written = {
        path: text for path, text in everything(Path("acme-rows")).items() if text is not None
    }
    assert sorted(written) == sorted(
        [
            ".github/workflows/tests.yml",
            ".gitignore",
            "README.md",
            "pyproject.toml",
            "src/acme_rows/__init__.py",
            "src/acme_rows/plugin.py",
            "src/acme_rows/py.typed",
            "src/acme_rows/recipe.py",
            "tests/test_acme_rows.py",
            "tests/test_conformance.py",
        ]
    )
    assert os.listdir(".") == ["acme-rows"]
    words = (
        "cd acme-rows",
        'pip install -e ".[test]"',
        "pytest",
        "--recipe acme-rows",
        "license",
        "Your scheme",
    )
    for word in (*words, "README.md"):
        assert word in output
    for path, text in written.items():
        assert b"$" not in (text or b"").replace(b"${{ matrix.python }}", b""), path


def test_the_project_file_has_the_names_and_the_versions() -> None:
    assert new_recipe("acme-rows")[0] == 0
    project = tomllib.loads(Path("acme-rows/pyproject.toml").read_text())["project"]
    assert project["name"] == "ottava-recipes-acme-rows"
    assert project["entry-points"] == {"ottava": {"acme_rows": "acme_rows.plugin"}}
    bounds = compatible_versions(ottava.__version__)
    assert project["dependencies"] == [f"ottava{bounds}"]
    assert project["optional-dependencies"]["test"] == [f"ottava-testing{bounds}", "pytest"]
    assert "license" not in project


@pytest.mark.parametrize(
    ("version", "bounds"),
    [
        ("0.1.0", ">=0.1,<0.2"),
        ("0.12.3", ">=0.12,<0.13"),
        ("1.0.0", ">=1.0,<2"),
        ("3.4.5rc1", ">=3.4,<4"),
    ],
)
def test_versions_that_go_together(version: str, bounds: str) -> None:
    assert compatible_versions(version) == bounds


def test_the_places_to_change_are_marked() -> None:
    files = render(Names("acme-rows"))
    assert files["src/acme_rows/recipe.py"].count("# Your scheme:") == 2
    assert files["src/acme_rows/plugin.py"].count("# Your scheme:") == 1


def test_the_storage_with_two_directions_passes_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = render(Names("acme-rows"))["README.md"]
    Path("two_way_rows.py").write_text(re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)[2])
    monkeypatch.syspath_prepend(os.getcwd())
    two_way = importlib.import_module("two_way_rows")
    spec = ottava.RecipeSpec(
        name="acme-rows",
        factory="two_way_rows:RowRecipe",
        summary="as the README has it",
        relative_error=0.02,
        quantized_weights=False,
    )
    report = check_recipe(two_way.RowRecipe(), spec=spec, skip_slow=True)
    assert report.ok, str(report)
    made = two_way.TwoWayQuantizer()(torch.rand(6, 8))
    made.update_usage(rowwise_usage=False)
    assert (made._data, made.shape) == (None, (6, 8))


@pytest.mark.parametrize("name", ["x", "acme-rows", "a1_b2-c3", "a" + "-b" * 19 + "c"])
def test_names_of_every_length_give_python_that_compiles(name: str) -> None:
    names = Names(name)
    files = render(names)
    shown = re.findall(r"^```python\n(.*?)^```", files["README.md"], re.M | re.S)
    assert len(shown) == 3
    sources = {path: text for path, text in files.items() if path.endswith(".py")} | dict(
        enumerate(shown)
    )
    for path, text in sources.items():
        ast.parse(text)
        assert [line for line in text.splitlines() if len(line) > 100] == [], path
    assert names.package.isidentifier()


def test_a_folder_of_choice(tmp_path: Path) -> None:
    assert new_recipe("acme-rows", "--out", str(tmp_path / "other name"))[0] == 0
    assert (tmp_path / "other name" / "src" / "acme_rows" / "plugin.py").is_file()
    assert os.listdir(".") == []


def test_an_empty_folder_is_filled_and_stays_the_one_that_it_was() -> None:
    Path("acme").mkdir(mode=0o700)
    before = os.stat("acme")
    assert new_recipe("acme")[0] == 0
    after = os.stat("acme")
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert (Path("acme") / ".github" / "workflows" / "tests.yml").is_file()
    Path("here").mkdir()
    os.chdir("here")
    assert new_recipe("acme-here", "--out", ".")[0] == 0
    assert Path("pyproject.toml").is_file()
    assert len(os.listdir("..")) == 2


def test_modes_are_those_of_other_new_files() -> None:
    previous = os.umask(0o027)
    try:
        assert new_recipe("acme-rows")[0] == 0
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat("acme-rows").st_mode) == 0o750
    assert stat.S_IMODE(os.stat("acme-rows/README.md").st_mode) == 0o640


def test_it_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from ottava_testing.new_recipe.command import new_recipe; "
        "new_recipe('acme-rows', None);"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- names that are refused --


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "Acme",
            "1acme",
            "-acme",
            "_acme",
            "acme rows",
            "acme.rows",
            "acme/rows",
            "../acme",
            "acme\n",
            "äcme",
        ),
        *("acme-", "acme_", "acme--rows", "acme-_rows"),
    ],
)
def test_a_name_with_other_characters_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=r"lower-case letters, digits, - and _.*Remedy: choose"):
        checked_names(name, Path("out"))


@pytest.mark.parametrize(
    ("name", "error", "word"),
    [
        ("a" * (LONGEST + 1), OptionError, f"at most {LONGEST}"),
        ("class", OptionError, "keyword"),
        ("lambda", OptionError, "keyword"),
        ("json", OptionError, "standard library"),
        ("test", UsageError, "installed already"),
        ("tests", OptionError, "module or folder in the package"),
        ("conformance", OptionError, "module or folder in the package"),
        ("torch", UsageError, "installed already"),
        ("pytest", UsageError, "installed already"),
        ("ottava", OptionError, "Ottava's own"),
        ("ottava-rows", OptionError, "Ottava's own"),
        ("ottava_current", OptionError, "Ottava's own"),
    ],
)
def test_a_name_that_something_else_has_is_refused(
    name: str, error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        checked_names(name, Path("out"))
    code, output = new_recipe(name)
    assert code == 2
    assert output.startswith("error: ")
    assert os.listdir(".") == []


def test_the_longest_name_is_taken() -> None:
    assert checked_names("a" * LONGEST, Path("out")).package == "a" * LONGEST


def test_soft_keywords_can_be_imported() -> None:
    assert checked_names("match", Path("out")).package == "match"


def test_installed_recipes_and_their_packages_keep_their_names(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    source = "import ottava.recipes.hookspecs as h\nfrom ottava.recipes.spec import RecipeSpec\n"
    plugin(
        installed, "some-dist", "some_module", source + HOOK.format(name="served-here", module="m")
    )
    for dist in ("twice-a", "twice-b"):
        plugin(
            installed,
            dist,
            dist.replace("-", "_"),
            source + HOOK.format(name="contested", module="m"),
        )
    plugin(installed, "ottava-recipes-broken.one", "broken_module", "raise ZeroDivisionError")
    cases = {
        "served-here": "a recipe 'served-here' is installed already, of some-dist 1.2",
        "contested": "a recipe 'contested' is installed already",
        "broken-one": "ottava-recipes-broken.one 1.2 is installed already",
    }
    for name, said in cases.items():
        done = run(installed, "new-recipe", name)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Remedy: choose" in done.stderr
    assert os.listdir(".") == []
    assert run(installed, "new-recipe", "another").returncode == 0


def test_the_module_of_a_package_without_code_is_one_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libraries" / "spacious" / "inner").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "libraries"))
    with pytest.raises(UsageError, match="installed already"):
        checked_names("spacious", Path("out"))


def test_the_empty_target_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("")
    Path("acme").mkdir()
    assert new_recipe("acme")[0] == 0


# -- nothing is overwritten, and nothing left behind --


def _file(target: Path) -> None:
    target.write_text("mine")


def _full(target: Path) -> None:
    target.mkdir()
    (target / ".hidden").write_text("mine")


def _dangling(target: Path) -> None:
    target.symlink_to("nowhere")


def _link_to_empty(target: Path) -> None:
    target.with_name("elsewhere").mkdir()
    target.symlink_to("elsewhere")


@pytest.mark.parametrize("there", [_file, _full, _dangling, _link_to_empty])
def test_what_is_there_is_not_touched(there: Any) -> None:
    there(Path("acme-rows"))
    before = everything(Path())
    code, output = new_recipe("acme-rows")
    assert code == 2
    assert "acme-rows" in output
    assert "--out" in output
    assert everything(Path()) == before


def test_a_place_that_is_not_there_is_not_made() -> None:
    code, output = new_recipe("acme-rows", "--out", "a/b")
    assert code == 2
    assert "make it first" in output
    assert os.listdir(".") == []


def test_a_parent_that_is_a_file() -> None:
    Path("file").write_text("mine")
    code, output = new_recipe("acme-rows", "--out", "file/new")
    assert code == 2, output
    assert output.startswith("error: ")
    assert os.listdir(".") == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written() -> None:
    Path("closed").mkdir(mode=0o500)
    code, output = new_recipe("acme-rows", "--out", "closed/new")
    assert code == 2
    assert "cannot be written: Permission denied" in output


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("step", ["write", "rename"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()]
)
def test_a_failure_half_way_leaves_nothing(
    existing: bool, step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path("acme-rows")
    if existing:
        target.mkdir()
    calls = 0
    own, name = (Path, "write_text") if step == "write" else (os, "rename")
    real: Any = getattr(own, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (4 if step == "write" else 3):
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(own, name, failing)
    names = Names("acme-rows")
    with pytest.raises(type(error)):
        command.write_package(render(names), target)
    assert calls == (4 if step == "write" else 3)
    assert everything(Path()) == ({"acme-rows": None} if existing else {})
    if isinstance(error, OSError):
        calls = 0
        code, output = new_recipe("acme-rows")
        assert (code, "No space left" in output) == (2, True)


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


def test_the_templates_name_no_one_recipe() -> None:
    for path in TEMPLATE.rglob("*.tmpl"):
        assert not re.search(r"acme", path.read_text()), path
