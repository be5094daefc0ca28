"""What is fake-quantized is exactly what a file of TransformerEngine's form says: each GEMM's
operands, bit for bit."""

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from eight_layers import NAMES, Recorder, layers_of, model_of, step

from ottava.debug import fake_quantize
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.operands import ROLES, TENSORS

FORMATS = ("FP8E4M3", "FP8E5M2", "MXFP8E4M3", "MXFP8E5M2")
FC1 = ["model.blocks.0.fc1", "model.blocks.1.fc1"]


def pairs(gemms, tensors, quant_format):
    return {(gemm, t): quant_format for gemm in gemms for t in tensors if t in TENSORS[gemm]}


# Name -> a file, and layer -> (GEMM, tensor) -> format.
CASES = {
    "regex, gemms and tensors": (
        """
        fc1_and_qkv:
          enabled: True
          layers:
            layer_name_regex_pattern: .*(fc1|qkv)
          transformer_engine:
            FakeQuant:
              enabled: True
              gemms: [fprop, dgrad]
              tensors: [activation, weight]
              quant_format: FP8E4M3
        """,
        {
            n: pairs(["fprop", "dgrad"], ["activation", "weight"], "FP8E4M3")
            for n in NAMES
            if n.endswith(("fc1", "qkv"))
        },
    ),
    "types, gemms_struct with tensors": (
        """
        some:
          enabled: True
          layers:
            layer_types: [fc2, proj]
          transformer_engine:
            FakeQuant:
              enabled: True
              gemms_struct:
                - gemm: fprop
                  tensors: [activation]
                  quant_format: FP8E5M2
                - gemm: wgrad
                  tensors: [gradient, activation, wgrad]
                  quant_format: MXFP8E4M3
        """,
        {
            n: {
                ("fprop", "activation"): "FP8E5M2",
                ("wgrad", "gradient"): "MXFP8E4M3",
                ("wgrad", "activation"): "MXFP8E4M3",
                ("wgrad", "wgrad"): "MXFP8E4M3",
            }
            for n in NAMES
            if n.endswith(("fc2", "proj"))
        },
    ),
    "types, structs over what stands around them": (
        """
        some:
          enabled: True
          layers:
            layer_types: [fc2]
          transformer_engine:
            FakeQuant:
              enabled: True
              quant_format: FP8E4M3
              gemms_struct:
                - gemm: fprop
                  tensors: [activation, weight]
                - gemm: dgrad
                  quant_format: FP8E5M2
                  tensors_struct:
                    - tensor: gradient
                    - tensor: weight
                      quant_format: MXFP8E4M3
        """,
        {
            n: {
                **pairs(["fprop"], ["activation", "weight"], "FP8E4M3"),
                ("dgrad", "gradient"): "FP8E5M2",
                ("dgrad", "weight"): "MXFP8E4M3",
            }
            for n in NAMES
            if n.endswith("fc2")
        },
    ),
    "exact names, gemms_struct with tensors_struct": (
        """
        exactly:
          enabled: True
          layers:
            exact_layer_names: [model.blocks.0.fc1, model.blocks.1.fc1]
          transformer_engine:
            FakeQuant:
              enabled: True
              gemms_struct:
                - gemm: dgrad
                  tensors_struct:
                    - tensor: gradient
                      quant_format: FP8E5M2
                    - tensor: weight
                      quant_format: MXFP8E5M2
                - gemm: fprop
                  tensors_struct:
                    - tensor: output
                      quant_format: FP8E4M3
        """,
        {
            n: {
                ("dgrad", "gradient"): "FP8E5M2",
                ("dgrad", "weight"): "MXFP8E5M2",
                ("fprop", "output"): "FP8E4M3",
            }
            for n in FC1
        },
    ),
    "numbers, gemms with tensors_struct": (
        """
        second:
          enabled: True
          layers:
            layer_numbers: 1
          ottava:
            FakeQuant:
              enabled: True
              gemms: [fprop, wgrad]
              tensors_struct:
                - tensor: activation
                  quant_format: MXFP8E4M3
                - tensor: weight
                  quant_format: FP8E4M3
                - tensor: gradient
                  quant_format: FP8E5M2
        """,
        {
            n: {
                ("fprop", "activation"): "MXFP8E4M3",
                ("fprop", "weight"): "FP8E4M3",
                ("wgrad", "activation"): "MXFP8E4M3",
                ("wgrad", "gradient"): "FP8E5M2",
            }
            for n in NAMES
            if ".1." in n
        },
    ),
    "numbers and types, results": (
        """
        off:
          enabled: False
          layers: {layer_types: [all]}
          transformer_engine:
            FakeQuant: {enabled: True, gemms: [fprop], tensors: [weight], quant_format: FP8E4M3}
        both:
          enabled: True
          layers:
            layer_numbers: ["0-1"]
            layer_types: [qkv]
          transformer_engine:
            FakeQuant:
              enabled: True
              gemms: [fprop, dgrad, wgrad]
              tensors: [output, dgrad, wgrad]
              quant_format: MXFP8E5M2
        """,
        {
            n: pairs(TENSORS, ["output", "dgrad", "wgrad"], "MXFP8E5M2")
            for n in NAMES
            if n.endswith("qkv")
        },
    ),
    "two sections": (
        """
        first:
          enabled: True
          layers: {layer_name_regex_pattern: 'blocks\\.0.*fc'}
          transformer_engine:
            FakeQuant: {enabled: True, gemms: [fprop], tensors: [weight], quant_format: FP8E4M3}
        second:
          enabled: True
          layers: {layer_name_regex_pattern: 'blocks\\.1.*fc'}
          transformer_engine:
            FakeQuant: {enabled: True, gemms: [dgrad], tensors: [gradient], quant_format: FP8E5M2}
            DisableFP8GEMM: {enabled: False, gemms: [wgrad]}
        """,
        {
            **{n: {("fprop", "weight"): "FP8E4M3"} for n in NAMES if "0.fc" in n},
            **{n: {("dgrad", "gradient"): "FP8E5M2"} for n in NAMES if "1.fc" in n},
        },
    ),
}


def same(a, b):
    a, b = ((t.dtype, t.shape, t.reshape(-1).view(torch.uint8)) for t in (a, b))
    return a[:2] == b[:2] and torch.equal(a[2], b[2])


def as_recipe_quantizes(layer, gemm, tensor, values):
    by_column = gemm == "wgrad" or (gemm == "dgrad" and tensor == "weight")
    quantizer = layer._binding.state.quantizer(
        ROLES[tensor], rowwise=True, columnwise=True, recording=False
    )
    return quantizer.quantize(values), by_column


def assert_quantized(found, expected, by_column):
    assert isinstance(found, QuantizedTensorStorage)
    for a, b in zip(
        found.grid_operand(columnwise=by_column),
        expected.grid_operand(columnwise=by_column),
        strict=True,
    ):
        assert same(a, b)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("current", torch.float32), ("mxfp8", torch.float32), ("delayed", torch.bfloat16)],
)
@pytest.mark.parametrize("case", CASES)
def test_operands_are_exactly_what_the_file_says(case, recipe, dtype, initialize, monkeypatch):
    text, expected = CASES[case]
    initialize(text)
    model = model_of(recipe, dtype)
    debug_api.infer_and_assign_layer_names(model)
    recorder = Recorder(monkeypatch, model)
    step(model)
    compared = 0
    for name, layer in layers_of(model).items():
        formats, plain = expected.get(name, {}), recorder.plain[name]
        for gemm, tensors in TENSORS.items():
            off = any(key[0] == gemm for key in formats)
            for tensor, operand in recorder.operands(name, gemm).items():
                if not off:
                    assert_quantized(
                        operand, *as_recipe_quantizes(layer, gemm, tensor, plain[tensor])
                    )
                elif (gemm, tensor) in formats:
                    assert same(operand, fake_quantize(plain[tensor], formats[gemm, tensor]))
                    assert not same(operand, plain[tensor])
                else:
                    assert same(operand, plain[tensor])
                compared += 1
            made = recorder.products[name, gemm][2]
            result = tensors[2]
            if (gemm, result) in formats:
                made = fake_quantize(made, formats[gemm, result])
            if result in plain:
                assert same(made, plain[result])
                compared += 1
    assert compared == 8 * 9
    untouched = [name for name in NAMES if name not in expected]
    assert untouched


def test_the_cases_have_every_selector_form_and_format():
    texts = "".join(text for text, _ in CASES.values())
    selectors = ("layer_numbers", "layer_types", "exact_layer_names", "layer_name_regex_pattern")
    forms = ("gemms:", "gemms_struct:", "tensors:", "tensors_struct:")
    assert all(word in texts for word in (*selectors, *forms, *FORMATS))
