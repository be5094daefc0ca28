"""What ``ottava new-recipe`` writes: built as a wheel, installed with core alone, used in every
way; the page about it has its code, and can be followed.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from ottava_testing.new_recipe.names import Names
from ottava_testing.new_recipe.rendering import render
from tests.integration.template_environment import (
    Environment,
    build_wheel,
    clean_variables,
    fresh_environment,
    install,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "publish.md").read_text()
NAME, PACKAGE = "acme-rows", "acme_rows"
FILES = render(Names(NAME))
OTTAVA = "from ottava.cli.main import app; app()"
PYTEST = """
import pytest, sys
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("template")


@pytest.fixture(scope="module")
def bare(folder: Path) -> Environment:
    """An environment with core, the kit and their tools, and no recipe."""
    return Environment(fresh_environment(folder / "env"))


@pytest.fixture(scope="module")
def package(folder: Path, bare: Environment) -> Path:
    """The package, written by the command in an environment where no recipe is installed."""
    listed = bare.spawn("ottava", "recipes", "--json", cwd=folder)
    assert json.loads(listed.stdout) == {"recipes": [], "quantizer_factories": []}, listed.stderr
    done = bare.spawn("ottava", "new-recipe", NAME, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / NAME


@pytest.fixture(scope="module")
def environment(folder: Path, bare: Environment, package: Path) -> Environment:
    """The same environment with the wheel of the package."""
    install(build_wheel(package, folder / "dist"), bare.folder)
    return bare


@pytest.fixture(scope="module")
def classes(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path with the package whose recipe has a storage of its own."""
    return with_recipe(in_the_readme(package)[1], package, tmp_path_factory.mktemp("classes"))


def with_recipe(recipe: str, package: Path, folder: Path) -> Path:
    """A folder for the path with the package, but another ``recipe.py``."""
    (folder / PACKAGE).mkdir(parents=True)
    for file in (package / "src" / PACKAGE).glob("*.*"):
        (folder / PACKAGE / file.name).write_text(file.read_text())
    (folder / PACKAGE / "recipe.py").write_text(recipe)
    return folder


def in_the_readme(package: Path) -> list[str]:
    """How the recipe is used, and two whole ``recipe.py``."""
    return re.findall(r"^```python\n(.*?)^```", (package / "README.md").read_text(), re.M | re.S)


INSTALLED = f"""
import json
from importlib.metadata import requires, version
from packaging.requirements import Requirement
from typer.testing import CliRunner
from ottava.cli.main import app

def printed(*arguments):
    return json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)

(row,) = printed("recipes")["recipes"]
assert (row["name"], row["status"]) == ("{NAME}", "ok")
assert row["distribution"] == "ottava-recipes-{NAME}"
assert "INT8" in row["capabilities"]
checks = {{check["name"]: check["ok"] for check in printed("doctor")["checks"]}}
assert checks["recipe {NAME}"]
for requirement in map(Requirement, requires("ottava-recipes-{NAME}")):
    assert version(requirement.name) in requirement.specifier
    print(requirement.name)
"""


def test_the_environment_has_the_recipe_what_it_requires_and_no_other(
    environment: Environment, tmp_path: Path
) -> None:
    assert environment.printed(INSTALLED, cwd=tmp_path).split() == [
        "ottava",
        "ottava-testing",
        "pytest",
    ]
    modules = [path.parent.name for path in ROOT.glob("packages/recipes-*/src/*/__init__.py")]
    assert len(modules) >= 3
    code = f"import importlib.util as u; print([n for n in {modules} if u.find_spec(n)])"
    assert environment.printed(code, cwd=tmp_path).strip() == "[]"


def test_its_tests_pass_as_generated(
    environment: Environment, package: Path, tmp_path: Path
) -> None:
    """Of the kit, a few checks of layers."""
    chosen = ("-m", "not ottava_slow", "-k", "not conformance or linear")
    text = environment.printed(PYTEST, *chosen, "tests", cwd=package)
    assert re.search(r"^\d\d+ passed", text, re.M), text
    # A folder of the recipe's name is not the recipe.
    (tmp_path / NAME).mkdir()
    environment.printed(OTTAVA, "check-recipe", NAME, "--check", "roles", cwd=tmp_path)


@pytest.mark.slow
def test_the_whole_kit_passes(
    environment: Environment, package: Path, classes: Path, tmp_path: Path
) -> None:
    """With the layout, and with the README's classes in its place."""
    test = package / "tests" / "test_conformance.py"
    (tmp_path / test.name).write_text(test.read_text())
    for path in (None, classes):
        environment.printed(PYTEST, test.name, cwd=tmp_path, path=path)


def test_a_scheme_that_is_a_little_off_fails_its_oracle(
    environment: Environment, package: Path, tmp_path: Path
) -> None:
    source = (package / "src" / PACKAGE / "recipe.py").read_text()
    off = source.replace("(1, None))", '(1, None), rounding="floor")')
    assert off != source
    changed = with_recipe(off, package, tmp_path / "changed")
    test = f"tests/test_{PACKAGE}.py"
    done = environment.forks.python(PYTEST, "-k", "oracle", test, cwd=package, path=changed)
    assert done.returncode == 1, done.stdout
    assert re.search(r"^FAILED .*oracle", done.stdout, re.M), done.stdout


OWN = """
import torch, ottava
from acme_rows.recipe import RowQuantizer, RowTensor
x = torch.rand(16, 64) + 4.0
own, layout = RowQuantizer()(x), ottava.GridQuantizer(ottava.Layout(torch.int8, (1, None)))(x)
assert type(own) is RowTensor
errors = [(q.dequantize() - x).abs().mean().item() for q in (own, layout)]
ends = RowQuantizer()(torch.tensor([[4.0, 6.0, 0.0], [-1.0, torch.nan, 1.0]])).dequantize()
assert ends[0, 2] == 0 and ends.isnan().tolist() == [[False] * 3, [False, True, False]]
print(type(ottava.get_recipe("acme-rows")).__module__, errors[0] < errors[1])
"""


def test_what_the_readme_shows_runs(
    environment: Environment, package: Path, classes: Path, tmp_path: Path
) -> None:
    """How the recipe is used; its classes do what no layout does."""
    environment.printed(in_the_readme(package)[0], cwd=tmp_path)
    printed = environment.printed(OWN, cwd=tmp_path, path=classes)
    assert printed.split() == ["acme_rows.recipe", "True"]


# -- its source --


def code_lines(source: str) -> int:
    """Lines with code: not those that are blank, or have nothing but a comment or a docstring."""
    left_out = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] not in left_out:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_the_pages_have_the_templates_files_and_code() -> None:
    block = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
    sources = {path: text for path, text in FILES.items() if path.startswith("src")}
    for path in (f"src/{PACKAGE}/plugin.py", f"src/{PACKAGE}/recipe.py"):
        _, text = PAGE.split(f"\n`{path}`:\n\n")
        assert block.findall(text)[0] == FILES[path]
    (classes,) = block.findall((ROOT / "docs" / "classes.md").read_text())
    assert classes in block.findall(FILES["README.md"])
    assert sorted(re.findall(r"^\| `(.+?)` \|", PAGE, re.M)) == sorted(FILES)
    assert f"**{sum(map(code_lines, sources.values()))} lines**" in PAGE


def test_it_is_formatted(package: Path, classes: Path, tmp_path: Path) -> None:
    for name in ("x", "acme-columns", "a" + "-b" * 19 + "c"):
        for path, text in render(Names(name)).items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
    of_classes = ["--config", package / "pyproject.toml", classes / PACKAGE / "recipe.py"]
    for tool in (["check"], ["format", "--check"]):
        for arguments in ([tmp_path], of_classes):
            command = [sys.executable, "-m", "ruff", *tool, "--no-cache", *arguments]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_its_types_are_right(
    environment: Environment, package: Path, classes: Path, tmp_path: Path
) -> None:
    mypy = ["python", "-m", "mypy", "--cache-dir", str(tmp_path)]
    source = classes / PACKAGE / "recipe.py"
    of_classes = ["--config-file", package / "pyproject.toml", source]
    for arguments, cwd in (([], package), (of_classes, classes)):
        done = environment.spawn(*mypy, *arguments, cwd=cwd)
        assert done.returncode == 0, done.stdout


# -- the page on publishing it --

COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.splitlines()
]

# There is no index to fetch from. After the environment is made, this environment's libraries are
# linked into it, those with recipes left out; pip is to look nowhere else, and finds what the page
# asks for installed.
ENVIRONMENT = "python3 -m venv recipe-env"
LINKED = (
    f"{ENVIRONMENT}\n"
    f"PYTHONPATH={ROOT} {sys.executable} -m tests.integration.template_environment recipe-env"
)
# The build backend would be fetched into an environment of its own.
EDITABLE = 'pip install -e ".[test]"'
SUBSTITUTIONS = {ENVIRONMENT: LINKED, EDITABLE: 'pip install --no-build-isolation -e ".[test]"'}


def test_the_pages_commands_can_be_run_without_an_index_or_an_upload() -> None:
    assert [COMMANDS.count(line) for line in SUBSTITUTIONS] == [1, 1]
    assert not any("twine" in line for line in COMMANDS)
    assert "twine upload" in PAGE


@pytest.mark.slow
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    script = "set -eu\n" + "\n".join(
        f"echo '$ {line}'\n{SUBSTITUTIONS.get(line, line)}" for line in COMMANDS
    )
    variables = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=work,
        capture_output=True,
        text=True,
        env=clean_variables(**variables),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", done.stdout, re.M))
    assert list(ran) == COMMANDS
    assert "Successfully installed ottava-recipes-acme-rows-0.1.0" in ran[EDITABLE]
    assert re.findall(r"^│ (\S+) +│", ran["ottava recipes"], re.M) == ["acme-rows"]
    assert ran["ls dist"].split() == [
        "ottava_recipes_acme_rows-0.1.0-py3-none-any.whl",
        "ottava_recipes_acme_rows-0.1.0.tar.gz",
    ]
    assert sorted(path.name for path in work.iterdir()) == ["acme-rows", "recipe-env"]
    assert re.search(r"\d\d+ passed", ran["pytest"])
    assert "failed" not in ran["pytest"]
    assert "│ acme-rows " in ran["ottava demo --recipe acme-rows --size tiny --steps 30"]
