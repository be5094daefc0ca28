"""Features of one's own: what they are called with, and what becomes of their errors."""

import warnings

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from eight_layers import GOOD, layers_of, model_of, step

import ottava
from ottava.errors import OptionError, PluginError

FEATURES = """
import sys
import torch
from nvdlfw_inspect.registry import Registry, api_method
from ottava_debug import Feature


@Registry.register_feature(namespace="transformer_engine")
class Half:
    calls = []

    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return gemm == "fprop" and tensor_name == "output", iteration + 1

    @api_method
    def modify_tensor(
        self, config, layer_name, tensor_name, gemm, tensor, iteration, default_quantizer, out=None
    ):
        self.calls.append((layer_name, gemm, tensor_name, config["by"]))
        return tensor * config["by"]


@Registry.register_feature(namespace="transformer_engine")
class Looks:
    seen = []

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return tensor_name in config["tensors"]

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor):
        self.seen.append((layer_name, tensor_name, tuple(tensor.shape), iteration))

    @api_method
    def inspect_tensor_postquantize(
        self, config, layer_name, gemm, tensor_name, tensor, rowwise, iteration, **rest
    ):
        self.seen.append((layer_name, gemm, tensor_name, type(tensor).__name__, rowwise))


@Registry.register_feature(namespace="ottava")
class FailsAfter(Feature):
    def step(self):
        sys.exit(4)


@Registry.register_feature(namespace="ottava")
class InPlace:
    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return (gemm, tensor_name) == ("fprop", "weight")

    @api_method
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, iteration):
        return tensor.mul_(0.5)


@Registry.register_feature(namespace="ottava")
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
        raise AttributeError("no such thing")
"""


@pytest.fixture
def features(tmp_path):
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "own.py").write_text(FEATURES)
    return [str(folder)]


def section(feature, namespace="transformer_engine", **options):
    given = ", ".join(f"{key}: {value}" for key, value in {"enabled": True, **options}.items())
    return f"""
    own:
      enabled: True
      layers: {{exact_layer_names: [model.blocks.0.fc1]}}
      {namespace}:
        {feature}: {{{given}}}
    """


def test_features_of_ones_own(initialize, features):
    expected = step(model_of("current"))
    initialize(section("Half", by=0.5), feature_dirs=features)
    model = model_of("current")
    debug_api.infer_and_assign_layer_names(model)
    outputs = {}
    for name, layer in layers_of(model).items():
        layer.register_forward_hook(
            lambda layer, x, y, name=name: outputs.__setitem__(name, (x[0].detach(), y.detach()))
        )
    found = step(model)
    assert not torch.equal(found[0], expected[0])
    (half,) = {id(m): m for m in [debug_api.transformer_engine.namespace_features["Half"]]}.values()
    assert half.calls == [("model.blocks.0.fc1", "fprop", "output", 0.5)]
    x, y = outputs["model.blocks.0.fc1"]
    debug_api.end_debug()
    assert torch.equal(y, layers_of(model)["model.blocks.0.fc1"](x) * 0.5)


def test_features_of_ones_own_that_look(initialize, features):
    expected = step(model_of("current"))
    initialize(section("Looks", tensors="[activation, gradient]"), feature_dirs=features)
    model = model_of("current")
    debug_api.infer_and_assign_layer_names(model)
    found = step(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    layer = "model.blocks.0.fc1"
    assert debug_api.transformer_engine.namespace_features["Looks"].seen == [
        (layer, "activation", (12, 40), 0),
        (layer, "fprop", "activation", "Float8TensorStorage", True),
        (layer, "fprop", "weight", "Float8TensorStorage", True),
        (layer, "gradient", (12, 32), 0),
        (layer, "dgrad", "gradient", "Float8TensorStorage", True),
        (layer, "dgrad", "weight", "Float8TensorStorage", False),
        (layer, "wgrad", "gradient", "Float8TensorStorage", False),
        (layer, "wgrad", "activation", "Float8TensorStorage", False),
    ]


@pytest.mark.parametrize("tensor", ["weight", "gradient"])
@pytest.mark.parametrize(
    ("how", "told"), [("raise", "no such thing"), ("exit", "SystemExit"), ("shape", r"\(3,\)")]
)
def test_a_feature_that_fails_is_switched_off_for_its_layer(
    initialize, features, how, told, tensor
):
    expected = step(model_of("current"))
    initialize(section("Fails", "ottava", how=how, tensor=tensor), feature_dirs=features)
    model = model_of("current")
    debug_api.infer_and_assign_layer_names(model)
    with pytest.warns(
        UserWarning,
        match=rf"line 6: section 'own', Fails: modify_tensor failed in layer .*fc1'.*{told}",
    ) as w:
        found = step(model)
    assert len(w) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)


@pytest.mark.parametrize("where", ["feature", "function"])
def test_a_feature_that_fails_stops_training_where_that_is_asked_for(initialize, features, where):
    import ottava_debug

    options = {"on_error": "raise"} if where == "feature" else {}
    if where == "function":
        ottava_debug.on_error("raise")
    try:
        initialize(
            section("Fails", "ottava", how="exit", tensor="weight", **options),
            feature_dirs=features,
        )
        model = model_of("current")
        debug_api.infer_and_assign_layer_names(model)
        with pytest.raises(
            PluginError,
            match=r"line 6: section 'own', Fails: modify_tensor failed in layer .*SystemExit",
        ):
            step(model)
    finally:
        ottava_debug.on_error("warn")
    with pytest.raises(OptionError, match="'warn' or 'raise'"):
        ottava_debug.on_error("exit")


def test_a_feature_that_fails_after_a_step_is_switched_off(initialize, features):
    initialize(section("FailsAfter", "ottava"), feature_dirs=features)
    model = model_of("current")
    debug_api.infer_and_assign_layer_names(model)
    step(model)
    with pytest.warns(
        UserWarning, match="line 6: section 'own', FailsAfter: step failed: SystemExit: 4. .*off"
    ):
        debug_api.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
        debug_api.step()
        debug_api.end_debug()


def test_a_feature_that_fails_after_a_step_stops_training_where_that_is_asked_for(
    initialize, features
):
    initialize(section("FailsAfter", "ottava", on_error="raise"), feature_dirs=features)
    model = model_of("current")
    debug_api.infer_and_assign_layer_names(model)
    step(model)
    for end in (debug_api.step, debug_api.end_debug):
        with pytest.raises(
            PluginError, match="line 6: section 'own', FailsAfter: step failed: SystemExit: 4"
        ):
            end()
    # What failed is forgotten all the same.
    initialize(GOOD)
    assert ottava.nn.function.inspector is not None
    debug_api.end_debug()
    assert ottava.nn.function.inspector is None


def test_a_feature_may_change_the_tensor_that_it_modifies(initialize, features):
    initialize(section("InPlace", "ottava"), feature_dirs=features)
    model = model_of("current")
    debug_api.infer_and_assign_layer_names(model)
    layer, x = layers_of(model)["model.blocks.0.fc1"], torch.randn(12, 40)
    weight = layer.weight.detach().clone()
    found = layer(x)
    assert torch.equal(layer.weight, weight)
    debug_api.end_debug()
    with torch.no_grad():
        layer.weight.mul_(0.5)
    assert torch.equal(found, layer(x))


def test_a_feature_that_cannot_be_imported_is_an_error(initialize, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "own.py").write_text("raise KeyError('lost')")
    with pytest.raises(PluginError, match="lost"):
        initialize(GOOD, feature_dirs=[str(folder)])
    initialize(GOOD)
