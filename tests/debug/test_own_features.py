"""Features of users: their calls, and what becomes of their errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch

import ottava
import ottava_debug
from ottava.errors import PluginError
from tests.debug.by_hand import assert_results, inputs, layer_of, passes
from tests.debug.yaml_files import GOOD, section

Initialize = Callable[..., Path]
FEATURES = """
import sys
import torch
from nvdlfw_inspect.registry import Registry, api_method
from ottava_debug import Feature

register = Registry.register_feature(namespace="ottava")


@register
class Times:
    calls = []

    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return tensor_name == config["tensor"], iteration + 1

    @api_method
    def modify_tensor(
        self, config, layer_name, tensor_name, gemm, tensor, iteration, default_quantizer, out=None
    ):
        self.calls.append((layer_name, gemm, tensor_name, iteration, default_quantizer is None))
        return tensor.mul_(config["by"])


@register
class Looks:
    calls = []

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return tensor_name in config["tensors"]

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor):
        self.calls.append((tensor_name, tuple(tensor.shape), iteration))

    @api_method
    def inspect_tensor_postquantize_enabled(self, config, layer_name, gemm, iteration):
        return gemm != "dgrad"

    @api_method
    def inspect_tensor_postquantize(
        self, config, layer_name, gemm, tensor_name, tensor, rowwise, iteration, **rest
    ):
        self.calls.append((gemm, tensor_name, type(tensor).__name__, rowwise))


@register
class Parses:
    def parse_config_and_api(self, config, gemm_parsing, tensor_parsing, gemm=None, tensor_name=""):
        assert (gemm_parsing, tensor_parsing) == (gemm is not None, bool(tensor_name))
        return gemm == "fprop", {"of": config["tensor"]}

    @api_method
    def modify_tensor_enabled(self, config, layer_name, tensor_name):
        return tensor_name == config["of"]

    @api_method
    def modify_tensor(self, config, layer_name, tensor):
        return tensor * 2


@register
class FailsAfter(Feature):
    def step(self):
        sys.exit(4)


@register
class Fails:
    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return tensor_name == config["tensor"]

    @api_method
    def modify_tensor(self, config, layer_name, **given):
        if config["how"] == "exit":
            sys.exit(3)
        if config["how"] == "shape":
            return torch.zeros(3)
        if config["how"] == "text":
            return "text"
        if config["how"] == "device":
            return given["tensor"].to("meta")
        raise AttributeError("no such thing")
"""


@pytest.fixture
def begin(tmp_path: Path, initialize: Initialize) -> Callable[..., None]:
    """Initializes nvdlfw-inspect with a section for a feature of :data:`FEATURES`."""
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "own.py").write_text(FEATURES)

    def with_feature(feature: str, options: str = "", more: str = "") -> None:
        text = section(feature, options, namespace="ottava", more=more)
        initialize(text, feature_dirs=[str(folder)])

    return with_feature


def calls_of(feature: str) -> list[tuple[Any, ...]]:
    """The calls that a feature has kept, which it forgets."""
    calls = debug_api.ottava.namespace_features[feature].calls
    found = calls[:]
    calls.clear()
    return found


def test_a_feature_changes_tensors(begin: Callable[..., None]) -> None:
    x, dy = inputs()
    expected = passes(layer_of("current"), x, dy)
    begin("Times", "tensor: output, by: 0.5")
    layer = layer_of("current")
    found = passes(layer, x, dy)
    assert_results(found, expected | {"output": expected["output"] * 0.5})
    assert calls_of("Times") == [("layer", "fprop", "output", 0, True)]
    asked = {"gemm": "fprop", "tensor_name": "output", "iteration": 0}
    assert debug_api.ottava.modify_tensor_enabled("layer", **asked) == (True, 1)
    # A section enables the feature in its own namespace alone.
    assert not debug_api.transformer_engine.modify_tensor_enabled("layer", **asked)
    # A feature may change its tensor in place; the parameter stays as it is.
    begin("Times", "tensor: weight, by: 0.5")
    weight = layer.weight.detach().clone()
    found = passes(layer, x, dy)
    weights = [("layer", gemm, "weight", 0, False) for gemm in ("fprop", "dgrad")]
    assert calls_of("Times") == weights
    debug_api.end_debug()
    assert torch.equal(layer.weight, weight)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    assert_results(found, passes(layer, x, dy))
    # A feature may parse its options, as those of nvdlfw-inspect do.
    begin("Parses", "tensor: output")
    found = passes(layer_of("current"), x, dy)
    assert_results(found, expected | {"output": expected["output"] * 2})


def test_a_feature_looks_at_tensors(begin: Callable[..., None]) -> None:
    x, dy = inputs()
    expected = passes(layer_of("current"), x, dy)
    begin("Looks", "tensors: [activation, gradient]")
    debug_api.step()
    assert_results(passes(layer_of("current"), x, dy), expected)
    storage = "Float8TensorStorage"
    assert calls_of("Looks") == [
        ("activation", (16, 32), 1),
        ("fprop", "activation", storage, True),
        ("fprop", "weight", storage, True),
        ("gradient", (16, 48), 1),
        ("wgrad", "gradient", storage, False),
        ("wgrad", "activation", storage, False),
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "AttributeError: no such thing"),
        ("exit", "SystemExit: 3"),
        ("shape", r"it returned \(3,\) of torch.float32. Expected: a tensor \("),
        ("text", "it returned a str"),
        ("device", r"Expected: a tensor \(.* on cpu"),
    ],
)
def test_a_feature_that_fails_is_switched_off_for_its_layer(
    how: str, words: str, begin: Callable[..., None]
) -> None:
    x, dy = inputs()
    expected = passes(layer_of("current"), x, dy)
    words = f"line 5: section 'it', Fails: modify_tensor failed in layer 'layer': .*{words}"
    for tensor in ("weight", "gradient"):
        begin("Fails", f"how: {how}, tensor: {tensor}")
        layer = layer_of("current")
        with pytest.warns(UserWarning, match=f"{words}.*switched off") as caught:
            found = passes(layer, x, dy)
        assert len(caught) == 1
        assert_results(found, expected)
        with warnings.catch_warnings(action="error"):
            passes(layer, x, dy)
    # The feature, its section, or on_error() for all sections makes the error stop training.
    policy = "on_error: raise"
    for own, more, default in (
        (f", {policy}", "", "warn"),
        ("", policy, "warn"),
        ("", "", "raise"),
    ):
        ottava_debug.on_error(default)
        begin("Fails", f"how: {how}, tensor: weight{own}", more)
        ottava_debug.on_error("warn")
        with pytest.raises(PluginError, match=words):
            passes(layer_of("current"), x, dy)


def test_a_feature_that_fails_after_a_step(begin: Callable[..., None]) -> None:
    layer, (x, _) = layer_of("current"), inputs()
    words = "line 5: section 'it', FailsAfter: step failed: SystemExit: 4"
    begin("FailsAfter")
    layer(x)
    with pytest.warns(UserWarning, match=f"{words}. .*off"):
        debug_api.step()
    with warnings.catch_warnings(action="error"):
        layer(x)
        debug_api.step()
        debug_api.end_debug()
    begin("FailsAfter", "on_error: raise")
    layer(x)
    for end in (debug_api.step, debug_api.end_debug):
        with pytest.raises(PluginError, match=words):
            end()
    assert debug_api.DEBUG_MANAGER is None
    assert ottava.nn.function.inspector is None


def test_a_feature_that_cannot_be_imported(initialize: Initialize, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise KeyError('lost')")
    with pytest.raises(PluginError, match="cannot be imported: KeyError: 'lost'"):
        initialize(GOOD, feature_dirs=[str(tmp_path)])
    initialize(GOOD)
