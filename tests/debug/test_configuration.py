"""What is wrong in a configuration is told with section, key, line and what is allowed; what
matches nothing is warned of; nothing exits."""

import textwrap
import warnings

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from eight_layers import GOOD, NAMES, model_of, step

import ottava
from ottava.errors import OptionError
from ottava_debug.located import Located
from ottava_debug.selectors import Selector

OF_FAKE_QUANT = "section 'it', FakeQuant"

# What is replaced in the good file, by what, the line, and what the error says besides.
WRONG = {
    "unknown format": (
        "FP8E4M3",
        "FP8E4M4",
        11,
        [OF_FAKE_QUANT, "quant_format", "FP8E4M4", "FP8E4M3, FP8E5M2"],
    ),
    "a format of no package": ("FP8E4M3", "ACME9E4M3", 11, ["pip install ottava-recipes-acme9"]),
    "no format": ("      quant_format: FP8E4M3\n", "", 8, [OF_FAKE_QUANT, "no quant_format"]),
    "unknown gemm": (
        "[fprop]",
        "[fprop, fprob]",
        9,
        [OF_FAKE_QUANT, "gemms", "fprob", "dgrad, fprop, wgrad", "'fprop'"],
    ),
    "unknown tensor": (
        "[weight]",
        "[weights]",
        10,
        [OF_FAKE_QUANT, "tensors", "weights", "activation, dgrad, gradient"],
    ),
    "unknown key": (
        "quant_format:",
        "quant_fromat:",
        11,
        [OF_FAKE_QUANT, "quant_fromat", "use 'quant_format'"],
    ),
    "no tensors": (
        "      tensors: [weight]\n",
        "",
        8,
        [OF_FAKE_QUANT, "no tensors", "tensors_struct"],
    ),
    "no gemms": ("      gemms: [fprop]\n", "", 8, [OF_FAKE_QUANT, "no gemms", "gemms_struct"]),
    "a pair that no product has": (
        "[weight]",
        "[gradient]",
        8,
        [OF_FAKE_QUANT, "of fprop activation, weight, output"],
    ),
    "a struct that is no list": (
        "gemms: [fprop]",
        "gemms_struct: fprop",
        9,
        [OF_FAKE_QUANT, "gemms_struct"],
    ),
    "a struct without a name": (
        "gemms: [fprop]",
        "gemms_struct: [{gem: fprop}]",
        9,
        [OF_FAKE_QUANT, "no gemm"],
    ),
    "a struct with a wrong key": (
        "gemms: [fprop]\n      tensors: [weight]",
        "gemms_struct: [{gemm: fprop, tensor: [weight]}]",
        9,
        [OF_FAKE_QUANT, "no key 'tensor'", "use 'tensors'"],
    ),
    "a section twice": (GOOD, GOOD + GOOD.strip(), 12, ["'it' stands twice, first in line 2"]),
    "a key twice": (
        "gemms:",
        "freq: 2\n      freq: 3\n      gemms:",
        10,
        ["'freq' stands twice, first in line 9"],
    ),
    "unknown feature": (
        "FakeQuant",
        "FakeQuantize",
        7,
        ["section 'it'", "transformer_engine", "use 'FakeQuant'"],
    ),
    "unknown namespace": (
        "transformer_engine",
        "transformer_motor",
        6,
        ["section 'it'", "one of LogTensorStats, enabled, layers, on_error, ottava"],
    ),
    "unknown selector": (
        "layer_name_regex_pattern",
        "layer_regex",
        5,
        ["section 'it'", "layers", "exact_layer_names"],
    ),
    "no regular expression": (
        "pattern: .*",
        "pattern: '*'",
        5,
        ["section 'it'", "regular expression"],
    ),
    "no layers": (
        "  layers:\n    layer_name_regex_pattern: .*\n",
        "",
        2,
        ["section 'it'", "has no layers"],
    ),
    "no enabled": ("it:\n  enabled: True", "it:", 2, ["section 'it'", "has no enabled"]),
    "enabled is text": (
        "  enabled: True\n  l",
        "  enabled: maybe\n  l",
        3,
        ["section 'it'", "'maybe'", "True or False"],
    ),
    "a feature without enabled": (
        "      enabled: True\n",
        "",
        7,
        [OF_FAKE_QUANT, "has no enabled"],
    ),
    "a step that is none": (
        "enabled: True\n      g",
        "start_step: soon\n      enabled: True\n      g",
        8,
        ["start_step"],
    ),
    "a range backwards": (
        "gemms:",
        "start_end_list: [[5, 2]]\n      gemms:",
        9,
        ["start_end_list", "ascending"],
    ),
    "ranges that overlap": (
        "gemms:",
        "start_end_list: [[1, 4], [3, 5]]\n      gemms:",
        9,
        ["start_end_list", "overlap"],
    ),
    "freq of zero": ("gemms:", "freq: 0\n      gemms:", 9, ["freq"]),
    "on_error": ("gemms:", "on_error: exit\n      gemms:", 9, ["on_error", "warn or raise"]),
    "not YAML": ("[fprop]", "[fprop", 10, ["not YAML"]),
    "a list": (GOOD, "- a\n", None, ["a list of 1", "sections"]),
    "nothing": (GOOD, "\n", None, ["nothing", "sections"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_before_anything_runs(case, initialize):
    old, new, line, told = WRONG[case]
    assert old in GOOD
    text = GOOD.replace(old, new)
    with pytest.raises(OptionError) as caught:
        initialize(text)
    assert isinstance(caught.value, ValueError)
    for words in [*told, *([f"debug.yaml, line {line}"] if line else ["debug.yaml"])]:
        assert words in str(caught.value), caught.value
    # It can be put right in the same process.
    initialize(GOOD)
    assert debug_api.transformer_engine.fp8_gemm_enabled("x", gemm="fprop", iteration=0) is False


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(OptionError, match=r"nowhere\.yaml cannot be read"):
        debug_api.initialize(config_file=str(tmp_path / "nowhere.yaml"), log_dir=str(tmp_path))
    debug_api.initialize(log_dir=str(tmp_path))
    debug_api.end_debug()


def test_a_dict_is_taken_too(tmp_path):
    section = {"enabled": True, "layers": {"layer_types": ["fc1"]}}
    section["ottava"] = {"DisableFP8GEMM": {"enabled": True, "gemms": ["dgrad"]}}
    with pytest.raises(
        OptionError, match="the configuration: section 'a', DisableFP8GEMM: gemms has 'x'"
    ):
        wrong = {"DisableFP8GEMM": {"enabled": True, "gemms": ["x"]}}
        debug_api.initialize(config_file={"a": section | {"ottava": wrong}}, log_dir=str(tmp_path))
    debug_api.initialize(config_file={"a": section}, log_dir=str(tmp_path))
    assert debug_api.ottava.fp8_gemm_enabled("b.fc1", gemm="dgrad", iteration=0) is False
    assert debug_api.ottava.fp8_gemm_enabled("b.fc1", gemm="fprop", iteration=0) is True
    assert debug_api.ottava.fp8_gemm_enabled("b.fc2", gemm="dgrad", iteration=0) is True
    debug_api.end_debug()


SELECTORS = [
    ({"exact_layer_names": ["model.blocks.0.fc1"]}, ["model.blocks.0.fc1"]),
    (
        {"layer_name_regex_pattern": r"\.1\..*(fc1|qkv)"},
        ["model.blocks.1.qkv", "model.blocks.1.fc1"],
    ),
    ({"layer_types": ["fc1"]}, ["model.blocks.0.fc1", "model.blocks.1.fc1"]),
    ({"layer_types": ["all"]}, NAMES),
    ({"layer_types": "proj"}, ["model.blocks.0.proj", "model.blocks.1.proj"]),
    ({"layer_numbers": 1}, NAMES[4:]),
    ({"layer_numbers": [0]}, NAMES[:4]),
    ({"layer_numbers": ["0-0", 1]}, NAMES),
    ({"layer_numbers": "all"}, NAMES),
    ({"layer_numbers": [0], "layer_types": ["fc1", "fc2"]}, NAMES[2:4]),
    # Of these nvdlfw-inspect takes the first alone.
    ({"exact_layer_names": NAMES[:1], "layer_types": ["fc2"]}, NAMES[:1]),
    ({"layer_name_regex_pattern": "qkv", "layer_numbers": [0]}, [NAMES[0], NAMES[4]]),
]


@pytest.mark.parametrize(("given", "expected"), SELECTORS, ids=lambda value: str(value)[:60])
def test_selectors(given, expected):
    selector = Selector(Located(given), "section")
    assert [name for name in NAMES if selector.matches(name)] == expected
    assert selector.unmatched == {}
    # Names without a number, and with several, are no errors.
    assert selector.matches("model.head") == (given.get("layer_types") == ["all"])
    selector.matches("model.layers.3.experts.17.fc1")


def test_a_layers_number_is_the_first_of_its_name():
    selector = Selector(Located({"layer_numbers": ["2-4"]}), "section")
    found = [
        f"layers.{n}.experts.3.w1" for n in range(8) if selector.matches(f"layers.{n}.experts.3.w1")
    ]
    assert found == [f"layers.{n}.experts.3.w1" for n in (2, 3, 4)]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"layer_numbers": "x"},
        {"layer_numbers": [True]},
        {"layer_numbers": []},
        {"exact_layer_names": [3]},
        {"typo": 1},
    ],
    ids=str,
)
def test_selectors_that_are_wrong(given):
    with pytest.raises(OptionError, match="section"):
        Selector(Located(given), "section")


def test_patterns_that_match_nothing_are_named(initialize):
    text = """
    first:
      enabled: True
      layers: {exact_layer_names: [model.blocks.0.fc1, model.blocks.7.fc1]}
      ottava: {DisableFP8Layer: {enabled: True}}
    second:
      enabled: True
      layers:
        layer_name_regex_pattern: attention
      ottava: {DisableFP8Layer: {enabled: True}}
    """
    initialize(text)
    model = model_of("current")
    debug_api.infer_and_assign_layer_names(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
    with pytest.warns(UserWarning, match="matches no layer") as caught:
        debug_api.step()
    told = [str(warning.message) for warning in caught]
    assert len(told) == 2
    assert "line 4: exact_layer_names 'model.blocks.7.fc1' matches no layer" in told[0]
    assert "line 9: layer_name_regex_pattern 'attention' matches no layer" in told[1]
    assert "model.blocks.0.qkv" in told[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        debug_api.step()
        debug_api.end_debug()


def test_patterns_that_match_nothing_are_named_where_no_step_ends(initialize):
    initialize(GOOD.replace(".*", "attention"))
    step(model_of("current"))
    with pytest.warns(
        UserWarning, match=r"line 5: layer_name_regex_pattern 'attention' matches no layer.*fc1"
    ):
        debug_api.end_debug()


def test_layers_of_one_name_are_told(initialize):
    initialize(GOOD)
    models = [ottava.nn.Linear(8, 8, recipe="current", name="same") for _ in range(2)]
    x = torch.randn(4, 8)
    models[0](x)
    with pytest.warns(
        UserWarning, match="several layers are called 'same'.*infer_and_assign_layer_names"
    ) as caught:
        [model(x) for model in models * 2]
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ottava.nn.Linear(8, 8, recipe="current", name="other")(x)


@pytest.mark.parametrize("name", ["DisableQuantizationLayer", "DisableQuantizationGEMM"])
def test_newer_names_of_features(initialize, name):
    expected = step(model_of(None))
    options = "" if name.endswith("Layer") else ", gemms: [fprop, dgrad, wgrad]"
    layers = "layers: {layer_types: [all]}"
    initialize(
        f"it:\n  enabled: True\n  {layers}\n  transformer_engine:\n    {name}: {{enabled: "
        f"True{options}}}\n"
    )
    assert all(torch.equal(a, b) for a, b in zip(step(model_of("current")), expected, strict=True))


def test_two_sections_with_the_same_feature_for_a_layer(initialize):
    section = "layers: {{layer_types: [{}]}}\n  ottava: {{DisableFP8Layer: {{enabled: True}}}}"
    first, second = (section.format(name) for name in ("fc1", "blocks.0"))
    initialize(f"first:\n  enabled: True\n  {first}\nsecond:\n  enabled: True\n  {second}\n")
    with pytest.raises(
        OptionError, match=r"layer 'blocks\.0\.fc1' has DisableFP8Layer twice, of .*line 4.* line 8"
    ):
        step(model_of("current"))


def test_the_api_is_asked_by_hand(initialize, tmp_path):
    initialize(GOOD)
    api = debug_api.transformer_engine
    assert api.fp8_gemm_enabled("a", gemm="fprop", iteration=0) is False
    assert api.fp8_gemm_enabled("a", gemm="wgrad", iteration=0) is True
    assert api.modify_tensor_enabled("a", gemm="fprop", tensor_name="weight", iteration=0) is True
    assert (
        api.modify_tensor_enabled("a", gemm="fprop", tensor_name="activation", iteration=0) is False
    )
    x = torch.randn(4, 5)
    made = api.modify_tensor("a", gemm="fprop", tensor_name="weight", tensor=x, iteration=0)
    assert torch.equal(made, ottava.debug.fake_quantize(x, "FP8E4M3"))
    # The other namespace has nothing for the layer.
    assert debug_api.ottava.fp8_gemm_enabled("a", gemm="fprop", iteration=0) is True


def test_yaml_of_all_kinds_is_read_as_pyyaml_reads_it(tmp_path):
    import yaml

    from ottava_debug.located import plain, read

    text = textwrap.dedent("""
    base: &base {enabled: yes, list: [1, two, {three: 0x3}]}
    a:
      <<: *base
      more: on
    b: *base
    1: ~
    """)
    path = tmp_path / "x.yaml"
    path.write_text(text)
    found = read(path)
    assert plain(found) == {str(key): value for key, value in yaml.safe_load(text).items()}
    assert (found.lines["b"], found["a"].lines["more"]) == (6, 5)


def test_an_empty_list_is_nothing_to_do(initialize):
    initialize(GOOD.replace("[fprop]", "[]"))
    asked = {"layer_name": "x", "gemm": "fprop", "tensor_name": "weight", "iteration": 0}
    assert debug_api.transformer_engine.fp8_gemm_enabled("x", gemm="fprop", iteration=0) is True
    assert debug_api.transformer_engine.modify_tensor_enabled(**asked) is False
