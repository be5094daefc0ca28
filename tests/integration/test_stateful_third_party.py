"""A recipe that keeps state, from outside the project, on core's public names alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottava.cli.main import app
from tests.published import published

SOURCE = Path(__file__).parent / "stateful_package"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> Iterator[None]:
    names = ("acme_average", "acme_average_recipe")
    modules = {name: (SOURCE / f"{name}.py").read_text() for name in names}
    with published(tmp_path, "acme-average", **modules):
        yield


@pytest.mark.parametrize("options", [["--fast"], pytest.param([], marks=pytest.mark.slow)])
def test_it_conforms(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["check-recipe", "acme-average", *options])
    assert done.exit_code == 0, done.output


def test_it_uses_public_names_alone() -> None:
    source = "".join(path.read_text() for path in SOURCE.glob("*.py"))
    assert re.findall(r"(?:import |\.)_(?!_)\w*", source) == []
