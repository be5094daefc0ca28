"""conversion_report: a model as it is now, and the weights of products that run in high
precision."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, stable_repr
from ottava.nn import Linear


class Experts(torch.nn.Module):
    """As in a mixture of experts: one parameter for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(4, 16, 8))
        self.gate_up_bias = torch.nn.Parameter(torch.zeros(4, 16))


class PositionEmbedding(torch.nn.Module):
    """Rows that are looked up, in a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(20, 8))


class Model(torch.nn.Module):
    """128 elements in linear layers, 576 in other products."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8)
        self.rows = PositionEmbedding()
        self.positions = torch.nn.Parameter(torch.zeros(1, 50, 8))
        self.cls = torch.nn.Parameter(torch.zeros(1, 1, 8))
        self.norm = torch.nn.LayerNorm((4, 8))
        self.up = torch.nn.Linear(8, 8)
        self.down = torch.nn.Linear(8, 8)
        self.experts = Experts()
        self.conv = torch.nn.Conv1d(8, 8, 1)


def weights(model: torch.nn.Module) -> dict[str, str | None]:
    return {weight.name: weight.recipe for weight in ottava.conversion_report(model).weights}


def test_what_multiplies_is_counted_and_nothing_else(recipe: Any) -> None:
    model = ottava.convert(Model(), recipe)
    report = ottava.conversion_report(model)
    assert weights(model) == {
        "up.weight": "sample",
        "down.weight": "sample",
        "experts.gate_up": None,
        "conv.weight": None,
    }
    assert [weight.name for weight in report.left_out] == ["experts.gate_up", "conv.weight"]
    experts = report.left_out[0]
    assert (experts.shape, experts.share) == ((4, 16, 8), 512 / 704)
    assert "Experts" in experts.reason
    assert report.share == 128 / 704
    assert "18.2% of the weights of products" in str(report)


def test_it_prints_as_tables(recipe: Any) -> None:
    model = ottava.convert(torch.nn.ModuleDict({"model": Model()}), recipe, exclude="model.up")
    first, linear, others = str(ottava.conversion_report(model)).split("\n\n")
    assert first == "1 of 2 linear modules run under 'sample', with 9.1% of the weights of products"
    assert linear.splitlines() == [
        "linear module  recipe  reason",
        "-------------  ------  --------------------",
        "model.up       no      in exclude",
        "model.down     yes     recipe bound: sample",
    ]
    rows = others.splitlines()
    assert rows[0].split() == ["weight", "in", "high", "precision", "shape", "share", "reason"]
    assert rows[2:] == [
        "model.experts.gate_up     [4, 16, 8]  72.7%  Experts has no converter",
        "model.up.weight           [8, 8]       9.1%  in exclude",
        "model.conv.weight         [8, 8, 1]    9.1%  Conv1d has no converter",
    ]
    # Nothing has no table.
    assert len(str(ottava.conversion_report(torch.nn.ReLU())).splitlines()) == 1


def test_attention_of_torch(recipe: Any) -> None:
    model = ottava.convert(torch.nn.MultiheadAttention(8, 2), recipe)
    report = ottava.conversion_report(model)
    assert [(weight.name, weight.share) for weight in report.left_out] == [
        ("in_proj_weight", 0.75),
        ("out_proj.weight", 0.25),
    ]
    assert report.share == 0.0
    assert report.recipe == ""


def test_no_conversion_is_needed(recipe: Any) -> None:
    report = ottava.conversion_report(Model())
    assert report.swapped == ()
    assert set(report.skipped.values()) == {"not converted"}
    assert report.share == 0.0
    assert str(report).startswith("0 of 2 linear modules run under a recipe, with 0.0%")
    built = torch.nn.Sequential(Linear(4, 4, recipe=recipe), Linear(4, 12))
    assert ottava.conversion_report(built).skipped == {"1": "no recipe is bound"}
    assert ottava.conversion_report(built).share == 0.25
    assert ottava.conversion_report(torch.nn.ReLU()).share == 0.0
    with pytest.raises(DTypeError, match="model is a list"):
        ottava.conversion_report([])  # type: ignore[arg-type]


def test_the_model_as_it_is_now(recipe: Any) -> None:
    model = ottava.convert(Model(), recipe, exclude="down")
    model.up = torch.nn.Linear(8, 24)
    model.added = torch.nn.Linear(8, 8)
    assert ottava.conversion_report(model).skipped["down"] == "in exclude"
    model.down = torch.nn.Linear(8, 16)
    report = ottava.conversion_report(model)
    assert report.swapped == ()
    # Nobody excluded this one.
    assert "after the last conversion" in report.skipped["down"]
    assert "after the last conversion" in report.skipped["up"]
    assert "after the last conversion" in report.skipped["added"]
    assert dict(zip(weights(model), (w.shape for w in report.weights), strict=True))[
        "up.weight"
    ] == (24, 8)
    ottava.convert(model, recipe)
    assert set(ottava.conversion_report(model).swapped) == {"up", "added", "down"}
    model.up.bind(None)
    assert ottava.conversion_report(model).skipped == {"up": "no recipe is bound"}
    ottava.convert(model, recipe, exclude="up")
    ottava.convert(model, recipe, exclude="down").up.bind(None)
    assert ottava.conversion_report(model).skipped == {"up": "no recipe is bound"}


def test_a_layer_does_not_inherit_why_its_module_was_left_alone(recipe: Any) -> None:
    model = ottava.convert(Model(), recipe, exclude="down")
    ottava.convert(model, recipe)
    model.down.bind(None)
    assert ottava.conversion_report(model).skipped == {"down": "no recipe is bound"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_reasons_stay_known(recipe: Any, copied: Any) -> None:
    model = copied(ottava.convert(Model(), recipe, include="up"))
    for whole in (
        model,
        torch.nn.ModuleDict({"module": model}),
        torch.nn.Sequential(torch.nn.Sequential(model)),
    ):
        assert [*ottava.conversion_report(whole).skipped.values()] == ["not in include"]
    assert ottava.conversion_report(torch.nn.ModuleDict({"module": model})).swapped == (
        "module.up",
    )
    other = ottava.convert(torch.nn.Sequential(model), recipe, exclude="0.up")
    assert ottava.conversion_report(other).swapped == ("0.up", "0.down")
    # What an earlier conversion of a part was told is no longer so.
    model.down = torch.nn.Linear(8, 8)
    assert "after the last conversion" in ottava.conversion_report(other).skipped["0.down"]


def test_layers_under_several_recipes(recipe: Any) -> None:
    model = ottava.convert(Model(), recipe)
    other = type(recipe)()
    other.name = "other"
    model.down.bind(other)
    report = ottava.conversion_report(model)
    assert report.recipe == "other, sample"
    assert weights(model)["down.weight"] == "other"
    assert "recipe bound: other" in str(report)


def test_a_weight_that_is_shared_counts_once(recipe: Any) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(8, 4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.again = torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.again.weight = self.embedding.weight

    model = ottava.convert(Tied(), recipe)
    assert weights(model) == {"head.weight": "sample"}
    assert ottava.conversion_report(model).share == 1.0
    # It is quantized where all products by it are.
    model = ottava.convert(Tied(), recipe, exclude="again")
    (weight,) = ottava.conversion_report(model).weights
    assert (weight.name, weight.recipe, weight.reason) == ("again.weight", None, "in exclude")


def test_layers_whose_recipe_keeps_the_values(recipe: Any) -> None:
    class Kept(type(recipe.make_quantizer(ottava.QuantizerRole()))):  # type: ignore[misc]
        in_high_precision = aliases_operands = True

    recipe.set_quantizer_factory(
        lambda role: Kept(torch.float8_e4m3fn) if role.name == "up" else None
    )
    model = ottava.convert(Model(), recipe)
    assert weights(model)["up.weight"] is None
    assert weights(model)["down.weight"] == "sample"
    assert "keeps its operands in high precision" in str(ottava.conversion_report(model))


def test_layers_without_values_yet() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 4, device="meta"))
    assert weights(lazy) == {"1.weight": None}


def test_quantized_weights_are_told(recipe: Any) -> None:
    with ottava.quantized_model_init(recipe):
        layer = Linear(4, 4, recipe=recipe)
    assert "the weight is kept quantized" in str(ottava.conversion_report(layer))
    assert weights(layer) == {"weight": "sample"}


def test_parametrized_layers(recipe: Any) -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(Linear(4, 4, recipe=recipe))
    for model in (layer, torch.nn.Sequential(layer)):
        assert ottava.conversion_report(model).share == 1.0
    plain = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)))
    assert "subclass" in ottava.conversion_report(plain).left_out[0].reason


@pytest.mark.parametrize(("rows", "says"), [(2, True), (1, False)])
def test_a_line_where_less_than_nine_tenths_run_quantized(
    rows: int, says: bool, recipe: Any
) -> None:
    """Of 16 and ``rows`` rows: 88.9 and 94.1 percent."""
    model = torch.nn.ModuleDict({"big": torch.nn.Linear(8, 16), "rest": torch.nn.Linear(8, rows)})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ottava.convert(model, recipe, include="big")
    assert [str(one.message)[:8] for one in told] == (["only 89%"] if says else [])


def test_text_of_objects_that_every_process_has() -> None:
    assert stable_repr([{"b", "a"}, frozenset({3, 1})]) == "[{'a', 'b'}, frozenset({1, 3})]"
    assert stable_repr({"b": 1, "a": 2}) == "{'b': 1, 'a': 2}"
    assert stable_repr(object()) == "<object object>"
