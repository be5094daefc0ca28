"""What goes by a recipe's name works for layouts that core has never seen: debugging, files,
commands, buffers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import strange_layouts
import torch
from typer.testing import CliRunner

import ottava
from ottava import checkpoint
from ottava.cli.main import app
from ottava.debug import fake_quantize
from ottava.distributed import post_all_gather_processing, replace_raw_data
from ottava.errors import OptionError
from tests.published import published

RECIPES = list(strange_layouts.SPECS)
NAMES = [recipe.name for recipe in RECIPES]
PLUGIN = """
import strange_layouts
from ottava import hookimpl

@hookimpl
def ottava_recipes():
    return list(strange_layouts.SPECS.values())
"""


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The recipes, as a package has them."""
    with published(tmp_path_factory.mktemp("package"), "strange-plugin", strange_plugin=PLUGIN):
        yield


def run(*arguments: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def model(recipe: str, *, primary: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe, enabled=primary):
        return torch.nn.Sequential(
            *(ottava.nn.Linear(*sizes, recipe=recipe) for sizes in ((72, 40), (40, 72)))
        )


def train(net: Any) -> None:
    net(torch.randn(32, 72, generator=torch.Generator().manual_seed(5))).square().mean().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


def by_hand(recipe: Any, x: torch.Tensor) -> torch.Tensor:
    """Quantized along rows by the definition of the layout, and back, in float32."""
    layout = recipe.layout
    high, wide = (side or size for side, size in zip(layout.block, x.shape, strict=True))
    largest, values = (127.0 if layout.element is torch.int8 else 57344.0), torch.empty_like(x)
    for top in range(0, x.shape[0], high):
        for left in range(0, x.shape[1], wide):
            block = x[top : top + high, left : left + wide]
            scale = torch.div(torch.tensor(largest), block.abs().max())
            if layout.rounding == "floor":
                scale = torch.exp2(torch.floor(torch.log2(scale)))
            scaled = (block * scale).clamp(-largest, largest)
            rounded = (
                scaled.round()
                if layout.element is torch.int8
                else scaled.to(layout.element).float()
            )
            values[top : top + high, left : left + wide] = rounded * (1 / scale)
    return values


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_fake_quantization(recipe: Any) -> None:
    x = torch.randn(20, 100) * torch.exp(2 * torch.randn(20, 100))
    x.requires_grad_()
    y = fake_quantize(x, recipe.name)
    assert torch.equal(y, by_hand(recipe, x.detach()))
    y.backward(torch.full_like(y, 3.0))
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.detach().to(dtype)
        assert torch.equal(
            fake_quantize(narrow, recipe.name), by_hand(recipe, narrow.float()).to(dtype)
        )


def test_an_unknown_format_names_theirs() -> None:
    with pytest.raises(OptionError, match="e5m2-columns, int8-blocks"):
        fake_quantize(torch.ones(2, 2), "int8-rows")


@pytest.mark.parametrize("name", NAMES)
def test_dequantize(name: str) -> None:
    """Of a bare storage, of a tensor, of columns alone: the values are those of the data and
    scales, in any dtype."""
    quantizer = ottava.get_recipe(name).quantizer("weight").copy()
    x = torch.randn(20, 100)
    whole = quantizer(x)
    quantizer.internal = True
    for usages in ((True, False), (True, True)):
        storage = quantizer.with_usage(*usages)(x)
        assert torch.equal(storage.dequantize(torch.float32), whole.dequantize())
        assert torch.equal(storage.dequantize(torch.float16), whole.dequantize().half())
    columns = quantizer.with_usage(False, True)(x).dequantize(torch.float32)
    assert torch.equal(
        columns, quantizer.with_usage(True, False)(x.t().contiguous()).dequantize(torch.float32).t()
    )


def test_they_are_listed() -> None:
    listed = {row["name"]: row for row in json.loads(run("recipes", "--json"))["recipes"]}
    for name in NAMES:
        assert (listed[name]["distribution"], listed[name]["status"]) == ("strange-plugin", "ok")
        assert name in run("recipes")


@pytest.mark.parametrize("name", NAMES)
def test_explain(name: str, tmp_path: Path) -> None:
    """Of a layer that is named, and of those of a file of such weights."""
    checkpoint.save_model(model(name), tmp_path / "file")
    asked = ["--layer", "up"], ["--checkpoint", tmp_path / "file"]
    found = [
        json.loads(run("recipes", "--explain", name, *more, "--json"))["layers"] for more in asked
    ]
    assert [row["layer"] for rows in found for row in rows[::3]] == ["up", "0", "1"]
    for rows in found:
        assert [row["role"] for row in rows[:3]] == ["input", "weight", "grad_output"]
        assert {row[usage] for row in rows for usage in ("rowwise", "columnwise")} == {name}


@pytest.mark.parametrize("name", NAMES)
def test_check_recipe(name: str) -> None:
    """By its name; test_strange_layouts.py has all checks."""
    chosen = ("fake-quantization", "products")
    text = run("check-recipe", name, *(part for check in chosen for part in ("--check", check)))
    assert f"{name}: conforms ({len(chosen)} passed)" in text


def test_doctor_is_content() -> None:
    checks = {check["name"]: check["ok"] for check in json.loads(run("doctor", "--json"))["checks"]}
    assert all(checks[f"recipe {name}"] for name in NAMES)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_files(recipe: Any, tmp_path: Path) -> None:
    """Plain safetensors; loaded into another model they are the same bytes, and training goes on
    the same."""
    name = recipe.name
    net, other = model(name), model(name, seed=1)
    train(net)
    checkpoint.save_model(net, tmp_path / "file.safetensors")
    stored = safetensors.torch.load_file(tmp_path / "file.safetensors")
    assert {t.dtype for key, t in stored.items() if "bias" not in key} == {
        recipe.layout.element,
        torch.float32,
    }
    assert checkpoint.load_model(other, tmp_path / "file.safetensors") == ([], [])
    for _ in range(2):
        for mine, theirs in zip(other, net, strict=True):
            for a, b in zip(mine.weight.inner_list(), theirs.weight.inner_list(), strict=True):
                assert torch.equal(a, b)
        for each in (net, other):
            train(each)


@pytest.mark.parametrize("name", NAMES)
def test_sharded_checkpoints(name: str, tmp_path: Path) -> None:
    net, other = model(name), model(name, seed=1)
    checkpoint.save_sharded(net.state_dict(), tmp_path / "saved")
    checkpoint.load_sharded(other.state_dict(), tmp_path / "saved")
    for mine, theirs in zip(other, net, strict=True):
        assert torch.equal(mine.bias, theirs.bias)
        for a, b in zip(mine.weight.inner_list(), theirs.weight.inner_list(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("source", [*NAMES, "fp32"])
@pytest.mark.parametrize("target", [*NAMES, "fp32"])
def test_export(source: str, target: str, tmp_path: Path) -> None:
    if source == target == "fp32":
        return
    net = model(target if source == "fp32" else source, primary=source != "fp32")
    checkpoint.save_model(net, tmp_path / "in")
    run("export", tmp_path / "in", tmp_path / "out", "--recipe", target, "--columnwise")
    values = [layer.weight.detach() for layer in net]
    values = [v.dequantize(torch.float32) if source != "fp32" else v for v in values]
    if target == "fp32":
        plain = safetensors.torch.load_file(tmp_path / "out")
        assert all(
            torch.equal(plain[f"{number}.weight"], value) for number, value in enumerate(values)
        )
        return
    other = model(target, seed=1)
    assert checkpoint.load_model(other, tmp_path / "out") == ([], [])
    quantizer = ottava.get_recipe(target).quantizer("weight")
    for layer, mine, value in zip(net, other, values, strict=True):
        expected = layer.weight if source == target else quantizer(value)
        for a, b in zip(mine.weight.inner_list(), expected.inner_list(), strict=True):
            assert torch.equal(a, b)
    train(other)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_in_a_buffer_of_the_callers(name: str) -> None:
    nets = [model(name), model(name)]
    train(nets[0])
    for net in nets[1:]:
        weights = [layer.weight for layer in net]
        names = [[inner.attribute for inner in weight.raw_inner()] for weight in weights]
        sizes = [weight.numel() for weight, own in zip(weights, names, strict=True) for _ in own]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8)
        buffers = list(flat.split(sizes))
        taken = iter(buffers)
        for weight, own in zip(weights, names, strict=True):
            replace_raw_data(weight, [next(taken) for _ in own])
        train(net)
        for layer, twin in zip(net, nets[0], strict=True):
            for a, b in zip(layer.weight.inner_list(), twin.weight.inner_list(), strict=True):
                assert torch.equal(a, b)
        held = [
            getattr(weight, attribute)
            for weight, own in zip(weights, names, strict=True)
            for attribute in own
        ]
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(held, buffers, strict=True))
        # As a gather of the bytes leaves them: what is derived is made again.
        before = [weight.dequantize() for weight in weights]
        post_all_gather_processing(weights)
        assert all(
            torch.equal(weight.dequantize(), value)
            for weight, value in zip(weights, before, strict=True)
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_in_high_precision(name: str) -> None:
    """A high-precision model's loads strictly, quantized or not."""
    plain = [
        torch.nn.Sequential(torch.nn.Linear(72, 40), torch.nn.Linear(40, 72)) for _ in range(2)
    ]
    nets = ottava.convert(plain[1], name), model(name)
    assert name in str(ottava.conversion_report(nets[0]))
    quantizer: Any = ottava.get_recipe(name).quantizer("weight")
    for primary, net in enumerate(nets):
        net.load_state_dict(plain[0].state_dict())
        for layer, source in zip(net, plain[0], strict=True):
            expected = source.weight.detach()
            assert torch.equal(
                layer.weight.detach(), quantizer(expected).dequantize() if primary else expected
            )
