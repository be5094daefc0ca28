"""Statistics are what a direct computation gives, change nothing, and cost nothing in steps without
them."""

import math
import warnings
from functools import partial

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from eight_layers import NAMES, Recorder, layers_of, model_of, step
from torch.utils.checkpoint import checkpoint

import ottava_debug
from ottava import QuantizerRole, get_recipe
from ottava.errors import DTypeError, OptionError
from ottava_debug import measures

FILE = """
it:
  enabled: True
  layers: {exact_layer_names: [model.blocks.0.fc1]}
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation, weight, gradient, output, dgrad, wgrad]
      stats: [min, max, mean, std, l1_norm, l2_norm, cur_amax, dynamic_range]
      freq: 2
    LogFp8TensorStats:
      enabled: True
      tensors_struct:
        - tensor: activation
          stats: [underflows%, underflows_of_nonzero%, saturation%, overflows%, sqnr, cosine, mse,
                  scale, scale_inv_value_min, scale_inv_value_max, sqnr_columnwise]
        - tensor: gradient
          stats: [sqnr]
          start_step: 1
          end_step: 1
        - tensor: weight
          stats: [mxfp8_sqnr, fp8_current_scaling_mse]
          start_end_list: [[0, 0], [2, 3]]
"""
LAYER = "model.blocks.0.fc1"


class Writer:
    """A writer of TensorBoard."""

    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def add_histogram(self, name, values, step):
        self.histograms[name, step] = values


def mse(values, quantized):
    quantized.update_usage(columnwise_usage=False)
    return (values.double() - quantized.dequantize(torch.float32).double()).square().mean().item()


def direct(x):
    x = x.double()
    magnitudes = x.abs()
    return {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(),
        "l1_norm": magnitudes.sum(),
        "l2_norm": x.norm(),
        "cur_amax": magnitudes.max(),
        "dynamic_range": (magnitudes.max() / magnitudes[magnitudes > 0].min()).log2(),
    }


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "blockwise", "rowwise", "delayed"])
def test_statistics_of_a_file_are_those_of_a_direct_computation(recipe, initialize, monkeypatch):
    writer = Writer()
    initialize(FILE, tb_writer=writer)
    model = model_of(recipe)
    debug_api.infer_and_assign_layer_names(model)
    recorder, steps = Recorder(monkeypatch, model), []
    quantizer = layers_of(model)[LAYER]._binding.state.quantizer
    for number in range(3):
        step(model, seed=number)
        taken = dict(recorder.plain[LAYER])
        taken["q"] = quantizer("input", rowwise=True, columnwise=True, recording=False).quantize(
            taken["activation"]
        )
        taken["qdy"] = quantizer("grad_output", rowwise=True, columnwise=True).quantize(
            taken["gradient"]
        )
        steps.append(taken)
        debug_api.step()
    expected = {}
    for number in (0, 2):
        for tensor in ("activation", "weight", "gradient", "output", "dgrad", "wgrad"):
            found = direct(steps[number][tensor])
            expected |= {
                (f"{tensor}_{stat}", number): value.item() for stat, value in found.items()
            }
        w = steps[number]["weight"]
        by = {
            name: get_recipe(name).make_quantizer(QuantizerRole("linear", "weight"))
            for name in ("mxfp8", "current")
        }
        expected["weight_mxfp8_sqnr", number] = measures.compare(
            w, by["mxfp8"].quantize(w), columnwise=False
        ).sqnr
        expected["weight_fp8_current_scaling_mse", number] = mse(w, by["current"].quantize(w))
    for number, taken in enumerate(steps):
        x, q = taken["activation"], taken["q"]
        lost, columns = (
            measures.compare(x, q, columnwise=False),
            measures.compare(x, q, columnwise=True),
        )
        scales = q.grid_operand(columnwise=False)[1]
        scales = (
            torch.exp2(scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
        )
        of_activation = {
            "underflows%": 100 * int(((x != 0) & (q.dequantize() == 0)).sum()) / x.numel(),
            "underflows_of_nonzero%": lost.underflow,
            "saturation%": lost.saturation,
            "overflows%": lost.saturation,
            "sqnr": lost.sqnr,
            "cosine": lost.cosine,
            "sqnr_columnwise": columns.sqnr,
            "mse": mse(x, q),
            "scale_inv_value_min": scales.min().item(),
            "scale_inv_value_max": scales.max().item(),
            "scale": 1 / scales.min().item(),
        }
        expected |= {(f"activation_{stat}", number): value for stat, value in of_activation.items()}
    expected["gradient_sqnr", 1] = measures.compare(
        steps[1]["gradient"], steps[1]["qdy"], columnwise=False
    ).sqnr
    found = {
        (name.removeprefix(f"{LAYER}_"), number): value
        for (name, number), value in writer.scalars.items()
    }
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert math.isclose(found[key], value, rel_tol=1e-5, abs_tol=1e-9), key


def test_files_are_in_the_format_of_nvdlfw_inspect(tmp_path):
    """The lines that its own logger writes, but for the time."""
    from nvdlfw_inspect.logging import FileLogger

    from ottava_debug.log_files import StatisticsFile

    own, theirs = (
        StatisticsFile(tmp_path / "own"),
        FileLogger("nvdlfw_inspect", str(tmp_path / "theirs")),
    )
    theirs._initialize_stats_logger("nvdlfw_inspect_statistics_logs")
    for logger in (own, theirs):
        logger.log_scalar("a_weight_max", 1.25, 7)
    own.close()
    found = [list((tmp_path / where).rglob("*.log")) for where in ("own", "theirs")]
    for handler in list(theirs.stats_logger.handlers):
        theirs.stats_logger.removeHandler(handler)
        handler.close()
    (mine,), (other,) = found
    assert mine.relative_to(tmp_path / "own") == other.relative_to(tmp_path / "theirs")
    first, second = (path.read_text().split(" - ", 1) for path in (mine, other))
    assert first[1] == second[1]
    assert len(first[0]) == len(second[0])


def test_histograms_of_exponents(tmp_path):
    writer, model = Writer(), model_of("current")
    with ottava_debug.statistics(
        model,
        ["exponents"],
        layers="blocks.0.fc1",
        tensors=["weight"],
        tb_writer=writer,
        log_dir=tmp_path,
    ) as run:
        step(model)
        run.step()
    weight = layers_of(model)[LAYER].weight.detach()
    ((_, layer, tensor, stat, counts),) = run.found
    assert (layer, tensor, stat) == ("blocks.0.fc1", "weight", "exponents")
    expected = torch.frexp(weight)[1] - 1
    assert counts == {
        e: int((expected == e).sum()) for e in sorted(set(expected.flatten().tolist()))
    }
    assert sum(counts.values()) == weight.numel()
    (((name, number), values),) = writer.histograms.items()
    assert (name, number) == ("blocks.0.fc1_weight_exponents", 0)
    assert set(values.tolist()) == set(map(float, counts))
    lines = next(tmp_path.rglob("*.log")).read_text().splitlines()
    assert len(lines) == len(counts)
    assert f"blocks.0.fc1_weight_exponents_{min(counts)} " in lines[0]


def test_microbatches_of_a_step_are_put_together():
    model, stats = (
        model_of("current"),
        ["min", "max", "mean", "std", "l1_norm", "cur_amax", "mse", "underflows%"],
    )
    stats += ["scale_inv_min", "scale_inv_max"]
    layer = layers_of(model)[LAYER]
    xs = [torch.randn(6, 40) * scale for scale in (1.0, 3.0, 2.0)]
    with ottava_debug.statistics(
        model, stats, layers="blocks.0.fc1", tensors=["activation"]
    ) as run:
        for x in xs:
            layer(x)
        run.step()
    both = direct(torch.cat(xs))
    values = {stat: value for (_, _, stat), value in run.latest().items()}
    for stat in stats[:6]:
        assert math.isclose(values[stat], both[stat].item(), rel_tol=1e-6), stat
    made = [
        layer._binding.state.quantizer("input", rowwise=True, columnwise=True)
        .quantize(x)
        .dequantize()
        for x in xs
    ]
    error = torch.cat(xs).double() - torch.cat(made).double()
    scales = [
        layer._binding.state.quantizer("input", rowwise=True, columnwise=True).quantize(x)
        for x in xs
    ]
    scales = [made.grid_operand(columnwise=False)[1].float() for made in scales]
    assert values["scale_inv_min"] == min(scale.min().item() for scale in scales)
    assert values["scale_inv_max"] == max(scale.max().item() for scale in scales)
    assert values["scale_inv_min"] < values["scale_inv_max"]
    assert math.isclose(values["mse"], error.square().mean().item(), rel_tol=1e-6)
    assert {each.step for each in run.found} == {0}
    assert len(run.found) == len(stats)


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "rowwise"])
def test_statistics_change_no_bit(recipe):
    expected = model_of(recipe)
    wanted = [step(expected, seed) for seed in range(3)]
    model = model_of(recipe)
    with ottava_debug.statistics(model, ["exponents", "std", "sqnr"]) as run:
        found = []
        for seed in range(3):
            found.append(step(model, seed))
            run.step()
    assert {each.layer for each in run.found} == {name.removeprefix("model.") for name in NAMES}
    for a, b in zip(found, wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    states = model.state_dict(), expected.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


def test_steps_without_statistics_are_not_looked_at(monkeypatch):
    from ottava_debug import products

    looked = []
    apply = products._InspectedLinear.apply
    monkeypatch.setattr(
        products._InspectedLinear,
        "apply",
        lambda *given: looked.append(run.iteration) or apply(*given),
    )
    model = model_of("current")
    with ottava_debug.statistics(model, ["amax"], freq=5, start_step=5) as run:
        for _ in range(12):
            step(model)
            run.step()
    assert looked == [5] * 8 + [10] * 8
    assert {each.step for each in run.found} == {5, 10}


def test_what_is_not_quantized_has_no_statistics_of_it():
    model = model_of("current")
    with ottava_debug.statistics(model, ["sqnr"], layers="blocks.0.fc1", tensors=["output"]) as run:
        with pytest.warns(UserWarning, match=r"output of layer 'blocks\.0\.fc1' is not quantized"):
            step(model)
        step(model)
    assert run.found == []


@pytest.mark.parametrize(
    ("stats", "told"),
    [
        (["maximum"], "maximum"),
        (["sqnr_rowwise"], "sqnr_rowwise"),
        (["nowhere_sqnr"], "nowhere_sqnr"),
        (["custom_sqnr"], "custom_sqnr"),
        ([], "a list of 0"),
        ("maximum", "^the arguments: LogTensorStats: stats has 'maximum'"),
    ],
)
def test_statistics_that_nobody_knows(stats, told):
    with pytest.raises(OptionError, match=told):
        ottava_debug.statistics(model_of("current"), stats)
    # Nothing is left behind.
    assert ottava_debug.products._watches == []


def test_a_logger_that_fails_is_told_and_training_goes_on():
    class Broken(Writer):
        def add_scalar(self, name, value, step):
            raise OSError("disk full")

    model = model_of("current")
    with ottava_debug.statistics(model, ["amax"], tb_writer=Broken(), on_error="warn") as run:
        step(model)
        with pytest.warns(
            UserWarning,
            match=r"LogTensorStats: step failed: .*layer 'blocks.*OSError: disk full.*off",
        ):
            run.step()
        step(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.step()


def test_statistics_under_checkpointing_are_those_without_it():
    layer, found = layers_of(model_of("current"))[LAYER], []
    x = torch.randn(6, 40)
    for call in (
        layer,
        *(partial(checkpoint, layer, use_reentrant=kind) for kind in (False, True)),
    ):
        with ottava_debug.statistics(layer, ["l1_norm", "sqnr", "exponents"]) as run:
            call(x.clone().requires_grad_()).square().sum().backward()
            run.step()
        found.append(run.latest())
    assert found[0] == found[1] == found[2]
    assert {tensor for _, tensor, _ in found[0]} == {"activation", "weight", "gradient"}


STATE = [f"fp8_delayed_scaling_{stat}" for stat in ("underflows%", "sqnr", "scale_inv_max")]


def test_names_of_a_recipe_with_state_are_what_it_made():
    model, stats = (
        model_of("delayed"),
        [*STATE, *(name.removeprefix("fp8_delayed_scaling_") for name in STATE)],
    )
    with ottava_debug.statistics(model, stats, layers="blocks.0.fc1") as run:
        for seed in range(3):
            step(model, seed)
            run.step()
    found = run.latest()
    assert len(found) == 3 * len(stats)
    for layer, tensor, stat in found:
        assert (
            found[layer, tensor, stat]
            == found[layer, tensor, stat.removeprefix("fp8_delayed_scaling_")]
        )


def test_names_of_a_recipe_with_state_elsewhere_are_told():
    model = model_of("current")
    with ottava_debug.statistics(
        model, "delayed_sqnr", layers="blocks.0.fc1", tensors="weight"
    ) as run:
        with pytest.warns(
            UserWarning,
            match=r"weight of layer 'blocks\.0\.fc1' is not quantized along rows by 'delayed'",
        ):
            step(model)
    assert run.found == []


def test_places_that_cannot_be_written_to(tmp_path):
    path, model = tmp_path / "file", model_of("current")
    path.write_text("")
    with pytest.raises(OptionError, match=r"log_dir is '.*file': .* cannot be written: .*a folder"):
        ottava_debug.statistics(model, log_dir=path)
    with pytest.raises(DTypeError, match="tb_writer is a str"):
        ottava_debug.statistics(model, log_dir=tmp_path, tb_writer="logs")
    assert ottava_debug.products._watches == []


def test_each_rank_has_a_file(tmp_path, monkeypatch):
    from ottava_debug.log_files import StatisticsFile

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    StatisticsFile(tmp_path).close()
    assert [path.name for path in tmp_path.rglob("*.log")] == ["nvdlfw_inspect_globalrank-3.log"]
