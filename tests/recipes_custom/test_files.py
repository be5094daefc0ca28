"""Recipe files: what serves which layer and role, in YAML and TOML."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import QuantizerRequest, QuantizerRole
from ottava.errors import DTypeError, OptionError
from ottava.formats import Format

sys.path.insert(0, str(Path(__file__).parent))

from file_plugins import recipe_file_packages, write  # noqa: F401

from ottava_custom import HybridQuantizer, IdentityQuantizer
from ottava_custom.files import SUFFIXES, load_factory

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
# (layer, role) -> rowwise, columnwise, line in YAML, path in TOML, line and path of the rule.
EXPLAINED = {
    ("head", "weight"): ("identity", "identity", 5, "layers[0].all", 4, "layers[0]"),
    ("blocks.0.up", "grad_output"): ("identity", "identity", 5, "layers[0].all", 4, "layers[0]"),
    ("blocks.1.up", "input"): ("alpha E4M3", "alpha E4M3", 7, "layers[1].forward", 6, "layers[1]"),
    ("blocks.1.up", "output"): ("alpha E4M3", "alpha E4M3", 7, "layers[1].forward", 6, "layers[1]"),
    ("blocks.1.up", "grad_output"): (
        *("alpha E5M2, flag=True", "alpha E5M2, flag=True"),
        *(8, "layers[1].backward", 6, "layers[1]"),
    ),
    ("blocks.1.down", "input"): ("alpha E4M3", "identity", 13, "layers[2].input", 12, "layers[2]"),
    ("blocks.1.down", "weight"): (
        "weights: Q E5M2",
        "weights: Q E5M2",
        14,
        "layers[2].weight",
        12,
        "layers[2]",
    ),
    ("blocks.1.down", "grad_output"): (
        "keeper E4M3",
        "keeper E4M3",
        15,
        "layers[2].grad_output",
        12,
        "layers[2]",
    ),
    ("blocks.1.down", "grad_input"): ("alpha E5M2", "alpha E5M2", 2, "default", None, None),
    ("blocks.1.qkv", "weight"): ("alpha E4M3", "alpha E4M3", 2, "default", None, None),
    ("", "input"): ("alpha E4M3", "alpha E4M3", 2, "default", None, None),
}


def role(name: str, tensor_type: str) -> QuantizerRole:
    return QuantizerRole("linear", tensor_type, name)


@pytest.fixture(params=["yaml", "yml", "toml"])
def factory(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    text = TOML if request.param == "toml" else YAML
    return load_factory(write(tmp_path, text, f"model.{request.param}"))


@pytest.mark.parametrize(("name", "tensor_type"), list(EXPLAINED))
def test_what_serves(factory: Any, name: str, tensor_type: str) -> None:
    rowwise, columnwise, line, path, rule_line, rule_path = EXPLAINED[name, tensor_type]
    toml = factory.path.endswith("toml")
    found = factory.explain(role(name, tensor_type))
    assert (found.rowwise, found.columnwise) == (rowwise, columnwise)
    assert found.place == (path if toml else f"line {line}")
    assert (found.rule is None) == (rule_line is None)
    if found.rule is not None:
        assert found.rule.place == (rule_path if toml else f"line {rule_line}")
        assert found.rule in factory.rules()


def test_what_is_given(factory: Any) -> None:
    """Recipes are asked for, so that they may keep state; the rest is made."""
    assert isinstance(factory(role("head", "weight")), IdentityQuantizer)
    up = factory(role("blocks.2.up", "grad_output"))
    assert isinstance(up, QuantizerRequest)
    assert (up.recipe.fp8_format, up.recipe.flag) == (Format.E5M2, True)
    assert factory(role("blocks.1.down", "grad_output")).recipe.stateful
    assert factory(role("blocks.1.down", "weight")).recipe == "weights"
    hybrid = factory(role("blocks.1.down", "input"))
    assert isinstance(hybrid, HybridQuantizer)
    assert isinstance(hybrid.columnwise_quantizer, IdentityQuantizer)
    assert hybrid.rowwise_quantizer.recipe.name == "alpha"
    assert [rule.text for rule in factory.rules()] == ["head, blocks.0.*", "blocks.*.up", "*.down"]


def test_a_role_may_be_a_word(factory: Any) -> None:
    assert factory("weight").recipe.name == "alpha"
    assert factory.explain("grad_output").rowwise == "alpha E5M2"


def test_comparing_copying_and_pickling(tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    one, two = load_factory(path), load_factory(str(path))
    assert one == two
    assert hash(one) == hash(two)
    for made in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
        assert made == one
        assert made.explain(role("head", "weight")) == one.explain(role("head", "weight"))
    path.write_text(YAML + "\n")
    changed, moved = load_factory(path), load_factory(write(tmp_path, YAML, "other.yaml"))
    assert len({one, changed, moved}) == 3
    assert one != changed
    assert one != moved
    path.unlink()
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != "model.yaml"
    assert "model.yaml" in repr(one)


PRECEDENCE = """\
default: {recipe: alpha, epsilon: 0}
layers:
  - {match: a, weight: {recipe: alpha, epsilon: 1}}
  - match: "*"
    grad_input: {recipe: alpha, epsilon: 2}
    backward: {recipe: alpha, epsilon: 3}
    input: {recipe: alpha, epsilon: 4}
  - match: [a, b]
    all: {recipe: alpha, epsilon: 5}
    forward: {recipe: alpha, epsilon: 6}
"""


@pytest.mark.parametrize(
    ("name", "tensor_type", "epsilon"),
    [
        ("a", "weight", 1),
        ("a", "grad_input", 2),
        ("a", "grad_output", 3),
        ("a", "input", 4),
        ("a", "output", 6),
        ("b", "weight", 6),
        ("b", "of-another-kind", 6),
        ("c", "weight", 0),
        ("c", "grad_output", 3),
    ],
)
def test_the_first_rule_that_speaks_of_a_role_and_in_it_the_most_specific_key(
    tmp_path: Path, name: str, tensor_type: str, epsilon: int
) -> None:
    # The last rule's `all` would never serve: `backward` of the rule before has all gradients.
    text = PRECEDENCE.replace("    all: {recipe: alpha, epsilon: 5}\n", "")
    served = load_factory(write(tmp_path, text))(role(name, tensor_type))
    assert isinstance(served, QuantizerRequest)
    assert served.recipe.epsilon == epsilon
    with pytest.raises(OptionError, match=r"line 9, column 5: 'all' never serves"):
        load_factory(write(tmp_path, PRECEDENCE))


@pytest.mark.parametrize(
    ("pattern", "fits", "not_these"),
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
def test_patterns_fit_layers_and_the_modules_they_are_in(
    tmp_path: Path, pattern: str, fits: list[str], not_these: list[str]
) -> None:
    made = load_factory(
        write(tmp_path, f"default: alpha\nlayers: [{{match: '{pattern}', all: identity}}]")
    )
    assert [name for name in (*fits, *not_these) if made.explain(role(name, "input")).rule] == fits


def test_a_recipe_goes_before_a_factory_of_its_name(tmp_path: Path) -> None:
    """And `factory` names the factory all the same."""
    served = load_factory(write(tmp_path, "default: alpha\n"))("input")
    assert isinstance(served, QuantizerRequest)
    named = load_factory(write(tmp_path, "default: {factory: alpha}\n"))
    with pytest.raises(AssertionError, match="the recipe of this name serves") as caught:
        named("input")
    assert f"{tmp_path}/model.yaml, line 1, column 20" in caught.value.__notes__
    assert load_factory(write(tmp_path, "default: asks\n"))("input").recipe.flag


def test_a_factory_may_leave_a_role_to_the_next_rule(tmp_path: Path) -> None:
    text = (
        "default: identity\nlayers:\n- {match: '*', all: weights}\n- {match: '*', input: asks, "
        "weight: alpha}\n"
    )
    made = load_factory(write(tmp_path, text))
    places = [made.explain(role("a", t)).place for t in ("weight", "input", "grad_output")]
    assert places == ["line 3", "line 4", "line 1"]
    assert made.explain(role("a", "input")).rowwise == "asks: alpha E4M3"


def test_roles_that_nothing_serves(tmp_path: Path) -> None:
    complete = "layers: [{match: '*', input: alpha, weight: alpha, grad_output: alpha}]\n"
    made = load_factory(write(tmp_path, complete))
    assert made("weight").recipe.name == "alpha"
    with pytest.raises(OptionError, match=r"model.yaml: nothing serves 'output' of layer 'a'"):
        made(role("a", "output"))
    empty = load_factory(write(tmp_path, "default:\n  weights\n"))
    with pytest.raises(OptionError, match=r"line 1, column 1: nothing serves 'input' of layer 'a'"):
        empty(role("a", "input"))
    half = load_factory(write(tmp_path, "default:\n  {rowwise: weights,\n   columnwise: alpha}"))
    assert isinstance(half("weight"), HybridQuantizer)
    with pytest.raises(
        OptionError, match=r"line 2, column 13: there is no quantizer for 'input' of layer 'a'"
    ):
        half(role("a", "input"))


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (
            "default: wrong",
            OptionError,
            "line 1, column 10: factory 'wrong' returned a int for QuantizerRole",
        ),
        (
            "default: {rowwise: alpha, columnwise: keeps}",
            OptionError,
            "line 1, column 39: a recipe that keeps state",
        ),
    ],
)
def test_factories_that_give_what_does_not_do(
    tmp_path: Path, text: str, error: type, said: str
) -> None:
    made = load_factory(write(tmp_path, text))
    with pytest.raises(error, match=said):
        made("input")


def test_a_factory_that_fails_fails_with_the_place(tmp_path: Path) -> None:
    made = load_factory(write(tmp_path, "# x\ndefault: {factory: fails}"))
    with pytest.raises(ZeroDivisionError, match="in the factory") as caught:
        made("input")
    assert caught.value.__notes__ == [f"{tmp_path}/model.yaml, line 2, column 20"]


OPTIONS = {
    "fp8_format: E5M2": ("fp8_format", Format.E5M2),
    "flag: true": ("flag", True),
    "epsilon: 1e-4": ("epsilon", 1e-4),
    "epsilon: 0x10": ("epsilon", 16),
    "shape: [2, 3]": ("shape", (2, 3)),
    "rounding: no": ("rounding", "no"),
    "rounding: 'E5M2'": ("rounding", "E5M2"),
    "rounding: 1:30": ("rounding", "1:30"),
    "rounding: 2020-01-01": ("rounding", "2020-01-01"),
    "rounding: !!str 5": ("rounding", "5"),
    "epsilon: .inf": ("epsilon", float("inf")),
    "rounding: null": ("rounding", None),
}


@pytest.mark.parametrize("text", list(OPTIONS))
def test_options(tmp_path: Path, text: str) -> None:
    key, value = OPTIONS[text]
    given = load_factory(write(tmp_path, f"default: {{recipe: alpha, {text}}}"))("input").recipe
    assert getattr(given, key) == value
    assert type(getattr(given, key)) is type(value)
    hash(given)


def test_a_recipe_that_needs_an_option(tmp_path: Path) -> None:
    assert (
        load_factory(write(tmp_path, "default: {recipe: needy, scale: 2.5}"))("input").recipe.scale
        == 2.5
    )


def test_aliases(tmp_path: Path) -> None:
    text = (
        "layers:\n- {match: a, weight: &x {recipe: alpha, flag: true}}\n- {match: b, input: "
        "*x}\ndefault: *x\n"
    )
    made = load_factory(write(tmp_path, text))
    assert (
        made(role("b", "input")).recipe
        is made(role("a", "weight")).recipe
        is made(role("c", "input")).recipe
    )
    assert made.explain(role("b", "input")).place == "line 3"


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_line_endings_and_the_byte_order_mark(tmp_path: Path, ending: str, bom: bytes) -> None:
    for text, suffix, place in ((YAML, "yaml", "line 13"), (TOML, "toml", "layers[2].input")):
        path = tmp_path / f"model.{suffix}"
        path.write_bytes(bom + text.replace("\n", ending).encode())
        assert load_factory(path).explain(role("x.down", "input")).place == place


def test_the_path(tmp_path: Path) -> None:
    assert SUFFIXES == (".yaml", ".yml", ".toml")
    assert load_factory(write(tmp_path, "default: alpha", "MODEL.YAML")).path.endswith("MODEL.YAML")
    for wrong in (3, None, b"model.yaml"):
        with pytest.raises(DTypeError, match="the path is a"):
            load_factory(wrong)  # type: ignore[arg-type]


def test_the_group_of_a_region_reaches_the_recipe(tmp_path: Path) -> None:
    recipe = ottava.get_recipe(str(write(tmp_path, YAML)))
    made: Any = recipe.quantizer(role("blocks.1.up", "input"), amax_reduction_group="group")
    assert made.group == "group"


def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    path = str(write(tmp_path, YAML.replace("keeper", "alpha")))
    recipe = ottava.get_recipe(path)
    assert recipe == ottava.get_recipe("custom", file=path)
    explained = recipe.explain(role("blocks.1.down", "input"))
    assert (explained.rowwise, explained.columnwise, explained.place) == (
        "alpha E4M3",
        "identity",
        "line 13",
    )
    assert [rule.place for rule in recipe.rules()] == ["line 4", "line 6", "line 12"]
    blocks = [
        torch.nn.ModuleDict({"up": torch.nn.Linear(32, 32), "down": torch.nn.Linear(32, 32)})
        for _ in range(2)
    ]
    model = torch.nn.ModuleDict(
        {"blocks": torch.nn.ModuleList(blocks), "head": torch.nn.Linear(32, 16)}
    )
    ottava.convert(model, recipe)
    x = torch.randn(64, 32, requires_grad=True)
    y = x
    for block in model["blocks"]:  # type: ignore[union-attr]
        y = block["down"](block["up"](y).relu())
    first = blocks[0]["down"](blocks[0]["up"](x).relu())
    model["head"](y).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (*model.parameters(), x))
    # The first block keeps high precision.
    plain = torch.nn.functional.linear
    up, down = blocks[0]["up"], blocks[0]["down"]
    expected = plain(plain(x, up.weight, up.bias).relu(), down.weight, down.bias)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def test_a_file_inside_a_file(tmp_path: Path) -> None:
    inner = write(tmp_path, "default: alpha\nlayers: [{match: a, all: identity}]\n", "inner.yaml")
    made = load_factory(write(tmp_path, f"default: {{recipe: custom, file: {inner}}}"))
    assert made.explain(role("a", "input")).rowwise.startswith("identity")
    assert made.explain(role("b", "input")).rowwise.startswith("alpha E4M3")
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"default:\n  recipe: custom\n  file: {two}\n")
    two.write_text(f"\ndefault: {{recipe: custom, file: {one}}}\n")
    with pytest.raises(
        OptionError, match=r"one.yaml, line 3.*two.yaml, line 2.*one.yaml is read from itself"
    ):
        load_factory(one)
