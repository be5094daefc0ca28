"""A recipe package from outside the project: built as a wheel, installed in an environment of its
own, used."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from template_environment import Environment

import ottava

SOURCE = Path(__file__).parent / "third_party"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment that sees this one's libraries, with the wheel unpacked into it as an
    installer would."""
    folder = tmp_path_factory.mktemp("outside")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=SOURCE, check=True, capture_output=True)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    libraries = sysconfig.get_paths()["purelib"]
    (site / "base.pth").write_text(f"import site; site.addsitedir({libraries!r})\n")
    with zipfile.ZipFile(next((folder / "dist").glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return Environment(folder / "env" / "bin" / "python")


def test_it_is_not_installed_here() -> None:
    assert "acme-rows" not in [spec.name for spec in ottava.list_recipes()]


def test_it_is_listed(environment: Environment, tmp_path: Path) -> None:
    done = environment.call("ottava", "recipes", "--json", cwd=tmp_path)
    listed = json.loads(done.stdout)
    rows = {row["name"]: row for row in listed["recipes"]}
    assert rows["acme-rows"]["distribution"] == "acme-fp8"
    assert rows["acme-rows"]["version"] == "3.1"
    assert rows["current"]["status"] == "ok"
    assert {row["name"]: row["distribution"] for row in listed["quantizer_factories"]}[
        "acme-weights"
    ] == "acme-fp8"


FACTORY = """
import torch, ottava
recipe = ottava.get_recipe("current")
recipe.set_quantizer_factory(ottava.get_quantizer_factory("acme-weights"))
layer = ottava.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), recipe)
layer(torch.randn(4, 16)).sum().backward()
print([type(recipe.quantizer(role)).__name__ for role in ("weight", "input")])
"""


def test_its_quantizer_factory_serves_another_recipe(
    environment: Environment, tmp_path: Path
) -> None:
    assert (
        environment.python(FACTORY, tmp_path).strip()
        == "['RowQuantizer', 'Float8CurrentScalingQuantizer']"
    )


def test_doctor_is_content_with_it(environment: Environment, tmp_path: Path) -> None:
    done = environment.call("ottava", "doctor", "--json", cwd=tmp_path)
    found = {check["name"]: check["ok"] for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, found
    assert found["recipe acme-rows"]
    assert found["quantizer factory acme-weights"]


STRANGER = """
from ottava import RecipeSpec, hookimpl

@hookimpl
def ottava_recipes():
    return [RecipeSpec(name="current", summary="not the one", factory="builtins:object")]
"""


def test_a_name_of_two_packages_is_an_error_that_names_both(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "aaa_stranger.py").write_text(STRANGER)
    info = tmp_path / "aaa_stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa-stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ottava]\nmain = aaa_stranger\n")
    code = (
        "import ottava\n"
        "try: ottava.get_recipe('current')\n"
        "except ottava.errors.DuplicateRecipeError as error: print(error)"
    )
    said = environment.python(code, tmp_path, path=tmp_path)
    assert "aaa-stranger 1.0" in said
    assert "ottava-recipes-current" in said


def test_it_trains_the_demo_model(environment: Environment, tmp_path: Path) -> None:
    options = [
        "--recipe",
        "acme-rows",
        "--steps",
        "8",
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    done = environment.call("ottava", "demo", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    base, acme = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert acme["name"] == "acme-rows"
    assert acme["losses"] != base["losses"]
    assert acme["losses"][-1] < acme["losses"][0]
    assert abs(acme["validation"] - base["validation"]) < 0.1 * base["validation"]
