"""Recipe files: what serves which layer and role, in YAML and TOML."""

from __future__ import annotations

import copy
import cProfile
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import QuantizerRequest, QuantizerRole
from ottava.errors import OptionError
from ottava.formats import Format
from ottava_custom import CustomRecipe, HybridQuantizer, IdentityQuantizer
from ottava_custom.files import FileFactory, load_factory

pytestmark = pytest.mark.usefixtures("published_for_files")

YAML = """\
# The same as TOML says.
default: alpha
layers:
  - match: [head, "blocks.0.*"]
    all: identity
  - match: "blocks.*.up"
    forward: {recipe: alpha, fp8_format: E4M3}
    backward:
      recipe: alpha
      fp8_format: E5M2
      flag: true
  - match: "*.down"
    input: {rowwise: alpha, columnwise: identity}
    weight: {factory: weights}
    grad_output: keeper
"""
TOML = """\
# The same as YAML says.
default = "alpha"

[[layers]]
match = ["head", "blocks.0.*"]
all = "identity"

[[layers]]
match = "blocks.*.up"
forward = { recipe = "alpha", fp8_format = "E4M3" }
backward.recipe = "alpha"
backward.fp8_format = "E5M2"
backward.flag = true

[[layers]]
match = '*.down'
weight.factory = "weights"
grad_output = "keeper"
[layers.input]
rowwise = "alpha"
columnwise = "identity"
"""
# Layer, role: rowwise, columnwise, line in YAML, line of the rule.
SERVES = [
    ("head", "weight", "identity", "identity", 5, 4),
    ("blocks.0.up", "grad_output", "identity", "identity", 5, 4),
    ("blocks.1.up", "input", "alpha E4M3", "alpha E4M3", 7, 6),
    ("blocks.1.up", "output", "alpha E4M3", "alpha E4M3", 7, 6),
    ("blocks.1.up", "grad_output", "alpha E5M2, flag=True", "alpha E5M2, flag=True", 8, 6),
    ("blocks.1.down", "input", "alpha E4M3", "identity", 13, 12),
    ("blocks.1.down", "weight", "weights: Q E5M2", "weights: Q E5M2", 14, 12),
    ("blocks.1.down", "grad_output", "keeper E4M3", "keeper E4M3", 15, 12),
    ("blocks.1.down", "grad_input", "alpha E5M2", "alpha E5M2", 2, None),
    ("blocks.1.qkv", "weight", "alpha E4M3", "alpha E4M3", 2, None),
    ("", "input", "alpha E4M3", "alpha E4M3", 2, None),
]
HIGH = "high_precision"
#: Line in YAML -> place in TOML.
PLACES = {2: "default", 4: "layers[0]", 6: "layers[1]", 12: "layers[2]", 5: "layers[0].all"}
PLACES |= {7: "layers[1].forward", 8: "layers[1].backward", 13: "layers[2].input"}
PLACES |= {14: "layers[2].weight", 15: "layers[2].grad_output"}


def role(name: str, tensor_type: str) -> QuantizerRole:
    return QuantizerRole("linear", tensor_type, name)


def factory(text: str, path: str = "model.yaml") -> Any:
    return FileFactory(path, text)


def write(folder: Path, text: str, name: str = "model.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("suffix", ["yaml", "yml", "toml", "YAML"])
def test_what_serves_a_role(tmp_path: Path, suffix: str, ending: str) -> None:
    is_toml = suffix == "toml"
    text = "\ufeff" + (TOML if is_toml else YAML).replace("\n", ending)
    loaded = load_factory(write(tmp_path, text, f"model.{suffix}"))
    for name, tensor_type, rowwise, columnwise, line, rule_line in SERVES:
        found = loaded.explain(role(name, tensor_type))
        assert (found.rowwise, found.columnwise) == (rowwise, columnwise)
        assert found.place == (PLACES[line] if is_toml else f"line {line}")
        if rule_line is None:
            assert found.rule is None
        else:
            assert found.rule in loaded.rules()
            assert found.rule.place == (PLACES[rule_line] if is_toml else f"line {rule_line}")
    assert [rule.text for rule in loaded.rules()] == ["head, blocks.0.*", "blocks.*.up", "*.down"]


def test_what_the_factory_gives() -> None:
    """Recipes are asked for, so that they may keep state; the rest is made."""
    made = factory(YAML)
    assert isinstance(made(role("head", "weight")), IdentityQuantizer)
    up = made(role("blocks.2.up", "grad_output"))
    assert isinstance(up, QuantizerRequest)
    assert (up.recipe.fp8_format, up.recipe.flag) == (Format.E5M2, True)
    assert made(role("blocks.1.down", "grad_output")).recipe.stateful
    assert made(role("blocks.1.down", "weight")).recipe == "weights"
    hybrid = made(role("blocks.1.down", "input"))
    assert isinstance(hybrid, HybridQuantizer)
    assert isinstance(hybrid.columnwise_quantizer, IdentityQuantizer)
    assert hybrid.rowwise_quantizer.recipe.name == "alpha"
    # A word is a tensor type.
    assert made("weight").recipe.name == "alpha"
    assert made.explain("grad_output").rowwise == "alpha E5M2"


def test_factories_compare_copy_and_pickle(tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    one, two = load_factory(path), load_factory(str(path))
    assert (one, hash(one)) == (two, hash(two))
    changed = load_factory(write(tmp_path, YAML + "\n"))
    moved = load_factory(write(tmp_path, YAML, "other.yaml"))
    assert len({one, changed, moved}) == 3
    assert one not in (changed, moved, "model.yaml")
    path.unlink()
    for duplicate in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
        assert duplicate == one
        assert duplicate.explain(role("head", "weight")) == one.explain(role("head", "weight"))
    assert "model.yaml" in repr(one)


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("head", ["head", "head.inner"], ["ahead", "heads", ""]),
        ("blocks.1", ["blocks.1.up", "blocks.1"], ["blocks.10.up", "blocks.11"]),
        ("*.up", ["blocks.0.up", "blocks.0.up.lora"], ["up", "blocks.0.upper"]),
        ("blocks.[!0]*", ["blocks.12.up", "blocks.1"], ["blocks.0.up"]),
        ("blocks.?.up", ["blocks.3.up"], ["blocks.33.up"]),
        ("*", ["", "a", "a.b"], []),
        ("Head", ["Head"], ["head"]),
    ],
)
def test_patterns_fit_layers_and_the_modules_around_them(
    pattern: str, fitting: list[str], others: list[str]
) -> None:
    made = factory(f"default: alpha\nlayers: [{{match: '{pattern}', all: identity}}]")
    assert [n for n in (*fitting, *others) if made.explain(role(n, "input")).rule] == fitting


def test_a_recipe_goes_before_a_factory_of_its_name() -> None:
    assert isinstance(factory("default: alpha")("input"), QuantizerRequest)
    assert factory("default: asks")("input").recipe.flag
    with pytest.raises(AssertionError, match="the recipe of this name serves") as caught:
        factory("default: {factory: alpha}")("input")
    assert caught.value.__notes__ == ["model.yaml, line 1, column 20"]


def test_a_factory_may_leave_a_role_to_the_next_rule() -> None:
    made = factory(
        "default: identity\nlayers:\n- {match: '*', all: weights}\n"
        "- {match: '*', input: asks, weight: alpha}\n"
    )
    places = [made.explain(role("a", t)).place for t in ("weight", "input", "grad_output")]
    assert places == ["line 3", "line 4", "line 1"]
    assert made.explain(role("a", "input")).rowwise == "asks: alpha E4M3"


def test_a_role_that_nothing_serves_is_named() -> None:
    complete = factory("layers: [{match: '*', input: alpha, weight: alpha, grad_output: alpha}]")
    assert complete("weight").recipe.name == "alpha"
    half = factory("default:\n  {rowwise: weights,\n   columnwise: alpha}")
    assert isinstance(half("weight"), HybridQuantizer)
    weights, keeps = (
        factory("default:\n  weights\n"),
        factory("default: {rowwise: alpha,\n columnwise: keeps}"),
    )
    for made, tensor_type, words in (
        (complete, "output", "model.yaml: nothing serves 'output' of layer 'a'"),
        (weights, "input", "model.yaml, line 1, column 1: nothing serves 'input' of layer 'a'"),
        (half, "input", "line 2, column 13: there is no quantizer for 'input' of layer 'a'"),
        (keeps, "input", "line 2, column 14: a recipe that keeps state"),
        (factory("default: wrong"), "input", "line 1, column 10: factory 'wrong' returned a int"),
    ):
        with pytest.raises(OptionError) as caught:
            made(role("a", tensor_type))
        assert words in str(caught.value)
    with pytest.raises(ZeroDivisionError, match="in the factory") as failed:
        factory("# x\ndefault: {factory: fails}")("input")
    assert failed.value.__notes__ == ["model.yaml, line 2, column 20"]


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("fp8_format: E5M2", "fp8_format", Format.E5M2),
        ("flag: true", "flag", True),
        ("epsilon: 1e-4", "epsilon", 1e-4),
        ("epsilon: 0x10", "epsilon", 16),
        ("epsilon: 0o17", "epsilon", 15),
        ("epsilon: .inf", "epsilon", float("inf")),
        ("shape: [2, 3]", "shape", (2, 3)),
        ("rounding: no", "rounding", "no"),
        ("rounding: 'E5M2'", "rounding", "E5M2"),
        ("rounding: 1:30", "rounding", "1:30"),
        ("rounding: 2020-01-01", "rounding", "2020-01-01"),
        ("rounding: !!str 5", "rounding", "5"),
        ("rounding: null", "rounding", None),
        ("rounding: {a: [b]}", "rounding", {"a": ["b"]}),
    ],
)
def test_options_are_values_of_yaml_1_2(text: str, option: str, value: object) -> None:
    recipe = factory(f"default: {{recipe: alpha, {text}}}")("input").recipe
    assert getattr(recipe, option) == value
    assert type(getattr(recipe, option)) is type(value)
    assert factory("default: {recipe: needy, scale: 2.5}")("input").recipe.scale == 2.5


def test_an_alias_is_the_same_recipe() -> None:
    made = factory(
        "layers:\n- {match: a, weight: &x {recipe: alpha, flag: true}}\n- {match: b, input: *x}\n"
        "- {match: d, all: {recipe: alpha, flag: false}}\ndefault: *x\n"
    )
    recipes = [made(role(name, t)).recipe for name, t in (("a", "weight"), ("b", "input"))]
    assert recipes[0] is recipes[1] is made(role("c", "input")).recipe
    assert made(role("d", "input")).recipe.flag is False
    assert made.explain(role("b", "input")).place == "line 3"


def calls_of(text: str) -> int:
    """How many functions Python calls to read a file."""
    profile = cProfile.Profile()
    profile.runcall(factory, text, "model.toml")
    return sum(entry.callcount for entry in profile.getstats())


def test_a_side_reads_what_the_backward_pass_of_its_recipe_reads() -> None:
    side = "{recipe: custom, backward: high_precision}"
    made = factory(f"default: {{rowwise: {side}, columnwise: {side}}}")
    for tensor_type in ("input", "weight", "grad_output"):
        kinds = [side.in_high_precision for side in made(tensor_type).sides]
        assert kinds == [tensor_type == "grad_output", True]


def test_a_rule_for_each_of_many_layers() -> None:
    """Files are read in time that grows as they do."""
    rule = "[[layers]]\nmatch = 'blocks.{}.query'\nall = 'identity'\n"
    few, many = ("".join(map(rule.format, range(size))) for size in (50, 200))
    default = "default = 'alpha'\n"
    assert calls_of(default + many) < 5 * calls_of(default + few)


def test_a_model_under_the_recipe_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, YAML.replace("keeper", "alpha"))
    recipe = ottava.get_recipe(path)
    assert recipe == ottava.get_recipe("custom", file=path)
    explained = recipe.explain(role("blocks.1.down", "input"))
    assert (explained.columnwise, explained.place) == ("identity", "line 13")
    assert [rule.place for rule in recipe.rules()] == ["line 4", "line 6", "line 12"]
    for way in (
        ottava.get_recipe("custom", backward=HIGH),
        CustomRecipe.from_file(path, backward=HIGH),
        ottava.get_recipe(path, backward=HIGH),
    ):
        assert (way.backward, way.explain("input").columnwise) == (HIGH, "high precision")
    way.set_quantizer_factory(lambda role: IdentityQuantizer())
    assert way.explain("input").rowwise == "IdentityQuantizer"
    made: Any = recipe.quantizer(role("blocks.1.up", "input"), amax_reduction_group="group")
    assert made.group == "group"
    blocks = [{part: torch.nn.Linear(4, 4) for part in ("up", "down")} for _ in range(2)]
    model = {"blocks": torch.nn.ModuleList(map(torch.nn.ModuleDict, blocks))}
    ottava.convert(torch.nn.ModuleDict(model | {"head": torch.nn.Linear(4, 4)}), recipe)
    with pytest.raises(OptionError, match=r"line 4, column 13: pattern 'head' matches no layer"):
        ottava.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), recipe)


def test_a_file_inside_a_file(tmp_path: Path) -> None:
    inner = write(tmp_path, "default: alpha\nlayers: [{match: a, all: identity}]\n", "inner.yaml")
    made = factory(f"default: {{recipe: custom, file: {inner}}}")
    assert made.explain(role("a", "input")).rowwise.startswith("identity")
    assert made.explain(role("b", "input")).rowwise.startswith("alpha E4M3")
    for text in (
        "default: {}",
        "default: {{rowwise: {}, columnwise: identity}}",
        "default: alpha\nlayers: [{{match: b, all: {{rowwise: alpha, columnwise: {}}}}}]",
    ):
        made = factory(text.format(f"{{recipe: custom, file: {inner}}}"))
        with pytest.raises(OptionError, match=r"inner.yaml.*pattern 'a' matches no layer"):
            made.check_layers(["b"])
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"default:\n  recipe: custom\n  file: {two}\n")
    two.write_text(f"\ndefault: {{recipe: custom, file: {one}}}\n")
    words = r"one.yaml, line 3.*two.yaml, line 2.*one.yaml is read from itself"
    with pytest.raises(OptionError, match=words):
        load_factory(one)
