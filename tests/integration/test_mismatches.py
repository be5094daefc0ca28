"""A layer that changes to another kind of recipe, or whose weight another recipe keeps, is named in
one warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ottava

RECIPES = ["blockwise", "current", "delayed", "mxfp8", "rowwise"]
# Each recipe before one and after one, and both ways between two with a state or none.
PAIRS = [*zip(RECIPES, RECIPES[1:] + RECIPES[:1], strict=True), ("delayed", "current")]


def plain() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))


def lone(recipe: str | None = None) -> Any:
    return ottava.nn.Linear(32, 32, name="lone", recipe=recipe)


def primary(recipe: str) -> Any:
    with ottava.quantized_model_init(recipe):
        layers = (ottava.nn.Linear(32, 32, name=f"layer {place}") for place in range(2))
        return torch.nn.Sequential(*layers)


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings that are given inside."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        yield texts
    texts += [str(record.message) for record in records]


def run(model: Any, *regions: Any) -> list[str]:
    """The warnings of a training step in each of these regions."""
    with told() as texts:
        for region in regions:
            with region:
                model(torch.ones(4, 32)).sum().backward()
    return texts


@pytest.mark.parametrize(("bound", "other"), PAIRS)
def test_a_region_of_another_kind(bound: str, other: str) -> None:
    """Once for each layer, however often it goes to and fro, and not for its copy again."""
    model = ottava.convert(plain(), bound)
    assert run(model, ottava.autocast()) == []
    texts = run(model, *[ottava.autocast(other), ottava.autocast()] * 2)
    change = f"changes from recipe '{bound}' to '{other}'"
    assert sorted(texts) == [f"Linear '{name}' {change}" for name in "02"]
    assert run(copy.deepcopy(model), ottava.autocast(other)) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_no_change_of_kind(recipe: str) -> None:
    """High precision, an equal recipe, other options of one that keeps nothing, binding anew, and a
    weight of the layer's own recipe."""
    equal = ottava.get_recipe(recipe)
    regions = [ottava.autocast(enabled=False), ottava.autocast(), ottava.autocast(equal)]
    with told() as texts:
        of_its_own = ottava.convert(primary(recipe), recipe)
        model = ottava.convert(plain(), recipe)
        for other in RECIPES:
            ottava.convert(model, other)
            model(torch.ones(4, 32)).sum().backward()
    assert texts == run(of_its_own, *regions) == []
    if recipe in ("current", "blockwise", "rowwise"):
        regions.append(ottava.autocast(ottava.get_recipe(recipe, amax_epsilon=0.5)))
    assert run(ottava.convert(plain(), recipe), *regions) == []


def test_layers_without_a_bound_recipe_and_states_that_are_discarded() -> None:
    regions = [ottava.autocast(name) for name in ("current", "mxfp8", "current")]
    assert run(lone(), *regions) == ["Linear 'lone' changes from recipe 'current' to 'mxfp8'"]
    short = ottava.get_recipe("delayed", amax_history_len=4)
    (text,) = run(lone(), ottava.autocast(short), ottava.autocast("delayed"))
    assert "the scaling state of Linear 'lone' is discarded" in text


@pytest.mark.parametrize(("kept", "other"), PAIRS)
def test_a_weight_that_another_recipe_keeps(kept: str, other: str) -> None:
    """Known when the layer is bound, or at its first forward pass in a region."""
    with told() as texts:
        model = ottava.convert(primary(kept), other)
    assert len(texts) == 2
    for place, text in enumerate(texts):
        assert text.startswith(f"the weight of Linear 'layer {place}' stays as a ")
        assert f"runs under '{other}'" in text
        assert f"quantized_model_init('{other}')" in text
        assert "torch.nn.Parameter(weight.dequantize())" in text
    assert run(model, *[ottava.autocast()] * 2) == []
    # The remedy.
    for layer in model:
        layer.weight = torch.nn.Parameter(layer.weight.dequantize())
    with told() as texts:
        ottava.convert(model, other, primary=True)
    assert texts == run(model, ottava.autocast()) == []
    texts = run(primary(kept), *[ottava.autocast(other)] * 2)
    assert [f"Linear 'layer {place}'" in text for place, text in enumerate(texts)] == [True] * 2


def put(layer: Any, weight: Any) -> None:
    layer.weight = weight


def loaded(layer: Any, weight: Any) -> None:
    layer.load_state_dict({"weight": weight, "bias": layer.bias}, assign=True)


@pytest.mark.parametrize("how", [put, loaded])
def test_a_weight_of_another_recipe_that_comes_later(how: Any) -> None:
    """Also after a change of the recipe was told of."""
    layer, weight = lone("current"), primary("mxfp8")[0].weight
    assert len(run(layer, ottava.autocast("mxfp8"), ottava.autocast())) == 1
    with told() as texts:
        how(layer, weight)
        how(layer, weight)
        layer(torch.ones(4, 32))
    assert len(texts) == 1
    assert "the weight of Linear 'lone' stays as a MXFP8Quantizer quantized it" in texts[0]
    with told() as texts:
        how(lone("mxfp8"), weight)
        how(lone(), weight)
    assert texts == []
