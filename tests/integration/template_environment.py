"""Fresh environments with core, its tools and no recipe, for packages that ``ottava new-recipe``
wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from tests.core.forking import Forks


def _top_level(found: Distribution) -> set[str]:
    """The names in ``site-packages`` that belong to a distribution."""
    return {file.parts[0] for file in found.files or () if file.parts[0] != ".."}


def link_libraries(site: Path) -> None:
    """Link this environment's libraries into another's ``site-packages``, except those that offer
    recipes. An installer would fetch them from an index.
    """
    for libraries in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}:
        left_out = {"__pycache__"}
        for found in distributions(path=[libraries]):
            offers = any(entry.group == "ottava" for entry in found.entry_points)
            # An environment has a pip of its own.
            if offers or found.metadata["Name"] == "pip":
                left_out |= _top_level(found)
        for entry in Path(libraries).iterdir():
            if entry.name not in left_out and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)


def site_packages(environment: Path) -> Path:
    """The folder with the libraries of an environment."""
    return next((environment / "lib").glob("python*/site-packages"))


def write_commands(environment: Path) -> None:
    """The commands of linked distributions that the tests call, as an installer writes them."""
    python = environment / "bin" / "python"
    for name in ("ottava", "pytest"):
        (entry,) = distribution(name).entry_points.select(group="console_scripts", name=name)
        script = environment / "bin" / name
        code = f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
        script.write_text(f"#!{python}\n{code}")
        script.chmod(0o755)


def fresh_environment(folder: Path) -> Path:
    """A new environment with everything of this one but recipes; the path of its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    link_libraries(site_packages(folder))
    write_commands(folder)
    return folder / "bin" / "python"


def build_wheel(package: Path, folder: Path) -> Path:
    """The wheel of a package, built by its build backend."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=package, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def install(wheel: Path, environment: Path) -> None:
    """Unpack a wheel without compiled parts, as an installer does."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages(environment))


def clean_variables(**added: str) -> dict[str, str]:
    """The variables of this process without those that would let it reach into the other."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_ADDOPTS")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and "OTTAVA_" not in name
    }
    return kept | {"COLUMNS": "200"} | added


class Environment:
    """An environment, and a process in it that has imported torch.

    Args:
        interpreter: its Python.
    """

    def __init__(self, interpreter: Path) -> None:
        self.folder = interpreter.parents[1]
        self.forks = Forks(interpreter, clean_variables())

    def spawn(
        self, command: str, *arguments: str | Path, cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of ``bin``."""
        return subprocess.run(
            [self.folder / "bin" / command, *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            env=clean_variables(),
        )

    def printed(
        self, code: str, *arguments: str | Path, cwd: Path, path: Path | None = None
    ) -> str:
        """What code prints in a fork, which ends without an error; ``path`` is in front of where
        modules are looked for."""
        done = self.forks.python(code, *arguments, cwd=cwd, path=path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


if __name__ == "__main__":
    # For an environment that somebody else made.
    made = Path(sys.argv[1]).resolve()
    link_libraries(site_packages(made))
    write_commands(made)
