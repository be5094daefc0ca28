"""Checkpoints of models in high precision in converted ones of every recipe, and the other way
round."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.errors import DTypeError
from tests.integration.mixed_recipes import delayed_inputs

RECIPES: dict[str, Any] = {"current": "current", "delayed": "delayed", "mixed": delayed_inputs()}
AFRESH = "the state dict has no scaling state"


def plain(seed: int = 0) -> torch.nn.Sequential:
    """Five layers, and modules that are none: the state of delayed scaling is 15 tensors."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(8, 8) for _ in range(5)]
    return torch.nn.Sequential(torch.nn.BatchNorm1d(8), *layers, torch.nn.LayerNorm(8))


def trained(recipe: Any) -> Any:
    model = ottava.convert(plain(1), recipe)
    for step in range(2):
        model(torch.randn(8, 8) * (step + 3)).square().mean().backward()
    return model


def states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "recipe_state" in name}


def learnt(model: torch.nn.Module) -> bool:
    return any(bool(value.any()) for name, value in states(model).items() if "history" in name)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_trains(model: Any, weights: Any) -> None:
    """A model that began afresh computes as one that was converted with these weights."""
    other = plain(7)
    other.load_state_dict(weights)
    ottava.convert(other, model[1].recipe)
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(8, 8)
        assert torch.equal(model(x), other(x))
    assert same(states(model), states(other))


def by_torch(model: torch.nn.Module, weights: Any, folder: Path) -> None:
    assert model.load_state_dict(weights, strict=True) == ([], [])


def by_assignment(model: torch.nn.Module, weights: Any, folder: Path) -> None:
    assert model.load_state_dict(copy.deepcopy(weights), strict=True, assign=True) == ([], [])


def of_the_whole(model: torch.nn.Module, weights: Any, folder: Path) -> None:
    """The converted model is a part of what is loaded."""
    whole = torch.nn.ModuleDict({"net": model, "rest": torch.nn.Linear(2, 2)})
    rest = {f"rest.{name}": value for name, value in whole["rest"].state_dict().items()}
    whole.load_state_dict({f"net.{name}": value for name, value in weights.items()} | rest)


def from_a_file(model: torch.nn.Module, weights: Any, folder: Path) -> None:
    checkpoint.save_file(weights, folder / "file")
    assert checkpoint.load_model(model, folder / "file", strict=True) == ([], [])


def from_shards(model: torch.nn.Module, weights: Any, folder: Path) -> None:
    checkpoint.save_sharded(weights, folder / "sharded")
    target = checkpoint.without_state(model.state_dict())
    model.load_state_dict(checkpoint.load_sharded(target, folder / "sharded"), strict=True)


LOADS = [by_torch, by_assignment, of_the_whole, from_a_file, from_shards]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plain_checkpoint_loads_strictly(recipe: str, load: Any, tmp_path: Path) -> None:
    """What a model has learnt of other weights is gone, and one warning says so for all layers."""
    weights, model = plain(2).state_dict(), trained(RECIPES[recipe])
    stateful = bool(states(model))
    assert learnt(model) == stateful
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(model, weights, tmp_path)
    messages = [str(warning.message) for warning in caught if AFRESH in str(warning.message)]
    assert len(messages) == stateful
    if stateful:
        names = "'net.1', 'net.2', 'net.3'" if load is of_the_whole else "'1', '2', '3'"
        assert f"no scaling state for 5 layers ({names}, " in messages[0]
    assert not learnt(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    check_trains(model, weights)


def test_layers_that_are_bound_by_themselves() -> None:
    for recipe in ("delayed", delayed_inputs()):
        model = torch.nn.Sequential(*(ottava.nn.Linear(8, 8, recipe=recipe) for _ in range(3)))
        weights = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).state_dict()
        model(torch.ones(2, 8)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            model.load_state_dict(weights, strict=True)
        assert [AFRESH in str(warning.message) for warning in caught] == [True]
        assert not learnt(model)


def test_a_layer_with_two_names_begins_afresh_under_both_with_one_warning() -> None:
    layer = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(layer, layer)
    weights = copy.deepcopy(model.state_dict())
    ottava.convert(model, "delayed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.load_state_dict(weights, strict=True) == ([], [])
    (message,) = (str(each.message) for each in caught if AFRESH in str(each.message))
    assert "no scaling state for 2 layers ('0', '1')" in message


def test_what_is_missing_besides_is_told() -> None:
    """Only the whole state of a layer may be missing."""
    model, weights = trained("delayed"), plain(2).state_dict()
    del weights["3.weight"], weights["0.bias"]
    words = r'Missing key\(s\) in state_dict: "0.bias", "3.weight"'
    with pytest.warns(UserWarning, match="4 layers"), pytest.raises(RuntimeError, match=words):
        model.load_state_dict(weights, strict=True)
    whole = model.state_dict()
    del whole["2.recipe_state.scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*: "2.recipe_state.scale"'):
        model.load_state_dict(whole, strict=True)


def test_the_own_checkpoint_is_no_plain_one() -> None:
    model, other = trained("delayed"), ottava.convert(plain(3), "delayed")
    with torch.device("meta"):
        on_meta = ottava.convert(plain(), "delayed")
    with warnings.catch_warnings(action="error"):
        assert on_meta.load_state_dict(model.state_dict(), assign=True) == ([], [])
        assert other.load_state_dict(model.state_dict()) == ([], [])
        # Parts of a model, without the weights that a state belongs to, leave the states alone.
        other.load_state_dict({"1.bias": torch.zeros(8)}, strict=False)
    assert same(states(model), states(other))
    assert same(states(model), states(on_meta))


def test_state_is_left_out_for_a_plain_model() -> None:
    model, other = trained("delayed"), plain()
    whole = model.state_dict()
    rest = checkpoint.without_state(whole)
    assert len(whole) - len(rest) == 15
    assert rest._metadata == whole._metadata  # type: ignore[attr-defined]
    for state in (rest, checkpoint.without_state(dict(whole))):
        assert other.load_state_dict(state, strict=True) == ([], [])
    assert torch.equal(other[3].weight, model[3].weight)
    with pytest.raises(DTypeError, match=r"is a Sequential. Expected: what model.state_dict\(\)"):
        checkpoint.without_state(model)
    # Of a layer by itself, whose quantized weight is dequantized.
    with ottava.quantized_model_init("delayed"):
        layer = ottava.nn.Linear(8, 8, recipe="delayed")
    target = torch.nn.Linear(8, 8)
    target.load_state_dict(checkpoint.without_state(layer.state_dict()), strict=True)
    assert torch.equal(target.weight, layer.weight.dequantize())


@pytest.mark.filterwarnings(f"ignore:{AFRESH}")
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_loader_that_builds_on_meta_and_assigns_module_by_module(recipe: str) -> None:
    """As that of Transformers: nothing is left on meta, because the state begins where its weight
    is."""
    weights = plain(2).state_dict()
    with torch.device("meta"):
        model = ottava.convert(plain(), recipe)
    for name, value in weights.items():
        owner, _, own = name.rpartition(".")
        state = {own: value.clone()}
        model.get_submodule(owner).load_state_dict(state, strict=False, assign=True)
    assert not any(value.is_meta for value in model.state_dict().values())
    check_trains(model, weights)
