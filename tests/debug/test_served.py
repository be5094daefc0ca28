"""A trainer's layers and a server's, side by side."""

import json
import math
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ottava
from ottava.cli.main import app
from ottava.errors import CheckpointError, UsageError
from ottava_debug import compare_served
from ottava_debug.served.output import sentences, write_json
from ottava_integrations import ServedRecipe, export_model
from tests.integrations.files import Net


def model() -> torch.nn.Module:
    return Net().bfloat16()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(9, 128, generator=generator).bfloat16() for _ in range(2)]


def test_training_what_is_served_differs_in_nothing(tmp_path: Path) -> None:
    trainer = ottava.convert(model(), ServedRecipe("fp8"), exclude="lm_head")
    export_model(trainer, tmp_path / "out", "fp8")
    comparison = compare_served(trainer, tmp_path / "out", batches())
    assert trainer.training
    assert [layer.name for layer in comparison.layers] == ["up", "down", "lm_head"]
    for layer in comparison.layers:
        assert layer.between == layer.accumulated == math.inf
    assert comparison.first is comparison.worst is None
    # Both sides lose the same against high precision.
    assert 20 < comparison.layers[0].trained == comparison.layers[0].served < 40


def test_the_first_and_the_worst_layer_are_named(tmp_path: Path) -> None:
    trainer = ottava.convert(model(), ServedRecipe("fp8"), exclude="lm_head")
    other = model()
    with torch.no_grad():
        other.down.weight[0] *= 4
    export_model(other, tmp_path / "out", "fp8")
    comparison = compare_served(trainer, tmp_path / "out", batches())
    up, down, head = comparison.layers
    assert up.between == math.inf > 30 > down.between
    assert comparison.first is comparison.worst is down
    # The head computes the same, of another input.
    assert head.between == math.inf > head.accumulated
    assert comparison.to_json()["layers"][0]["between"] == "inf"


def test_the_product_in_high_precision_is_the_reference(tmp_path: Path) -> None:
    trainer = model()
    export_model(trainer, tmp_path / "out", "naive-quantized")
    up = compare_served(trainer, tmp_path / "out", batches()[:1]).layers[0]
    x = batches()[0].double()
    exact = x @ trainer.up.weight.detach().double().T + trainer.up.bias.detach().double()
    output = trainer.up(batches()[0]).detach().double()
    expected = 10 * math.log10(float(exact.square().sum() / (exact - output).square().sum()))
    assert up.trained == pytest.approx(expected, rel=1e-9)
    assert up.served < up.trained


def test_underflow_is_that_of_the_operand_that_loses_more(tmp_path: Path) -> None:
    layers = OrderedDict(first=torch.nn.Linear(128, 128), second=torch.nn.Linear(128, 128))
    trainer = torch.nn.Sequential(layers)
    with torch.no_grad():
        for layer, columns in ((trainer.first, 3), (trainer.second, 1)):
            layer.weight.fill_(1)
            layer.weight[:, :columns] = 1e-6
            layer.bias.fill_(1)
    export_model(trainer, tmp_path / "out", "fp8")
    x = torch.ones(4, 128)
    x[:, :2] = 1e-6
    # 3 of the 128 columns of the first weight, 2 of those of the first input, 1 of the second.
    shares = [300 / 128, 100 / 128]
    comparison = compare_served(trainer, tmp_path / "out", [x])
    assert [layer.served_underflow for layer in comparison.layers] == shares
    assert [layer.trained_underflow for layer in comparison.layers] == [0, 0]
    trainer = ottava.convert(trainer, ServedRecipe("fp8"))
    comparison = compare_served(trainer, tmp_path / "out", [x])
    assert [layer.trained_underflow for layer in comparison.layers] == shares
    trainer.first.weight.data[:, :3] = 1
    first = compare_served(trainer, tmp_path / "out", [x]).layers[0]
    # The input of the trainer's layer loses most now; the served weight still lacks 3 columns.
    assert (first.trained_underflow, first.served_underflow) == (200 / 128, 300 / 128)


class Experts(torch.nn.Module):
    """A router that sends all rows to the first expert unless ``up`` is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(128, 128)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(input=x)
        # What is left of the sum is the error of rounding.
        chosen = (y - torch.nn.functional.linear(x, self.up.weight)).sum(1) > 1e-3
        out = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            rows = chosen == bool(number)
            if rows.any():
                out[rows] = expert(y[rows])
        return out


def test_a_router_may_choose_other_experts_in_the_server(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = Experts()
    torch.nn.init.zeros_(trainer.up.bias)
    export_model(trainer, tmp_path / "out", "fp8")
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    comparison = compare_served(trainer, tmp_path / "out", [x])
    up, expert = comparison.layers
    assert (up.name, expert.name) == ("up", "experts.0")
    assert 20 < up.accumulated < 40
    assert math.isnan(expert.accumulated)
    assert 20 < expert.between < 40
    assert comparison.to_json()["layers"][1]["accumulated"] == "nan"
    # With a single row the server calls this expert or it does not.
    rows = [compare_served(trainer, tmp_path / "out", [row]).layers[1] for row in x.split(1)]
    assert {math.isnan(layer.accumulated) for layer in rows} == {True, False}


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    export_model(model(), tmp_path / "out", "fp8")
    broken = torch.full((1, 128), math.inf).bfloat16()
    comparison = compare_served(model(), tmp_path / "out", [broken])
    write_json(comparison, tmp_path / "a.json")
    layers = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)["layers"]
    assert [layer["between"] for layer in layers] == ["-inf"] * 3
    assert "where one of them is not finite" in " ".join(sentences(comparison, 3))


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ottava_integrations", None)
        with pytest.raises(UsageError, match="pip install ottava-integrations"):
            compare_served(model(), tmp_path, batches())
    with pytest.raises(CheckpointError):
        compare_served(model(), tmp_path, batches())
    export_model(model(), tmp_path / "out", "fp8")
    with pytest.raises(UsageError, match="no batch"):
        compare_served(model(), tmp_path / "out", [])


def test_the_command(tmp_path: Path) -> None:
    export_model(model(), tmp_path / "out", "fp8")
    arguments = ["--model", f"{__name__}:model", "--data", f"{__name__}:batches"]
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    command = ["analyze", "--served", str(tmp_path / "out"), "--recipe", "mxfp8"]
    result = CliRunner().invoke(app, [*command, *arguments, *files])
    assert result.exit_code == 0, result.output
    assert "They part first in up" in result.output
    layers = json.loads((tmp_path / "a.json").read_text())["layers"]
    assert [layer["trainer"] for layer in layers] == ["mxfp8", "mxfp8", "high precision"]
    assert "<td>down</td>" in (tmp_path / "a.html").read_text()
    # Its own reports are replaced; other files are not, unless it is told to.
    assert CliRunner().invoke(app, [*command, *arguments, *files]).exit_code == 0
    (tmp_path / "a.json").write_text("{}")
    assert CliRunner().invoke(app, [*command, *arguments, *files]).exit_code == 2
    again = CliRunner().invoke(app, [*command, *arguments, *files, "--force"])
    assert again.exit_code == 0, again.output
