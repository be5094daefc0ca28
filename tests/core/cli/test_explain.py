"""``ottava recipes --explain`` with recipes that core does not have, and the options of recipes as
texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import GOOD, plugin
from typer.testing import CliRunner

import ottava
from ottava import checkpoint
from ottava.cli import recipes
from ottava.cli.main import app
from ottava.cli.output import parse_options
from ottava.cli.recipes import DEMO_LAYERS, READERS
from ottava.errors import OptionError
from ottava.recipes import registry
from ottava.recipes.registry import PluginStatus
from ottava.recipes.role import Explanation, QuantizerRole

PLUGIN = (
    GOOD
    + """

@h.hookimpl
def ottava_recipes():
    return [
        RecipeSpec(name="plain", summary="s", factory="explain_impl:Plain"),
        RecipeSpec(
            name="ruled", summary="s", factory="explain_impl:Ruled", file_suffixes=(".rules",)
        ),
    ]
"""
)
IMPL = """
from enum import Enum

import torch

import ottava
from ottava import kernels
from ottava.errors import OptionError
from ottava.recipes.role import Explanation, RecipeRule
from ottava.tensors import Float8QuantizerBase


class Colour(Enum):
    RED = 1
    BLUE = 2


class Q(Float8QuantizerBase):
    def quantize_impl(self, tensor, dtype): ...


class Plain(ottava.Recipe):
    name = "plain"

    def __init__(self, colour=Colour.RED, sizes=(1, 2), text="a", number=1.0):
        self.colour, self.sizes, self.text, self.number = colour, sizes, text, number

    def make_quantizer(self, role, *, amax_reduction_group=None):
        return Q(torch.float8_e5m2 if role.is_gradient else torch.float8_e4m3fn)


class Ruled(Plain):
    RULES = (RecipeRule("*.up [red]", "line 3"), RecipeRule("nothing", "line 7"))

    def __init__(self, file):
        if "bad" in file:
            raise OptionError(f"{file}, line 3: bad")

    def explain(self, role):
        if role.name.endswith("up"):
            return Explanation(f"rows of {role.name}", "columns", self.RULES[0], "line 4")
        return Explanation("same", "same", place="line 1")

    def rules(self):
        return self.RULES
"""


@pytest.fixture(autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("packages")
    plugin(folder, "aaa-explained", "aaa_explained", PLUGIN)
    (folder / "explain_impl.py").write_text(IMPL)
    sys.path.insert(0, str(folder))
    registry.reload()
    yield
    sys.path.remove(str(folder))
    for name in ("aaa_explained", "explain_impl"):
        sys.modules.pop(name, None)
    registry.reload()


def ask(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["recipes", *map(str, arguments)], env={"COLUMNS": "120"})


def told(*arguments: object) -> dict[str, Any]:
    done = ask(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_layers_of_the_demo_by_default() -> None:
    found = told("--explain", "plain")
    assert found["recipe"] == "plain"
    assert found["unused"] == []
    rows = found["layers"]
    assert list(dict.fromkeys(row["layer"] for row in rows)) == list(DEMO_LAYERS)
    assert [row["role"] for row in rows] == ["input", "weight", "grad_output"] * len(DEMO_LAYERS)
    assert {row["rowwise"] for row in rows if row["role"] != "grad_output"} == {"plain E4M3"}
    assert {row["columnwise"] for row in rows if row["role"] == "grad_output"} == {"plain E5M2"}
    assert {(row["place"], row["rule"]) for row in rows} == {("", None)}


def test_a_recipe_tells_lines_and_rules() -> None:
    found = told("--explain", "model.rules", "--layer", "a.up", "--layer", "b", "--layer", "a.up")
    rows = {(row["layer"], row["role"]): row for row in found["layers"]}
    assert len(found["layers"]) == 6
    assert rows["a.up", "weight"] == {
        "layer": "a.up",
        "role": "weight",
        "rowwise": "rows of a.up",
        "columnwise": "columns",
        "place": "line 4",
        "rule": "*.up [red]",
    }
    assert (rows["b", "input"]["place"], rows["b", "input"]["rule"]) == ("line 1", None)
    assert found["unused"] == [{"place": "line 7", "rule": "nothing"}]
    unused = told("--explain", "model.rules", "--layer", "b")["unused"]
    assert [rule["place"] for rule in unused] == ["line 3", "line 7"]


def test_the_table() -> None:
    text = ask("--explain", "model.rules", "--layer", "a.up", "--layer", "b").output
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if "│" in line
    ]
    assert rows[0] == ["a.up", "input", "rows of a.up", "columns", "line 4"]
    assert [row[0] for row in rows] == ["a.up", "", "", "b", "", ""]
    assert rows[5] == ["", "grad_output", "same", "same", "line 1"]
    assert "unused: the rule in line 7, nothing, serves none of these layers" in text
    assert "[red]" in ask("--explain", "model.rules", "--layer", "b").output
    assert "│ -" in ask("--explain", "plain", "--layer", "b").output.replace("         ", " ")


def test_the_layers_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a package reads that core does not have."""
    (tmp_path / "read_by_tests.py").write_text(
        "import ottava\n\n\ndef read(path):\n    return ottava.checkpoint.load_file(path), {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "x.safetensors"
    checkpoint.save_file(
        {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2), "b.weight": torch.ones(2)}, file
    )
    entry = EntryPoint("x", "read_by_tests:read", READERS)
    monkeypatch.setattr(recipes, "discover", lambda group: [PluginStatus("aaa", "1", entry)])
    found = told("--explain", "plain", "--checkpoint", file, "--layer", "more")
    assert {row["layer"] for row in found["layers"]} == {"a", "more"}
    monkeypatch.setattr(recipes, "discover", lambda group: [])
    done = ask("--explain", "plain", "--checkpoint", file)
    assert done.exit_code == 2
    assert done.stderr.startswith(
        "error: --checkpoint is not installed. Expected: ottava-integrations. Remedy: pip "
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--layer", "a"],
            "error: --layer without --explain. Remedy: say which recipe: --explain NAME.",
        ),
        (
            ["--checkpoint", "a", "--layer", "b", "--json"],
            "error: --layer and --checkpoint without --explain.",
        ),
        (["--explain", "nonesuch"], "error: no installed package provides recipe 'nonesuch'"),
        (
            ["--explain", "model.other"],
            "error: the file 'model.other' is read by no installed recipe",
        ),
        (["--explain", "bad.rules", "--json"], "error: bad.rules, line 3: bad."),
        (
            ["--explain", "plain", "--layer", ""],
            "error: --layer ''. Expected: the qualified name of a layer.",
        ),
    ],
)
def test_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ask(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_what_a_factory_over_a_recipe_gives_is_described(recipe: Any, quantizer: Any) -> None:
    role = QuantizerRole("linear", "weight", "a")
    assert recipe.explain(role) == Explanation("sample E4M3", "sample E4M3")
    assert recipe.explain("grad_output").rowwise == "sample E5M2"
    assert recipe.rules() == ()
    recipe.set_quantizer_factory(lambda role: quantizer if role.tensor_type == "weight" else None)
    assert recipe.explain("weight").columnwise == "SampleQuantizer E4M3"
    assert recipe.explain("input").columnwise == "sample E4M3"
    recipe.set_quantizer_factory(lambda role: ottava.QuantizerRequest(ottava.get_recipe("plain")))
    assert recipe.explain("input").rowwise == "plain E4M3"


def test_options() -> None:
    made: Any = ottava.get_recipe("plain", colour="BLUE", sizes=[3, 4], text="1")
    assert isinstance(made.colour, Enum)
    assert (made.colour.value, made.sizes, made.text) == (2, (3, 4), "1")
    assert vars(ottava.get_recipe("plain", colour=made.colour, sizes=(3, 4))) == vars(made) | {
        "text": "a"
    }
    with pytest.raises(OptionError, match=r"colour is 'GREEN'. Expected: one of RED, BLUE"):
        ottava.get_recipe("plain", colour="GREEN")


def test_options_as_texts() -> None:
    given = {
        "a": "BLUE",
        "b": "[3, 4]",
        "c": "2.5",
        "d": "None",
        "e": "True",
        "f": "false",
        "g": "x=[",
        "h": '"1"',
    }
    taken = ["BLUE", [3, 4], 2.5, None, True, False, "x=[", "1"]
    assert list(parse_options([f"{key}={text}" for key, text in given.items()]).values()) == taken
    for refused in (["a"], ["a b=1"], ["a=1", "a=2"]):
        with pytest.raises(OptionError, match="key=value, each key once"):
            parse_options(refused)
