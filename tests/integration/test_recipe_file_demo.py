"""Recipe files: mixed ones train the demo as BF16 does, as recipes alone do; the page about them
shows what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ottava
from ottava.cli.main import app

ROOT = Path(__file__).parents[2]
EXAMPLES = [ROOT / "examples" / f"mixed.{suffix}" for suffix in ("yaml", "toml")]
PAGE = (ROOT / "docs" / "recipe-files.md").read_text()

# The one block of the tiny model in five formats; one recipe keeps state, in some roles of a layer
# only.
TINY = """\
default: delayed
layers:
  - match: "*.qkv"
    forward: {recipe: current, fp8_format: E4M3}
    backward: {recipe: current, fp8_format: E5M2}
  - match: "*.up"
    forward: {rowwise: mxfp8, columnwise: current}
    backward: current
  - match: "*.down"
    weight: {recipe: mxfp8, with_2d_quantization: true}
    input: current
  - match: head
    all: identity
"""


def demo(out: Path, *options: object) -> dict[str, Any]:
    """The runs of a demo by name."""
    command = ["demo", *map(str, options), "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return {run["name"]: run for run in json.loads((out / "results.json").read_text())["runs"]}


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, 20), *(pytest.param(seed, 300, marks=pytest.mark.slow) for seed in (0, 1))],
)
def test_a_mixed_file_trains_the_tiny_demo_as_bf16_does(
    seed: int, steps: int, tmp_path: Path, one_thread: None
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    runs = demo(tmp_path, "--size", "tiny", "--steps", steps, "--seed", seed, "--recipe", path)
    mixed, plain = runs[str(path)], runs["bf16"]
    # It has learnt, and not in BF16.
    assert plain["validation"] < plain["losses"][0] * (0.5 if steps == 300 else 0.9)
    assert mixed["losses"] != plain["losses"]
    assert abs(mixed["validation"] / plain["validation"] - 1) < 0.01


@pytest.mark.slow
def test_at_the_demos_defaults_recipes_and_examples_train_as_bf16_does(tmp_path: Path) -> None:
    """A run of the examples moves by half a percent when sums are only added in another order."""
    recipes = [spec.name for spec in ottava.list_recipes()]
    files = [str(path) for path in EXAMPLES]
    options = [part for recipe in (*recipes, *files) for part in ("--recipe", recipe)]
    differences = []
    for seed in (0, 1):
        runs = demo(tmp_path, "--seed", seed, *options)
        assert runs[files[0]]["losses"] == runs[files[1]]["losses"] != runs["bf16"]["losses"]
        ends = {
            name: run["validation"] / runs["bf16"]["validation"] - 1 for name, run in runs.items()
        }
        differences.append(ends[files[0]])
        assert [name for name in recipes if abs(ends[name]) > 0.01] == []
    assert abs(sum(differences)) / len(differences) < 0.01
    assert max(map(abs, differences)) < 0.02


def test_the_examples_say_the_same() -> None:
    yaml, toml = (ottava.get_recipe(path) for path in EXAMPLES)
    served = set()
    names = ("0.up", "3", "1.qkv", "2.proj", "1.up", "2.down")
    for layer in ("head", "x", *(f"blocks.{name}" for name in names)):
        for tensor_type in ("input", "weight", "output", "grad_output", "grad_input"):
            role = ottava.QuantizerRole("linear", tensor_type, layer)
            one, two = yaml.explain(role), toml.explain(role)
            assert (one.rowwise, one.columnwise) == (two.rowwise, two.columnwise)
            assert (one.rule and one.rule.text) == (two.rule and two.rule.text)
            served.add((one.rowwise, one.columnwise))
    assert {("identity", "identity"), ("mxfp8 E4M3", "current E4M3")} <= served
    assert ("current E5M2", "current E5M2") in served


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def test_the_page_has_the_examples_and_what_is_printed_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [blocks("yaml")[0], *blocks("toml")] == [path.read_text() for path in EXAMPLES]
    monkeypatch.chdir(ROOT)
    command, _, table = blocks("text")[0].partition("\n")
    assert command.startswith("$ ottava recipes --explain ")
    done = CliRunner().invoke(app, command.split()[2:], env={"COLUMNS": "100"})
    assert lines(done.output) == lines(table)


def test_the_page_has_the_errors_that_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    errors = list(zip(blocks("yaml")[1:], blocks("text")[1:], strict=True))
    assert errors
    for text, printed in errors:
        Path("model.yaml").write_text(text)
        done = CliRunner().invoke(app, ["recipes", "--explain", "model.yaml"])
        assert (done.exit_code, done.stderr) == (2, printed)
