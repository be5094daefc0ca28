"""What ``ottava new-recipe`` writes: built as a wheel, installed with core alone, used in every
way."""

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

sys.path.insert(0, str(Path(__file__).parent))

from template_environment import Environment, build_wheel, fresh_environment, install

ROOT = Path(__file__).parents[2]
NAME, PACKAGE, FORMAT = "acme-rows", "acme_rows", "ACME_ROWS_INT8"


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


def test_no_other_recipe_can_be_imported(environment: Environment, tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in {!r} if u.find_spec(n)])"
    names = sorted(
        path.name
        for path in ROOT.glob("packages/recipes-*/src/*")
        if (path / "__init__.py").exists()
    )
    assert len(names) >= 3
    assert environment.python(code.format(names), tmp_path).strip() == "[]"


def test_it_is_the_one_recipe_that_is_listed(environment: Environment, tmp_path: Path) -> None:
    done = environment.call("ottava", "recipes", "--json", cwd=tmp_path)
    (row,) = json.loads(done.stdout)["recipes"]
    assert (row["name"], row["distribution"], row["status"]) == (
        NAME,
        f"ottava-recipes-{NAME}",
        "ok",
    )
    assert "INT8" in row["capabilities"]


def test_listing_it_imports_no_torch(environment: Environment, tmp_path: Path) -> None:
    code = (
        "import ottava, sys; print([s.name for s in ottava.list_recipes()], 'torch' in sys.modules)"
    )
    done = environment.spawn("python", "-c", code, cwd=tmp_path)
    assert done.stdout.strip() == f"['{NAME}'] False", done.stderr


def test_doctor_is_content_with_it(environment: Environment, tmp_path: Path) -> None:
    done = environment.call("ottava", "doctor", "--json", cwd=tmp_path)
    found = {check["name"]: check["ok"] for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, found
    assert found[f"recipe {NAME}"]


EXPORTED = """
import json, torch
from ottava.checkpoint import load_file, save_file
from safetensors import safe_open
source, there = load_file("source.safetensors"), load_file("rows.safetensors")
back = load_file("back.safetensors")
from ottava import GridQuantizer, GridTensor
from acme_rows.recipe import LAYOUT
weight, bias = there["a.weight"], there["a.bias"]
assert type(weight) is GridTensor and type(bias) is torch.Tensor
own = GridQuantizer(LAYOUT)(source["a.weight"])
assert torch.equal(weight._rowwise_data, own._rowwise_data)
assert torch.equal(weight._rowwise_scale_inv, own._rowwise_scale_inv)
assert torch.equal(back["a.weight"], own.dequantize(torch.bfloat16))
assert back["a.weight"].dtype == torch.bfloat16
with safe_open("rows.safetensors", "pt") as file:
    codes = [file.get_tensor(name) for name in file.keys() if name.startswith("a.weight")]
codes = [t.view(torch.uint8) for t in codes if t.dtype == torch.int8]
assert any(torch.equal(t, own._rowwise_data) for t in codes)
print("ok")
"""


def test_files_are_converted_to_it_and_back(environment: Environment, tmp_path: Path) -> None:
    make = (
        "import torch; from ottava.checkpoint import save_file; torch.manual_seed(0);"
        "save_file({'a.weight': torch.randn(48, 40), 'a.bias': torch.randn(48)}, "
        "'source.safetensors')"
    )
    environment.python(make, tmp_path)
    for source, target, recipe in (("source", "rows", NAME), ("rows", "back", "bf16")):
        files = [f"{source}.safetensors", f"{target}.safetensors"]
        done = environment.call("ottava", "export", *files, "--recipe", recipe, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert environment.python(EXPORTED, tmp_path).strip() == "ok"


FAKE = """
import torch
from ottava.debug import fake_quantize
x = torch.randn(6, 10, requires_grad=True)
y = fake_quantize(x, "{format}")
y.sum().backward()
assert torch.equal(x.grad, torch.ones_like(x))
steps = (y / (x.abs().amax(-1, keepdim=True) / 127)).detach()
assert (steps - steps.round()).abs().max() < 1e-3 and not torch.equal(x, y)
print("ok")
"""


def test_its_format_serves_fake_quantization(environment: Environment, tmp_path: Path) -> None:
    assert environment.python(FAKE.replace("{format}", FORMAT), tmp_path).strip() == "ok"


def test_its_own_tests_pass_as_generated(environment: Environment, package: Path) -> None:
    done = environment.call(
        "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_{PACKAGE}.py", cwd=package
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d\d passed", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("chosen", ["not ottava_slow", pytest.param("", marks=pytest.mark.slow)])
def test_the_kit_passes_as_generated(chosen: str, environment: Environment, package: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", chosen, "tests/test_conformance.py"]
    done = environment.call("pytest", *options, cwd=package)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d\d+ passed", done.stdout, re.M), done.stdout


def test_the_command_passes_it(environment: Environment, tmp_path: Path) -> None:
    # A folder of the recipe's name is not the recipe.
    (tmp_path / NAME).mkdir()
    done = environment.call("ottava", "check-recipe", NAME, "--check", "roles", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_oracle_that_is_another_does_not_pass(
    environment: Environment, package: Path, tmp_path: Path
) -> None:
    """The generated tests compare with numbers of their own: a scheme that is a little off fails
    them."""
    source = (package / "src" / PACKAGE / "recipe.py").read_text()
    off = source.replace("(1, None))", '(1, None), rounding="floor")')
    assert off != source
    changed = with_recipe(off, package, tmp_path / "changed")
    options = ["-q", "-p", "no:cacheprovider", f"tests/test_{PACKAGE}.py"]
    done = environment.call("pytest", *options, cwd=package, path=changed)
    assert done.returncode == 1, done.stdout
    assert re.search(r"^FAILED .*oracle", done.stdout, re.M), done.stdout


# -- the classes that its README shows, in place of the layout --


def with_recipe(recipe: str, package: Path, folder: Path) -> Path:
    """A folder for the path with the package, but another ``recipe.py``."""
    changed = folder / PACKAGE
    changed.mkdir(parents=True)
    for file in (package / "src" / PACKAGE).iterdir():
        if file.is_file():
            (changed / file.name).write_text(file.read_text())
    (changed / "recipe.py").write_text(recipe)
    return folder


def in_the_readme(package: Path) -> list[str]:
    """How the recipe is used, and a whole ``recipe.py``."""
    return re.findall(r"^```python\n(.*?)^```", (package / "README.md").read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def classes(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path with the package whose recipe has a storage of its own."""
    return with_recipe(in_the_readme(package)[1], package, tmp_path_factory.mktemp("classes"))


def test_what_the_readme_says_first_runs(
    environment: Environment, package: Path, tmp_path: Path
) -> None:
    environment.python(in_the_readme(package)[0], tmp_path)


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


def test_the_readmes_classes_do_what_no_layout_does(
    environment: Environment, classes: Path, tmp_path: Path
) -> None:
    assert environment.python(OWN, tmp_path, path=classes).split() == ["acme_rows.recipe", "True"]


@pytest.mark.slow
def test_the_readmes_classes_pass_the_kit(
    environment: Environment, classes: Path, package: Path, tmp_path: Path
) -> None:
    test = (package / "tests" / "test_conformance.py").read_text()
    (tmp_path / "test_conformance.py").write_text(test)
    options = ["-q", "-p", "no:cacheprovider", "test_conformance.py"]
    done = environment.call("pytest", *options, cwd=tmp_path, path=classes)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d\d+ passed", done.stdout, re.M), done.stdout


# -- how much there is to write --

# Of the recipe alone, and of all that is in src.
LIMIT, LIMIT_OF_ALL = 29, 40


def code_lines(source: str) -> int:
    """Lines with code: not those that are blank, or have nothing but a comment or a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_lines_are_counted_right() -> None:
    source = '"""Doc\nstring."""\n\nimport a  # why\n# alone\n\n\n'
    source += 'def f(\n    x,\n):\n    """Doc."""\n    return """a\n\nb"""\n'
    assert code_lines(source) == 1 + 3 + 3


def test_a_recipe_for_rows_is_short(package: Path) -> None:
    counted = {
        path.name: code_lines(path.read_text()) for path in (package / "src" / PACKAGE).glob("*.py")
    }
    assert set(counted) == {"__init__.py", "plugin.py", "recipe.py"}
    assert min(counted.values()) > 0
    total = sum(counted.values())
    assert counted["recipe.py"] <= LIMIT, counted
    assert total <= LIMIT_OF_ALL, counted
    page = (ROOT / "docs" / "publish.md").read_text()
    assert f"**{total} lines**" in page, counted


def test_the_environment_of_these_tests_has_what_users_install(
    environment: Environment, tmp_path: Path
) -> None:
    """The package's requirements are met by what is there, by their names and versions."""
    code = (
        "from importlib.metadata import requires, version\nfrom packaging.requirements import "
        "Requirement\n"
        f"for text in requires('ottava-recipes-{NAME}'):\n"
        "    r = Requirement(text)\n    assert version(r.name) in r.specifier, text\n    "
        "print(r.name)"
    )
    assert environment.python(code, tmp_path).split() == ["ottava", "ottava-testing", "pytest"]


@pytest.mark.parametrize(
    "tool", [["ruff", "check", "--no-cache", "."], ["ruff", "format", "--no-cache", "--check", "."]]
)
@pytest.mark.parametrize("name", ["x", "acme-columns", "a" + "-b" * 19 + "c"])
def test_it_is_formatted(tool: list[str], name: str, bare: Environment, tmp_path: Path) -> None:
    assert bare.call("ottava", "new-recipe", name, cwd=tmp_path).returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", *tool], cwd=tmp_path / name, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def mypy(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Torch, which takes most of the time, is read once."""
    return ["python", "-m", "mypy", "--cache-dir", str(tmp_path_factory.mktemp("mypy"))]


@pytest.mark.slow
def test_its_types_are_right(environment: Environment, package: Path, mypy: list[str]) -> None:
    done = environment.spawn(*mypy, cwd=package)
    assert done.returncode == 0, done.stdout


def test_the_readmes_classes_are_formatted(classes: Path, package: Path) -> None:
    settings, source = package / "pyproject.toml", classes / PACKAGE / "recipe.py"
    for tool in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *tool, "--no-cache", "--config", settings, source]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_readmes_classes_have_right_types(
    environment: Environment, classes: Path, package: Path, mypy: list[str]
) -> None:
    settings, source = package / "pyproject.toml", classes / PACKAGE / "recipe.py"
    done = environment.spawn(*mypy, "--config-file", settings, source, cwd=classes)
    assert done.returncode == 0, done.stdout
