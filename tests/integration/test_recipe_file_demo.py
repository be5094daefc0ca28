"""Recipe files: mixed ones train the demo as BF16 does, and the page about them shows what is
printed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import forking

import ottava
from ottava.cli.main import app

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "recipe-files.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)

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


def demo(out: Path, *options: object, **environment: str) -> dict[str, Any]:
    """The runs of a demo by name."""
    program = "from ottava.cli.main import app; app()"
    done = forking.python(program, "demo", *map(str, options), "--out", out, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return {run["name"]: run for run in json.loads((out / "results.json").read_text())["runs"]}


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, 20), *(pytest.param(seed, 300, marks=pytest.mark.slow) for seed in (0, 1))],
)
def test_a_mixed_file_trains_the_tiny_demo_as_bf16_does(
    seed: int, steps: int, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    size = ("--size", "tiny", "--steps", steps, "--seed", seed, "--device", "cpu")
    runs = demo(tmp_path, *size, "--recipe", path, OMP_NUM_THREADS="1")
    mixed, plain = runs[str(path)], runs["bf16"]
    # It has learnt, and not in BF16.
    assert plain["validation"] < plain["losses"][0] * (0.5 if steps == 300 else 0.9)
    assert mixed["losses"] != plain["losses"]
    assert abs(mixed["validation"] / plain["validation"] - 1) < 0.01


@pytest.mark.slow
def test_the_example_trains_the_demo_as_bf16_does(tmp_path: Path) -> None:
    """On average: one run of 150 steps moves by half a percent when sums are only added in another
    order."""
    files = [str(EXAMPLES / f"mixed.{suffix}") for suffix in ("yaml", "toml")]
    differences = []
    for seed in (0, 1):
        runs = demo(
            tmp_path, "--seed", seed, *(part for file in files for part in ("--recipe", file))
        )
        assert runs[files[0]]["losses"] == runs[files[1]]["losses"] != runs["bf16"]["losses"]
        differences.append(runs[files[0]]["validation"] / runs["bf16"]["validation"] - 1)
    assert abs(sum(differences)) / len(differences) < 0.01
    assert max(map(abs, differences)) < 0.02


def test_the_examples_say_the_same() -> None:
    both = [ottava.get_recipe(str(EXAMPLES / f"mixed.{suffix}")) for suffix in ("yaml", "toml")]
    texts = set()
    for layer in (
        "blocks.0.up",
        "blocks.3",
        "head",
        "blocks.1.qkv",
        "blocks.2.proj",
        "blocks.1.up",
        "blocks.2.down",
        "x",
    ):
        for tensor_type in ("input", "weight", "output", "grad_output", "grad_input"):
            role = ottava.QuantizerRole("linear", tensor_type, layer)
            one, two = (recipe.explain(role) for recipe in both)
            assert (one.rowwise, one.columnwise) == (two.rowwise, two.columnwise)
            assert (one.rule and one.rule.text) == (two.rule and two.rule.text)
            texts.add((one.rowwise, one.columnwise))
    assert {
        ("identity", "identity"),
        ("mxfp8 E4M3", "current E4M3"),
        ("current E5M2", "current E5M2"),
    } <= texts


def test_a_mixed_layer_quantizes_as_the_file_says(tmp_path: Path) -> None:
    """The product of the forward pass is that of the rowwise quantizers, the gradients those of the
    columnwise ones."""
    path = tmp_path / "model.yaml"
    path.write_text(
        "default: {rowwise: mxfp8, columnwise: current}\nlayers: [{match: '*', backward: identity}]"
    )
    torch.manual_seed(0)
    layer = ottava.convert(torch.nn.Linear(64, 48, bias=False), str(path))
    x = torch.randn(32, 64, requires_grad=True)
    y = layer(x)
    gradient = torch.randn_like(y)
    y.backward(gradient)

    def values(name: str, tensor: torch.Tensor, tensor_type: str) -> torch.Tensor:
        return ottava.get_recipe(name).quantizer(tensor_type)(tensor.detach()).dequantize()

    weight: Any = layer.weight
    forward = values("mxfp8", x, "input") @ values("mxfp8", weight, "weight").t()
    torch.testing.assert_close(y, forward, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        x.grad, gradient @ values("current", weight, "weight"), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        weight.grad, gradient.t() @ values("current", x, "input"), rtol=1e-5, atol=1e-5
    )


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(PAGE) if name == language]


def test_the_page_has_the_examples() -> None:
    assert blocks("yaml")[0] == (EXAMPLES / "mixed.yaml").read_text()
    assert blocks("toml") == [(EXAMPLES / "mixed.toml").read_text()]


def test_the_page_has_the_table_that_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, _, table = blocks("text")[0].partition("\n")
    assert command.startswith("$ ottava recipes --explain ")
    done = CliRunner().invoke(app, command.split()[2:], env={"COLUMNS": "100"})
    assert [line.rstrip() for line in done.output.splitlines()] == [
        line.rstrip() for line in table.splitlines()
    ]


CASES = list(zip(blocks("yaml")[1:], blocks("text")[1:], strict=True))


@pytest.mark.parametrize(("text", "printed"), CASES)
def test_the_page_has_the_errors_that_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, printed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(text)
    done = CliRunner().invoke(app, ["recipes", "--explain", "model.yaml"])
    assert (done.exit_code, done.stderr) == (2, printed)


def test_a_wrong_file_is_told_by_the_demo(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("default: current\nlayers: 3\n")
    done = CliRunner().invoke(app, ["demo", "--recipe", str(path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {path}, line 2, column 9: layers is a number, 3.")
    assert not (tmp_path / "out").exists()
