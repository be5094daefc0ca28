"""Configurations: which layers a section selects, and what is refused, with the line and what is
allowed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import yaml

import ottava
import ottava_debug
from ottava.errors import DTypeError, OptionError
from ottava_custom.files.source import MAX_BYTES, MAX_DEPTH
from ottava_debug.located import read
from tests.debug.by_hand import inputs, layer_of, passes
from tests.debug.yaml_files import GOOD, section

Initialize = Callable[..., Path]

#: What replaces a line of the good file, by the number of the line: the error and its line.
REFUSED = {
    (
        11,
        "      quant_format: FP8E4M4",
    ): "line 11: section 'it', FakeQuant: quant_format is 'FP8E4M4'",
    (11, "      quant_format: ACME9E4M3"): "line 11: .*pip install ottava-recipes-acme9",
    (11, ""): "line 7: section 'it', FakeQuant has no quant_format",
    (11, "      quant_fromat: FP8E4M3"): "line 11: .*'quant_fromat'.*use 'quant_format'",
    (9, "      gemms: [fprop, fprob]"): "line 9: .*gemms has 'fprob'.*dgrad, fprop.*'fprop'",
    (9, "      gemms_struct: fprop"): "line 9: .*gemms_struct is 'fprop'.*a list",
    (9, "      gemms_struct: []"): "line 9: .*gemms_struct is a list of 0",
    (9, "      gemms_struct: [{gem: fprop}]"): "line 9: .*has no gemm",
    (9, "      gemms_struct: [{gemm: fprop, tensor: 1}]"): "no key 'tensor'.*use 'tensors'",
    (9, "      gemms: [fprop"): "line 10: not YAML",
    (9, "      gemms: fprop\n      freq: 2\n      freq: 3"): "line 11: .*'freq' stands twice",
    (9, "      gemms: fprop\n      freq: 0"): "line 10: .*freq is 0",
    (9, "      gemms: fprop\n      on_error: exit"): "line 10: .*on_error.*warn or raise",
    (9, "      gemms: fprop\n      start_step: soon"): "line 10: .*start_step is 'soon'",
    (9, "      gemms: fprop\n      start_end_list: [[5, 2]]"): "line 10: .*ascending",
    (9, "      gemms: fprop\n      start_end_list: [[1, 4], [3, 5]]"): "line 10: .*overlap",
    (9, "      gemms: fprop\n      start_end_list: [[0, -1], [3, 4]]"): "line 10: .*the last",
    (9, "      gemms: fprop\n      start_end_list: [[-1, 2]]"): "line 10: .*start_end_list",
    (9, "      gemms: fprop\n      start_end_list: [[1]]"): "line 10: .*a list of 1",
    (10, "      tensors: [weights]"): "line 10: .*tensors has 'weights'.*activation, dgrad",
    (10, ""): "line 7: .*names no tensors.*tensors_struct",
    (10, "      tensors: [gradient]"): "line 7: .*of fprop activation, weight, output",
    (8, ""): "line 7: .*FakeQuant has no enabled",
    (
        7,
        "    FakeQuant: [1]\n    Other:",
    ): "line 7: .*FakeQuant is a list of 1. Expected: a mapp",
    (7, "    FakeQuantize:"): "line 7: .*transformer_engine.*use 'FakeQuant'",
    (
        6,
        "  transformer_motor:",
    ): "line 6: section 'it' has no key.*one of LogTensorStats, enabled",
    (5, "    layer_regex: .*"): "line 5: .*exact_layer_names",
    (5, "    layer_name_regex_pattern: '*'"): "line 5: .*a regular expression",
    (4, "  selectors:"): "line 2: section 'it' has no layers",
    (3, ""): "line 2: section 'it' has no enabled",
    (3, "  enabled: maybe"): "line 3: .*'maybe'.*True or False",
    (1, GOOD): "line 13: .*'it' stands twice, first in line 2",
}
FILES_REFUSED = {
    "- a\n": "holds a list of 1. Expected: sections",
    "\n": "holds nothing. Expected: sections",
    GOOD + "#" * MAX_BYTES: f"larger than {MAX_BYTES} bytes.*fewer sections",
    "- " * 5000: "values are nested too deeply",
    f"it:\n  {'[' * (MAX_DEPTH + 1)}{']' * (MAX_DEPTH + 1)}": "line 2: values .*at most",
    "it: 2001-99-99": "not a value",
}
FILES_REFUSED |= {
    "\n".join([*GOOD.split("\n")[: line - 1], new, *GOOD.split("\n")[line:]]): words
    for (line, new), words in REFUSED.items()
}


@pytest.mark.parametrize("text", FILES_REFUSED, ids=FILES_REFUSED.values())
def test_a_file_is_refused_with_its_line(text: str, initialize: Initialize) -> None:
    with pytest.raises(OptionError, match=f"debug.yaml.*{FILES_REFUSED[text]}") as error:
        initialize(text)
    assert isinstance(error.value, ValueError)
    assert len(str(error.value)) < 1000


BLOCKS = "max_blockwise_dynamic_range"
# Options of a feature, and the error.
FEATURES_REFUSED = {
    "PerTensorScaling": {
        "gemms: [fprop], tensors: [weight], margin: 65": "margin is 65. Expected: .* -64 to 64",
        "gemms: [fprop], tensors: [weight], margin: True": "margin is True",
        "gemms: [fprop], tensors: [output]": "output is the result of a product.*activation, weig",
        "gemms: [fprop]": "names no tensors",
        "gemms: [fprop], tensors: [weight], margins: 1": "use 'margin'",
    },
    "DumpTensors": {
        "tensors: [weight], freq: 2": "nothing of weight is to be written.*high_precision_tensor",
        "tensors: [weight], high_precision_tensor: False": "nothing of weight",
        "tensors: weight, high_precision_tensor: True, dump_quantized_internals: True": (
            "dump_quantized_internals without quantized_tensor"
        ),
        "tensors: [weight], quantized_tensor: 1": "quantized_tensor is 1. Expected: True or False",
        "tensors: [weight], quantised_tensor: True": "use 'quantized_tensor'",
    },
    "LogFp8TensorStats": {
        "tensors: [weight], stats: [sqnr_rowwise]": "stats has 'sqnr_rowwise'",
        "tensors: [weight], stats: [acme_sqnr]": "stats has 'acme_sqnr'.*current_sqnr",
        "tensors: [weight], stats: [mxfp8sqnr]": "stats has 'mxfp8sqnr'",
        "tensors: [weight], stats: []": "stats is a list of 0. Expected: a list of statistics",
        "tensors: [weight]": "has no stats",
    },
    "LogTensorStats": {
        "tensors: [weight], stats: [maximum]": "stats has 'maximum'.*use 'max'",
        "tensors: [weight], stats: 3": "stats is 3",
        f"tensors: weight, stats: {{{BLOCKS}: {{block_size: 0}}}}": "block_size 0.*from 1",
        f"tensors: weight, stats: {{{BLOCKS}: {{block_size: 2.5}}}}": r"block_size 2\.5",
        f"tensors: weight, stats: {{{BLOCKS}: {{dims: 3}}}}": "dims 3.*1 or 2",
        f"tensors: weight, stats: {{{BLOCKS}: {{dims: True}}}}": "dims True",
        f"tensors: weight, stats: {{{BLOCKS}: {{size: 3}}}}": "the key 'size'.*block_size",
        f"tensors: weight, stats: {{{BLOCKS}: 32}}": f"{BLOCKS}: 32",
        "tensors: weight, stats: {max: {}}": "a mapping of max",
        "tensors: weight, stats: [{}]": "a mapping of nothing",
        f"tensors: weight, stats: {BLOCKS}_block_size_0_dims_1": f"one of .*{BLOCKS}",
    },
}


@pytest.mark.parametrize("feature", FEATURES_REFUSED)
def test_options_of_a_feature_are_refused(feature: str, initialize: Initialize) -> None:
    for options, words in FEATURES_REFUSED[feature].items():
        with pytest.raises(OptionError, match=f"section 'it', {feature}.*{words}"):
            initialize(section(feature, options))


def test_a_file_that_cannot_be_read(tmp_path: Path, initialize: Initialize) -> None:
    """It can be corrected in the same process; a file is not required."""
    with pytest.raises(OptionError, match=r"nowhere\.yaml cannot be read"):
        debug_api.initialize(config_file=str(tmp_path / "nowhere.yaml"), log_dir=str(tmp_path))
    debug_api.initialize(log_dir=str(tmp_path))
    assert debug_api.transformer_engine.fp8_gemm_enabled("x", gemm="fprop", iteration=0) is True
    initialize(GOOD)
    assert debug_api.transformer_engine.fp8_gemm_enabled("x", gemm="fprop", iteration=0) is False


def test_a_dict_is_a_configuration(tmp_path: Path, initialize: Initialize) -> None:
    def begin(gemm: str) -> None:
        feature = {"DisableFP8GEMM": {"enabled": True, "gemms": (gemm,)}}
        section = {"enabled": True, "layers": {"layer_types": ("fc1",)}, "ottava": feature}
        debug_api.initialize(config_file={"a": section}, log_dir=str(tmp_path))

    words = "the configuration: section 'a', DisableFP8GEMM: gemms has 'x'"
    with pytest.raises(OptionError, match=words):
        begin("x")
    begin("dgrad")
    asked = (("b.fc1", "dgrad"), ("b.fc1", "fprop"), ("b.fc2", "dgrad"))
    enabled = debug_api.ottava.fp8_gemm_enabled
    answers = [enabled(name, gemm=gemm, iteration=0) for name, gemm in asked]
    assert answers == [False, True, True]


def test_yaml_is_read_as_pyyaml_reads_it(tmp_path: Path) -> None:
    text = (
        "base: &base {enabled: yes, list: [1, two, {three: 0x3}]}\n"
        "a:\n  <<: *base\n  more: on\n"
        f"b: *base\n1: ~\ndeep: {'[' * (MAX_DEPTH - 1)}{']' * (MAX_DEPTH - 1)}\n"
    )
    path = tmp_path / "x.yaml"
    path.write_text(text)
    found = read(path)
    assert found == {str(key): value for key, value in yaml.safe_load(text).items()}
    assert (found.lines["b"], found["a"].lines["more"]) == (5, 4)


# -- layers --

NAMES = [f"model.blocks.{n}.{part}" for n in range(2) for part in ("qkv", "proj", "fc1", "fc2")]
MORE_NAMES = ["model.head", *(f"layers.{n}.experts.3.w1" for n in range(6))]
# What selects, and the layers.
SELECTORS = {
    "exact_layer_names: [model.blocks.0.fc1]": NAMES[2:3],
    "layer_name_regex_pattern: '\\.1\\..*(fc1|qkv)'": [NAMES[4], NAMES[6]],
    "layer_types: [fc1]": [NAMES[2], NAMES[6]],
    "layer_types: [all]": NAMES + MORE_NAMES,
    "layer_types: proj": [NAMES[1], NAMES[5]],
    "layer_numbers: 1": [*NAMES[4:], MORE_NAMES[2]],
    "layer_numbers: ['2-4']": MORE_NAMES[3:6],
    "layer_numbers: ['0-0', 1], layer_types: [model]": NAMES,
    "layer_numbers: all": NAMES + MORE_NAMES[1:],
    "layer_numbers: [0], layer_types: [fc1, fc2]": NAMES[2:4],
    # If both are given, nvdlfw-inspect uses the first alone.
    "exact_layer_names: [model.blocks.0.qkv], layer_types: [fc2]": NAMES[:1],
    "layer_name_regex_pattern: qkv, layer_numbers: [0]": [NAMES[0], NAMES[4]],
}


@pytest.mark.parametrize("layers", SELECTORS)
def test_a_section_selects_layers(layers: str, initialize: Initialize) -> None:
    initialize(section("DisableFP8Layer", layers=layers))
    enabled = debug_api.transformer_engine.fp8_gemm_enabled
    names = NAMES + MORE_NAMES
    selected = [name for name in names if not enabled(name, gemm="fprop", iteration=0)]
    assert selected == SELECTORS[layers]


@pytest.mark.parametrize(
    "layers",
    ["", "layer_numbers: x", "layer_numbers: [-1]", "layer_numbers: []", "exact_layer_names: [3]"],
)
def test_selectors_that_are_refused(layers: str, initialize: Initialize) -> None:
    with pytest.raises(OptionError, match="section 'it', layers"):
        initialize(section("DisableFP8Layer", layers=layers))


def test_patterns_that_match_no_layer_are_named_once(initialize: Initialize) -> None:
    names = "exact_layer_names: [a.fc1, b.fc1]"
    first = section("DisableFP8Layer", name="first", layers=names)
    pattern = "layer_name_regex_pattern: attention"
    initialize(first + section("DisableFP8Layer", name="second", layers=pattern))
    passes(layer_of("current", "a.fc1"), *inputs())
    with pytest.warns(UserWarning, match="matches no layer") as caught:
        debug_api.step()
    first_words, second_words = (str(warning.message) for warning in caught)
    assert "line 3: section 'first', layers: exact_layer_names 'b.fc1' matches no" in first_words
    assert "line 8: section 'second', layers: layer_name_regex_pattern 'att" in second_words
    assert second_words.endswith("Layers that ran: 'a.fc1'")
    with warnings.catch_warnings(action="error"):
        debug_api.step()
        debug_api.end_debug()
    # They are named at the end, too, where no step has ended.
    initialize(section("DisableFP8Layer", layers=pattern))
    with pytest.warns(UserWarning, match="'attention' matches no layer. Layers that ran: none"):
        debug_api.end_debug()


def test_the_same_feature_twice_for_a_layer_is_refused(initialize: Initialize) -> None:
    first = section("DisableFP8Layer", name="first", layers="layer_types: [fc1]")
    initialize(first + section("DisableFP8Layer", name="second", layers="layer_types: [a]"))
    words = r"layer 'a\.fc1' has DisableFP8Layer twice, of .*line 5.* line 10"
    with pytest.raises(OptionError, match=words):
        layer_of("current", "a.fc1")(inputs()[0])


def test_names_that_nvdlfw_inspect_gives(initialize: Initialize) -> None:
    initialize(section("LogTensorStats", "tensors: weight, stats: max", layers="layer_types: all"))
    model = ottava.convert(torch.nn.Sequential(torch.nn.Linear(32, 48)), "current")
    debug_api.infer_and_assign_layer_names(model)
    assert model[0].name == "model.0"


# -- from Python --


def test_arguments_that_are_refused() -> None:
    layer = layer_of("current")
    for options, words in (
        ({"quant_format": "FP9"}, "the arguments: FakeQuant: quant_format is 'FP9'"),
        ({"gemms": ["gprop"]}, "gemms has 'gprop'"),
        ({"start": 3}, "no key 'start'"),
    ):
        with pytest.raises(OptionError, match=words):
            ottava_debug.fake_quant(layer, **{"quant_format": "FP8E4M3", **options})
    for reduce in (None, 3, torch.zeros(1)):
        with pytest.raises(OptionError, match=r"reduce is None|the group is"):
            ottava_debug.statistics(layer, ["max"], reduce=reduce)
    with pytest.raises(OptionError, match=r"call ottava\.convert"):
        ottava_debug.high_precision(torch.nn.Linear(4, 4))
    with pytest.raises(DTypeError, match="model is a str"):
        ottava_debug.high_precision("model")
    with pytest.raises(OptionError, match="'warn' or 'raise'"):
        ottava_debug.on_error("exit")
    assert ottava.nn.function.inspector is None


def test_layers_of_a_model_are_chosen_by_patterns_or_a_predicate() -> None:
    model = torch.nn.ModuleDict({name: layer_of("current") for name in ("a", "b", "c")})
    x, _ = inputs()

    def measured(layers: Any) -> list[str]:
        with ottava_debug.statistics(model, "max", layers=layers, tensors="output") as run:
            for layer in model.values():
                layer(x)
            layer_of("current")(x)
        return [each.layer for each in run.found]

    assert measured(None) == ["a", "b", "c"]
    assert measured("[ab]") == measured(["a", "b"]) == ["a", "b"]
    assert measured(lambda name, layer: layer is model["c"]) == ["c"]
    with pytest.warns(
        UserWarning, match=r"layers 'z\*' matches no layer\. Layers of the model: 'a'"
    ):
        assert measured(["a", "z*"]) == ["a"]
