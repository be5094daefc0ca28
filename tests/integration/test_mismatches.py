"""A layer that changes to another kind of recipe, or whose weight another recipe keeps, is named in
one warning."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch

import ottava

RECIPES = ["blockwise", "current", "delayed", "mxfp8", "rowwise"]


def plain() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))


def primary(recipe: str) -> torch.nn.Sequential:
    with ottava.quantized_model_init(recipe):
        return torch.nn.Sequential(
            *(ottava.nn.Linear(32, 32, name=f"layer {place}") for place in range(2))
        )


class Told:
    """What was warned of inside."""

    def __enter__(self) -> list[str]:
        self.texts: list[str] = []
        self.caught = warnings.catch_warnings(record=True)
        self.records: Any = self.caught.__enter__()
        warnings.simplefilter("always")
        return self.texts

    def __exit__(self, *error: Any) -> None:
        self.caught.__exit__(*error)
        self.texts += [str(record.message) for record in self.records]


def run(model: Any, *regions: Any) -> list[str]:
    """A training step in each of these regions; what was warned of."""
    with Told() as told:
        for region in regions:
            with region:
                model(torch.ones(4, 32)).sum().backward()
    return told


@pytest.mark.parametrize(("bound", "other"), itertools.permutations(RECIPES, 2))
def test_a_region_of_another_kind(bound: str, other: str) -> None:
    """Once for each layer, however often it goes to and fro, and not for its copy again."""
    model = ottava.convert(plain(), bound)
    assert run(model, ottava.autocast()) == []
    told = run(model, *[ottava.autocast(other), ottava.autocast()] * 3)
    assert sorted(told) == [
        f"Linear '{name}' changes from recipe '{bound}' to '{other}'" for name in "02"
    ]
    assert run(copy.deepcopy(model), ottava.autocast(other)) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_no_change_of_kind(recipe: str) -> None:
    """High precision, an equal recipe, other options of one that keeps nothing, and binding
    anew."""
    model = ottava.convert(plain(), recipe)
    regions = [
        ottava.autocast(enabled=False),
        ottava.autocast(),
        ottava.autocast(ottava.get_recipe(recipe)),
    ]
    if recipe in ("current", "blockwise", "rowwise"):
        regions.append(ottava.autocast(ottava.get_recipe(recipe, amax_epsilon=0.5)))
    assert run(model, *regions) == []
    with Told() as told:
        for other in RECIPES:
            ottava.convert(model, other)
            model(torch.ones(4, 32)).sum().backward()
    assert told == []


def test_regions_alone() -> None:
    """Layers without a bound recipe change between regions."""
    model = torch.nn.Sequential(ottava.nn.Linear(32, 32, name="lone"))
    told = run(
        model, ottava.autocast("current"), ottava.autocast("mxfp8"), ottava.autocast("current")
    )
    assert told == ["Linear 'lone' changes from recipe 'current' to 'mxfp8'"]


def test_state_that_is_discarded_is_told_of_as_ever() -> None:
    layer = ottava.nn.Linear(
        32, 32, name="lone", recipe=ottava.get_recipe("delayed", amax_history_len=4)
    )
    (told,) = run(layer, ottava.autocast("delayed"))
    assert "the scaling state of Linear 'lone' is discarded" in told


@pytest.mark.parametrize(("kept", "other"), itertools.permutations(RECIPES, 2))
def test_a_weight_that_another_recipe_keeps(kept: str, other: str) -> None:
    """Known when the layer is bound, or at its first forward pass in a region."""
    with Told() as told:
        model = ottava.convert(primary(kept), other)
    assert len(told) == 2
    for place, text in enumerate(told):
        assert text.startswith(
            f"the weight of Linear 'layer {place}' stays as a Float8"
            if kept != "mxfp8"
            else "the w"
        )
        assert f"runs under '{other}'" in text
        assert f"quantized_model_init('{other}')" in text
        assert "torch.nn.Parameter(weight.dequantize())" in text
    assert run(model, *[ottava.autocast()] * 2) == []
    for layer in model:
        layer.weight = torch.nn.Parameter(layer.weight.dequantize())
    with Told() as told:
        ottava.convert(model, other, primary=True)
    assert told == []
    assert all(isinstance(layer.weight, ottava.QuantizedTensor) for layer in model)
    assert run(model, ottava.autocast()) == []
    (first, second) = run(primary(kept), *[ottava.autocast(other)] * 2)
    assert "Linear 'layer 0'" in first
    assert "Linear 'layer 1'" in second


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_of_its_own_recipe(recipe: str) -> None:
    with Told() as told:
        model = ottava.convert(primary(recipe), recipe)
    assert told == []
    assert (
        run(model, ottava.autocast(), ottava.autocast(recipe), ottava.autocast(enabled=False)) == []
    )


def put(layer: Any, weight: Any) -> None:
    layer.weight = weight


def loaded(layer: Any, weight: Any) -> None:
    layer.load_state_dict({"weight": weight, "bias": layer.bias}, assign=True)


@pytest.mark.parametrize("how", [put, loaded])
def test_a_weight_that_another_recipe_quantized_comes_later(how: Any) -> None:
    """Also after a change of the recipe was told of."""
    model = torch.nn.Sequential(ottava.nn.Linear(32, 32, name="late", recipe="current"))
    assert len(run(model, ottava.autocast("mxfp8"), ottava.autocast())) == 1
    weight = primary("mxfp8")[0].weight
    with Told() as told:
        how(model[0], weight)
        how(model[0], weight)
        model(torch.ones(4, 32))
    assert len(told) == 1
    assert "the weight of Linear 'late' stays as a MXFP8Quantizer quantized it" in told[0]
    with Told() as told:
        how(ottava.nn.Linear(32, 32, recipe="mxfp8"), weight)
        how(ottava.nn.Linear(32, 32), weight)
    assert told == []
