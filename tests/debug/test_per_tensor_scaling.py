"""``PerTensorScaling``: products take the operands that are named with one scale, from their own
amax."""

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from eight_layers import GOOD, NAMES, Recorder, layers_of, model_of, step

from ottava.errors import OptionError
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.operands import BY_COLUMN, TENSORS

LAYER = NAMES[2]
FILE = """
it:
  enabled: True
  layers: {{exact_layer_names: [{layer}]}}
  transformer_engine:
    PerTensorScaling:
      enabled: True
      {options}
"""
SOME = "gemms: [fprop, wgrad]\n      tensors: [activation, gradient]"
STRUCTS = """gemms_struct:
        - gemm: dgrad
          tensors_struct:
            - tensor: gradient
              margin: 2
            - tensor: weight
              margin: -1
"""
# The options, and (product, operand) -> margin.
CASES = {
    "lists": (
        SOME,
        {("fprop", "activation"): 0, ("wgrad", "activation"): 0, ("wgrad", "gradient"): 0},
    ),
    "margin": (
        "gemms: [fprop]\n      tensors: [weight]\n      margin: 3",
        {("fprop", "weight"): 3},
    ),
    "structs": (STRUCTS, {("dgrad", "gradient"): 2, ("dgrad", "weight"): -1}),
}
# Recipe -> the formats of what goes forward and back.
FORMATS = {
    "current": (torch.float8_e4m3fn, torch.float8_e5m2),
    "delayed": (torch.float8_e4m3fn, torch.float8_e5m2),
    "mxfp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
}


def expected_of(values, element, margin):
    """One scale for all, of an amax that counts ``2^margin`` times, by float32 arithmetic as SPEC
    has it."""
    # A number over a tensor would be rounded twice.
    largest = torch.tensor(torch.finfo(element).max)
    scale = largest / values.abs().max() * 2.0**-margin
    return (values * scale).clamp(-largest, largest).to(element).float() * (torch.ones(()) / scale)


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_operands_have_one_scale(case, recipe, initialize, monkeypatch):
    options, margins = CASES[case]
    initialize(FILE.format(layer=LAYER, options=options))
    model = model_of(recipe)
    debug_api.infer_and_assign_layer_names(model)
    step(model)
    debug_api.step()
    recorder = Recorder(monkeypatch, model)
    step(model, seed=2)
    quantizer = layers_of(model)[LAYER]._binding.state.quantizer
    roles = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
    for gemm in TENSORS:
        for tensor, operand in recorder.operands(LAYER, gemm).items():
            assert isinstance(operand, QuantizedTensorStorage)
            values = recorder.plain[LAYER][tensor]
            margin = margins.get((gemm, tensor))
            if margin is None:
                made = quantizer(
                    roles[tensor], rowwise=True, columnwise=True, recording=False
                ).quantize(values)
                by_column = (gemm, tensor) in BY_COLUMN
                sides = (one.grid_operand(columnwise=by_column) for one in (operand, made))
                assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))
                continue
            element = FORMATS[recipe][tensor == "gradient"]
            assert torch.equal(
                operand.dequantize(torch.float32), expected_of(values, element, margin)
            ), (gemm, tensor)


def test_other_layers_and_steps_are_as_they_were(initialize):
    expected = step(model_of("delayed"))
    initialize(FILE.format(layer=LAYER, options=f"{SOME}\n      start_step: 1"))
    model = model_of("delayed")
    debug_api.infer_and_assign_layer_names(model)
    assert all(torch.equal(a, b) for a, b in zip(step(model), expected, strict=True))
    debug_api.step()
    assert not all(torch.equal(a, b) for a, b in zip(step(model), expected, strict=True))


def test_what_a_product_takes_in_high_precision_stays_so(initialize):
    expected = step(model_of(None))
    both = FILE.format(layer=LAYER, options=SOME) + "    DisableFP8Layer: {enabled: True}\n"
    initialize(both.replace(f"exact_layer_names: [{LAYER}]", "layer_types: [all]"))
    assert all(torch.equal(a, b) for a, b in zip(step(model_of("current")), expected, strict=True))


WRONG = [
    (f"{SOME}\n      margin: 65", "margin is 65. Expected: a number from -64 to 64"),
    (f"{SOME}\n      margin: True", "margin is True"),
    (
        "gemms: [fprop]\n      tensors: [output]",
        "output is the result of a product.*activation, weight, gradient",
    ),
    ("gemms: [fprop]", "names no tensors"),
    (f"{SOME}\n      margins: 1", "use 'margin'"),
]


@pytest.mark.parametrize(("options", "told"), WRONG)
def test_options_that_are_wrong(options, told, initialize):
    with pytest.raises(OptionError, match=told):
        initialize(FILE.format(layer=LAYER, options=options))
    initialize(GOOD)
