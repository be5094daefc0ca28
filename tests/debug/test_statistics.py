"""Statistics are what float64 arithmetic gives, and change nothing."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
import ottava_debug
from ottava.errors import DTypeError, OptionError
from tests.debug.by_hand import (
    ROLES,
    FullDisk,
    Writer,
    block_range,
    exponents,
    inputs,
    layer_of,
    losses,
    passes,
    quantized,
    statistics,
)
from tests.debug.yaml_files import section

Initialize = Callable[..., Path]
VALUES = list(statistics(torch.ones(2)))


def measured(
    stats: Any, *batches: torch.Tensor, tensor: str = "activation", recipe: str = "current"
) -> dict[str, Any]:
    """The statistics of one tensor of a layer without bias in a step of some batches."""
    layer = layer_of(recipe, bias=False)
    with ottava_debug.statistics(layer, stats, tensors=tensor) as run:
        for x in batches:
            layer(x)
        run.step()
    return {each.stat: each.value for each in run.found}


# -- the numbers --


def of_the_format(x: torch.Tensor) -> dict[str, float]:
    """The losses of an input under current scaling, and the extremes of its scales."""
    q = quantized("current", "fprop", "activation", x)
    scales = q.grid_operand(columnwise=False)[1]
    extremes = {"scale_inv_min": scales.min(), "scale_inv_max": scales.max()}
    return losses(x, q.dequantize(torch.float32)) | {s: float(v) for s, v in extremes.items()}


@pytest.mark.parametrize(
    ("name", "recipe", "own"),
    [
        ("mxfp8", "mxfp8", "rowwise"),
        ("fp8_block_scaling", "blockwise", "rowwise"),
        # Gradients have another format.
        ("current", "current", "rowwise"),
        # A recipe with state has statistics where it runs.
        ("fp8_delayed_scaling", "delayed", "delayed"),
    ],
)
def test_the_name_of_a_recipe_chooses_its_quantizer(name: str, recipe: str, own: str) -> None:
    stats = ["sqnr", "mse", "underflows%", "scale_inv_max", "sqnr_columnwise"]
    x, dy = inputs()

    def latest(recipe: str, prefix: str) -> dict[tuple[str, str], float]:
        layer = layer_of(recipe)
        with ottava_debug.statistics(layer, [prefix + stat for stat in stats]) as run:
            for _ in range(2):
                passes(layer, x, dy)
                run.step()
        return {(key[1], key[2].removeprefix(prefix)): v for key, v in run.latest().items()}

    expected = latest(recipe, "")
    assert len(expected) == 3 * len(stats)
    assert latest(own, f"{name}_") == expected


def test_percentages_by_their_definitions() -> None:
    # Half of the values are zeros, a quarter is 1, and a quarter is below every number of E4M3.
    x = torch.zeros(32, 32)
    x.view(-1)[::2] = 1.0
    x.view(-1)[::4] = 2.0**-30
    expected = {"underflows%": 25.0, "underflows_of_nonzero%": 50.0, "overflows%": 0.0}
    assert measured(list(expected), x) == expected
    # The scale of the second step of delayed scaling comes from the first.
    layer = layer_of("delayed")
    x = torch.ones(32, 32)
    layer(x)
    x[:16], x[16:24] = 4.0, math.inf
    with ottava_debug.statistics(layer, ["overflows%", "saturation%"], tensors="activation") as run:
        layer(x)
        run.step()
    assert [each.value for each in run.found] == [50.0, 100 * 16 / 24]


@pytest.mark.parametrize("size", [7, 1000])
def test_ranges_of_blocks_of_operands_are_those_of_both_directions(size: int) -> None:
    x, dy = inputs(rows=40)
    for values in (x, dy):
        values *= torch.exp2(torch.randint(-30, 30, values.shape).float())
        values[torch.rand(values.shape) < 0.3] = 0
        values[:, :16] = 0
        values[3, 20], values[4, 20] = math.inf, math.nan
    layer, name = layer_of("current"), "max_blockwise_dynamic_range"
    stats = [{name: {"block_size": size, "dims": dims}} for dims in (1, 2)]
    tensors = ["activation", "gradient", "weight", "output"]
    with ottava_debug.statistics(layer, stats, tensors=tensors) as run:
        results = passes(layer, x, dy)
        run.step()
    results |= {"activation": x, "gradient": dy, "weight": layer.weight.detach()}
    for dims, rows in ((1, 1), (2, size)):
        for tensor in tensors:
            values = results[tensor]
            expected = block_range(values, rows, size)
            if tensor != "output":
                expected = max(expected, block_range(values.t(), rows, size))
            found = run.latest()["", tensor, f"{name}_block_size_{size}_dims_{dims}"]
            assert found == pytest.approx(expected, abs=1e-9), (tensor, dims)


def test_values_that_are_no_numbers() -> None:
    name = "max_blockwise_dynamic_range"
    for fill in (0.0, 3.0, math.inf, math.nan):
        x = torch.full((32, 32), fill)
        assert measured(name, x) == {f"{name}_block_size_32_dims_1": 0.0}
    assert measured(["max", "exponents", "sqnr"], torch.zeros(0, 32)) == {}
    x = torch.ones(32, 32)
    broken = x.clone()
    broken[3, 4] = math.nan
    # A NaN is told, whichever batch has it.
    for batches in ((x, broken), (broken, x)):
        found = measured(["min", "max", "mean", "cur_amax"], *batches)
        assert [math.isnan(value) for value in found.values()] == [True, True, True, False]
        assert found["cur_amax"] == 1


def test_losses_are_those_of_the_finite_values() -> None:
    x, _ = inputs()
    x[:, ::3] = math.nan
    expected = losses(x, quantized("current", "fprop", "activation", x).dequantize(torch.float32))
    expected = {stat: pytest.approx(expected[stat]) for stat in ("mse", "sqnr", "underflows%")}
    assert measured(list(expected), x) == expected


# -- steps and batches --


def test_batches_of_a_step_are_one_tensor_and_a_weight_counts_once() -> None:
    batches = [inputs(seed=seed)[0] * scale for seed, scale in enumerate((1.0, 3.0, 2.0))]
    name = "max_blockwise_dynamic_range"
    stats = [*VALUES, "exponents", "mse", "underflows%", "scale_inv_min", "scale_inv_max", name]
    x = torch.cat(batches)
    each = [of_the_format(batch) for batch in batches]
    found = measured(stats, *batches)
    assert found.pop("exponents") == exponents(x)
    expected = statistics(x) | {
        "mse": sum(loss["mse"] for loss in each) / 3,
        "underflows%": sum(loss["underflows%"] for loss in each) / 3,
        "scale_inv_min": min(loss["scale_inv_min"] for loss in each),
        "scale_inv_max": max(loss["scale_inv_max"] for loss in each),
        f"{name}_block_size_32_dims_1": max(
            block_range(side, 1, 32) for batch in batches for side in (batch, batch.t())
        ),
    }
    assert found == pytest.approx(expected, rel=1e-6)
    once = measured([*stats, "mxfp8_mse"], batches[0], tensor="weight")
    assert measured([*stats, "mxfp8_mse"], *batches, tensor="weight") == once
    layer = layer_of("current")
    with ottava_debug.statistics(layer, "l1_norm", tensors="weight") as run:
        for _ in range(2):
            layer(x)
            run.step()
    first, second = run.found
    assert (first.step, second.step, first.value) == (0, 1, second.value)


def test_layers_of_one_name_have_weights_of_their_own(initialize: Initialize) -> None:
    writer = Writer()
    initialize(section("LogTensorStats", "tensors: weight, stats: l1_norm"), tb_writer=writer)
    first, second = layer_of("current"), ottava.nn.Linear(32, 48, recipe="current", name="layer")
    x, _ = inputs()
    first(x)
    words = "several layers are called 'layer'.*infer_and_assign_layer_names"
    with pytest.warns(UserWarning, match=words):
        second(x)
    with warnings.catch_warnings(action="error"):
        first(x)
        second(x)
    debug_api.step()
    total = sum(layer.weight.detach().double().abs().sum().item() for layer in (first, second))
    assert writer.scalars == {("layer_weight_l1_norm", 0): pytest.approx(total)}


def test_statistics_under_checkpointing_are_those_without_it() -> None:
    layer, found = layer_of("delayed"), []
    x, dy = inputs()
    expected = passes(layer_of("delayed"), x, dy)
    for call in (layer, *(partial(checkpoint, layer, use_reentrant=is_so) for is_so in (0, 1))):
        layer.load_state_dict(layer_of("delayed").state_dict())
        with ottava_debug.statistics(layer, ["l1_norm", "sqnr", "exponents"]) as run:
            call(x.clone().requires_grad_()).backward(dy)
            run.step()
        # Statistics change no bit.
        assert torch.equal(layer.weight.grad, expected["wgrad"])
        layer.zero_grad()
        found.append(run.latest())
    assert found[0] == found[1] == found[2]
    assert {tensor for _, tensor, _ in found[0]} == set(ROLES)


# -- what has no statistics --


@pytest.mark.parametrize(
    ("stat", "tensor", "words"),
    [
        ("delayed_sqnr", "weight", "weight of layer '' is not quantized along rows by 'delayed'"),
        ("sqnr", "output", "output of layer '' is not quantized along rows"),
        ("sqnr_columnwise", "output", "output of layer '' is not quantized along columns"),
    ],
)
def test_what_is_not_quantized_is_told_once(stat: str, tensor: str, words: str) -> None:
    x, _ = inputs()
    layer = layer_of("current")
    with ottava_debug.statistics(layer, stat, tensors=tensor) as run:
        with pytest.warns(UserWarning, match=words):
            layer(x)
        with warnings.catch_warnings(action="error"):
            layer(x)
    assert run.found == []


# -- where they are written --


def test_a_file_has_the_format_of_nvdlfw_inspect(tmp_path: Path, initialize: Initialize) -> None:
    options = "tensors: weight, stats: [max, exponents]"
    # A run that ended writes nothing more.
    for _ in range(2):
        theirs = initialize(section("LogTensorStats", options, layers="layer_types: all"))
    layer_of("current", "")(inputs()[0])
    debug_api.step()
    debug_api.end_debug()
    layer, own = layer_of("current", ""), tmp_path / "own"
    stats = ["max", "exponents"]
    with ottava_debug.statistics(layer, stats, tensors="weight", log_dir=own) as run:
        layer(inputs()[0])
        run.step()
    name = Path("nvdlfw_inspect_statistics_logs", "nvdlfw_inspect_globalrank-0.log")
    # Everything is the same except the time.
    lines = [(folder / name).read_text().splitlines() for folder in (own, theirs)]
    texts = [[line.split(" - ", 1) for line in each] for each in lines]
    assert [text for _, text in texts[0]] == [text for _, text in texts[1]]
    assert {len(time) for time, _ in texts[0]} == {len(time) for time, _ in texts[1]}
    counts = exponents(layer.weight.detach())
    assert len(lines[0]) == 1 + len(counts)


def test_a_histogram_is_written_as_one() -> None:
    class Histograms(Writer):
        def add_histogram(self, name: str, values: torch.Tensor, step: int) -> None:
            self.scalars[name, step] = values  # type: ignore[assignment]

    layer, writer = layer_of("current"), Histograms()
    with ottava_debug.statistics(layer, "exponents", tensors="weight", tb_writer=writer) as run:
        layer(inputs()[0])
        run.step()
    ((name, step), values), *others = writer.scalars.items()
    assert (name, step, others) == ("_weight_exponents", 0, [])
    counts = run.latest()["", "weight", "exponents"]
    assert counts == exponents(layer.weight.detach())
    shares = {e: math.ceil(1000 * count / (32 * 48)) for e, count in counts.items()}
    assert torch.equal(values, torch.tensor([float(e) for e in shares for _ in range(shares[e])]))


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    layer = layer_of("current")
    with pytest.raises(OptionError, match=r"log_dir is '.*file': .* cannot be written: .*a folder"):
        ottava_debug.statistics(layer, log_dir=tmp_path / "file")
    # Nobody has the other end of the pipe: opening it would wait for ever.
    logs = tmp_path / "nvdlfw_inspect_statistics_logs"
    logs.mkdir()
    os.mkfifo(logs / "nvdlfw_inspect_globalrank-0.log")
    with pytest.raises(OptionError, match="no regular file"):
        ottava_debug.statistics(layer, log_dir=tmp_path)
    shutil.rmtree(logs)
    with pytest.raises(DTypeError, match="tb_writer is a str"):
        ottava_debug.statistics(layer, log_dir=tmp_path, tb_writer="logs")
    with pytest.raises(OptionError, match="stats has 'nonsense'"):
        ottava_debug.statistics(layer, "nonsense", log_dir=tmp_path)
    assert ottava.nn.function.inspector is None


def test_a_logger_that_fails_is_told_once() -> None:
    layer = layer_of("current")
    x, _ = inputs()
    with ottava_debug.statistics(layer, "amax", tb_writer=FullDisk(), on_error="warn") as run:
        layer(x)
        words = r"LogTensorStats: step failed: .*amax of .*of layer ''.*OSError: disk full.*off"
        with pytest.warns(UserWarning, match=words):
            run.step()
        layer(x)
        with warnings.catch_warnings(action="error"):
            run.step()
