"""Recipe packages as pip would leave them, healthy and broken, and commands that see them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottava.cli.main import app
from ottava.recipes import registry

GOOD = (
    "import ottava.recipes.hookspecs as h\nfrom ottava.recipes.spec import FactorySpec, "
    "RecipeSpec\n"
)
# What a factory reference may lead to.
RECIPE = """
import ottava


class Thing(ottava.Recipe):
    def make_quantizer(self, role, *, amax_reduction_group=None): ...
"""


def hook(body: str, name: str = "ottava_recipes") -> str:
    """A plugin module whose hook has this body."""
    return f"{GOOD}@h.hookimpl\ndef {name}():\n    {body}\n"


def offers(*names: str, factory: str) -> str:
    """A plugin module that offers recipes."""
    specs = ", ".join(
        f"RecipeSpec(name={name!r}, summary='s', factory={factory!r})" for name in names
    )
    return hook(f"return [{specs}]")


def distribution(folder: Path, dist: str, entry_points: str, version: str = "1.2") -> None:
    """The dist-info of a package with these entry points."""
    info = folder / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def plugin(folder: Path, dist: str, module: str, source: str) -> None:
    """A distribution: a module and its dist-info with an entry point."""
    (folder / f"{module}.py").write_text(source)
    distribution(folder, dist, f"[ottava]\nmain = {module}\n")


@contextlib.contextmanager
def installed(folder: Path, **environment: str) -> Iterator[None]:
    """Inside, the packages in ``folder`` are installed; afterwards nothing of them is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OTTAVA_DISABLE_PLUGINS", raising=False)
        patch.delenv("OTTAVA_STRICT_PLUGINS", raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.syspath_prepend(folder)
        registry.reload()
        yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
    registry.reload()


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The ottava command with the packages in ``folder`` installed, in this process.

    An exception that the command lets through is raised.
    """
    with installed(folder, COLUMNS="200", **environment):
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
