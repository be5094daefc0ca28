"""Names of tensors, files, layers and plugins reach the terminal as text, whatever command prints
them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ottava
import ottava_bisect
from ottava.cli.main import app
from tests.published import published

#: Colour, title of the window, the CSI of 8 bits, bell, carriage return, backspace, end of line,
#: reversed text, markup.
NASTY = "n\x1b[31m\x1b]0;t\x07\x9b2J\r\x08\n\x7f\u202e[red]x[bold]"
SHOWN = r"n\x1b[31m\x1b]0;t\x07\x9b2J\r\x08\n\x7f\u202e[red]x[bold]"
PLUGIN = f"""
import ottava.recipes.hookspecs as h
from ottava.recipes.spec import RecipeSpec
raise ValueError({NASTY!r})
"""


class Net(torch.nn.Module):
    """A layer with such a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({NASTY: torch.nn.Linear(32, 32)})
        with torch.no_grad():
            self.layers[NASTY].weight[:, 5] = 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[NASTY](x)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with a checkpoint, a captured step and a broken plugin, all with such
    names."""
    folder = tmp_path_factory.mktemp("names")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save_file({f"{NASTY}.weight": torch.randn(32, 32), "b": torch.ones(1)}, "in")
        Path(NASTY).write_bytes(Path("in").read_bytes())
        net = ottava.convert(Net(), "current")
        x = torch.randn(32, 32)
        # An outlier that meets weights of zero: a search finds the layer.
        x[:, 5] = 2.0**26
        with ottava_bisect.capture(net, "step") as step:
            step.loss = net(x).square().sum()
            step.loss.backward()
        Path("module_of_names.py").write_text(f"def fails():\n    raise ValueError({NASTY!r})\n")
        with published(folder, "names-in-texts", names_plugin=PLUGIN):
            yield folder
    sys.modules.pop("module_of_names", None)


# What is run, and whether the whole name is in what is printed.
COMMANDS: dict[str, tuple[list[str], bool]] = {
    "analyze": (["analyze", "in", "--recipe", "current"], False),
    "analyze, a file": (["analyze", f"{NASTY}.gone"], True),
    "analyze, written": (["analyze", "in", "--recipe", "current", "--json", f"{NASTY}.json"], True),
    "analyze, a model": (["analyze", "in", "--model", "module_of_names:fails"], True),
    "bisect": (["bisect", "step", "--html", f"{NASTY}.html"], True),
    "check-recipe": (["check-recipe", NASTY], True),
    "demo": (["demo", "--recipe", NASTY], True),
    "doctor": (["doctor"], False),
    "export": (["export", "in", "out", "--recipe", "current", "--force"], True),
    "export, a file": (["export", NASTY, f"{NASTY}.out", "--recipe", "bf16", "--force"], True),
    "new-recipe": (["new-recipe", NASTY], True),
    "recipes": (["recipes"], False),
    "recipes --explain": (["recipes", "--explain", "current", "--checkpoint", "in"], False),
    "recipes --explain, a name": (["recipes", "--explain", NASTY], True),
    "no command": ([NASTY], False),
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", COMMANDS)
def test_control_characters_are_shown(command: str) -> None:
    """In tables, sentences and errors, at any width; markup is text, too."""
    arguments, whole = COMMANDS[command]
    for width in (60, 400):
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)})
        assert done.exception is None or isinstance(done.exception, SystemExit)
        lines = done.output.split("\n")
        assert {c for line in lines for c in line if not c.isprintable()} == set()
        assert "\\x1b" in done.output
        assert width == 60 or "[red]" in done.output
        assert not whole or SHOWN in done.output


@pytest.mark.usefixtures("files")
def test_json_has_the_names_without_control_characters() -> None:
    layer = ["recipes", "--explain", "current", "--layer", NASTY]
    for arguments in (["recipes"], layer, ["bisect", "step"]):
        done = CliRunner().invoke(app, [*arguments, "--json"])
        assert all(c.isprintable() or c == "\n" for c in done.stdout)
        printed: Any = json.loads(done.stdout)
        assert arguments is not layer or printed["layers"][0]["layer"] == NASTY
