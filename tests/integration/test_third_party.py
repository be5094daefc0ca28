"""A recipe package from outside the project: built as a wheel, installed in an environment of its own, used."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import ottava

SOURCE = Path(__file__).parent / "third_party"
COMMAND = "from ottava.cli.main import app; app()"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that sees this one's libraries, with the wheel unpacked into it as an installer would."""
    folder = tmp_path_factory.mktemp("outside")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=SOURCE, check=True, capture_output=True)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    libraries = sysconfig.get_paths()["purelib"]
    (site / "base.pth").write_text(f"import site; site.addsitedir({libraries!r})\n")
    with zipfile.ZipFile(next((folder / "dist").glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return folder / "env" / "bin" / "python"


def test_it_is_not_installed_here() -> None:
    assert "acme-rows" not in [spec.name for spec in ottava.list_recipes()]


def test_it_is_listed(environment: Path) -> None:
    done = subprocess.run([environment, "-c", COMMAND, "recipes", "--json"], capture_output=True, text=True, check=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["acme-rows"]["distribution"] == "acme-fp8"
    assert rows["acme-rows"]["version"] == "3.1"
    assert rows["current"]["status"] == "ok"


def test_it_trains_the_demo_model(environment: Path, tmp_path: Path) -> None:
    options = ["--recipe", "acme-rows", "--steps", "30", "--size", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run([environment, "-c", COMMAND, "demo", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    base, acme = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert acme["name"] == "acme-rows"
    assert acme["losses"] != base["losses"]
    assert acme["losses"][-1] < 0.8 * acme["losses"][0]
    assert abs(acme["validation"] - base["validation"]) < 0.1 * base["validation"]
