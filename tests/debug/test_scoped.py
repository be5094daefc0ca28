"""The features from Python: which layers, products and tensors, in which steps; what nobody selects
is as it was."""

import subprocess
import sys
import warnings

import pytest
import torch
from eight_layers import NAMES, Recorder, model_of, step

import ottava
import ottava_debug
from ottava.debug import fake_quantize
from ottava.errors import DTypeError, OptionError
from ottava_debug.operands import TENSORS


def own(name):
    return name.removeprefix("model.")


def test_fake_quant_of_some_layers(monkeypatch):
    model = model_of("current")
    recorder = Recorder(monkeypatch, model)
    with ottava_debug.fake_quant(
        model, "FP8E5M2", layers="*.fc?", gemms=["fprop"], tensors=["weight"]
    ):
        step(model)
    for name in NAMES:
        left, right, _ = recorder.products[name, "fprop"]
        if ".fc" in name:
            assert torch.equal(left, recorder.plain[name]["activation"])
            assert torch.equal(right, fake_quantize(recorder.plain[name]["weight"], "FP8E5M2"))
        else:
            assert isinstance(right, ottava.QuantizedTensorStorage)
        assert isinstance(recorder.products[name, "dgrad"][0], ottava.QuantizedTensorStorage)


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_high_precision_is_a_model_without_a_recipe(recipe):
    expected = [step(model_of(None), seed) for seed in range(2)]
    model = model_of(recipe)
    plain = step(model)
    with ottava_debug.high_precision(model):
        found = [step(model, seed) for seed in range(2)]
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(found[1][0], plain[0])


def test_ranges_of_steps_count_the_calls_of_step():
    model = model_of("current")
    quantized, plain = step(model), step(model_of(None))
    found = []
    with ottava_debug.high_precision(model, start_end_list=[[1, 2], [4, -1]]) as run:
        for _ in range(6):
            y = step(model)[0]
            found.append(torch.equal(y, plain[0]))
            assert found[-1] or torch.equal(y, quantized[0])
            run.step()
    assert found == [False, True, True, False, True, True]
    assert torch.equal(step(model)[0], quantized[0])
    ends = []
    with ottava_debug.high_precision(model, start_step=1, end_step=3, freq=2) as run:
        for _ in range(6):
            ends.append(torch.equal(step(model)[0], plain[0]))
            run.step()
    assert ends == [False, False, True, False, False, False]


def test_layers_by_a_predicate_and_in_one_model_only():
    model, other = model_of("current"), model_of("current")
    expected = step(other)
    with ottava_debug.high_precision(model, layers=lambda name, layer: layer.in_features == 16):
        assert not torch.equal(step(model)[0], expected[0])
        assert all(torch.equal(a, b) for a, b in zip(step(other), expected, strict=True))


def test_two_at_once_and_their_ends():
    model = model_of("current")
    expected = step(model)
    with (
        ottava_debug.high_precision(model, layers="blocks.0.*"),
        ottava_debug.statistics(model, ["amax"]) as run,
    ):
        inside = step(model)
    assert run.found
    assert not torch.equal(inside[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(step(model), expected, strict=True))
    assert ottava.nn.function.inspector is None


def test_patterns_that_match_nothing_are_named():
    model = model_of("current")
    with pytest.warns(
        UserWarning,
        match=r"layers 'blocks\.7\.\*' matches no layer\. Layers of the model: 'blocks\.0\.",
    ):
        ottava_debug.high_precision(model, layers=["blocks.0.*", "blocks.7.*"]).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ottava_debug.high_precision(model, layers=["blocks.0.*"]).close()


def test_one_name_may_stand_for_a_list(monkeypatch):
    model = model_of("current")
    recorder = Recorder(monkeypatch, model)
    with ottava_debug.fake_quant(model, "FP8E5M2", gemms="fprop", tensors="weight"):
        step(model)
    for name in NAMES:
        assert torch.equal(
            recorder.products[name, "fprop"][1],
            fake_quantize(recorder.plain[name]["weight"], "FP8E5M2"),
        )
        assert isinstance(recorder.products[name, "wgrad"][0], ottava.QuantizedTensorStorage)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"quant_format": "FP9"}, "quant_format is 'FP9'"),
        ({"gemms": ["gprop"]}, "gemms has 'gprop'"),
        ({"tensors": ["weights"]}, "tensors has 'weights'"),
        ({"on_error": "exit"}, "on_error is 'exit'"),
        ({"start": 3}, "no key 'start'"),
        ({"freq": 0}, "freq is 0"),
    ],
)
def test_what_is_wrong(given, told):
    with pytest.raises(OptionError, match=told):
        ottava_debug.fake_quant(model_of("current"), **{"quant_format": "FP8E4M3", **given})
    assert ottava.nn.function.inspector is None


def test_models_that_have_no_layers():
    with pytest.raises(OptionError, match=r"call ottava\.convert"):
        ottava_debug.high_precision(torch.nn.Linear(4, 4))
    with pytest.raises(DTypeError):
        ottava_debug.high_precision("model")


def test_compiled_layers_that_are_not_chosen_stay_in_one_graph():
    torch.compiler.reset()
    model = model_of("current")
    block = torch.compile(model.blocks[1], backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 48)
    expected = block(x)
    with ottava_debug.statistics(model, ["amax"], layers="blocks.0.*") as run:
        assert torch.equal(block(x), expected)
        model.blocks[0](torch.randn(4, 16))
        run.step()
    assert {each.layer for each in run.found} == {own(name) for name in NAMES[:4]}


def test_compiled_layers_that_are_chosen_follow_the_steps():
    """Their graphs break, and each step does what it is said to do."""
    torch.compiler.reset()
    model = model_of("current")
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(12, 16)
    with torch.no_grad():
        quantized, plain = model(x), model_of(None)(x)
        found = []
        with ottava_debug.high_precision(model, start_step=1, end_step=1) as run:
            for _ in range(3):
                found.append(compiled(x))
                run.step()
    assert [torch.equal(y, quantized) for y in found] == [True, False, True]
    assert torch.equal(found[1], plain)


CALLS = """
import sys
import torch, ottava

layer = ottava.nn.Linear(64, 64, recipe="current")
x, dy = torch.randn(16, 64, requires_grad=True), torch.randn(16, 64)

def calls(layer):
    for _ in range(3):
        layer(x).backward(dy)
    found = []

    def profile(frame, event, _):
        if event == "call":
            found.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        layer(x).backward(dy)
    finally:
        sys.setprofile(None)
    return found

before = calls(layer)
import ottava_debug
import nvdlfw_inspect.api as debug_api
ottava_debug.register_features()
debug_api.initialize(log_dir="logs")
assert calls(layer) == before, calls(layer)
torch.compile(layer, backend="eager", fullgraph=True)(x)
other = ottava.nn.Linear(64, 64, recipe="current")
with ottava_debug.fake_quant(other, "FP8E4M3"):
    more = calls(layer)
    assert calls(other) != before
print(len(before), len(more))
assert calls(layer) == before
"""


def test_what_is_not_enabled_makes_no_python_call(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CALLS], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    before, more = map(int, done.stdout.split()[-2:])
    # A layer without a feature, while another has one: it is looked up.
    assert before < more <= before + 6


def test_every_tensor_of_every_product_can_be_fake_quantized(monkeypatch):
    model = model_of("current")
    recorder = Recorder(monkeypatch, model)
    every = sorted({tensor for tensors in TENSORS.values() for tensor in tensors})
    with ottava_debug.fake_quant(model, "MXFP8E4M3", tensors=every):
        step(model)
    for name in NAMES:
        for gemm, tensors in TENSORS.items():
            for tensor, operand in recorder.operands(name, gemm).items():
                assert torch.equal(
                    operand, fake_quantize(recorder.plain[name][tensor], "MXFP8E4M3")
                )
            made = fake_quantize(recorder.products[name, gemm][2], "MXFP8E4M3")
            assert torch.equal(made, recorder.plain[name][tensors[2]])
