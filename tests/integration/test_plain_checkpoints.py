"""Checkpoints of models in high precision in converted ones of every recipe, and the other way
round."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.errors import DTypeError

RECIPES = ["blockwise", "current", "delayed", "mxfp8", "rowwise"]


def mixed() -> ottava.Recipe:
    """Delayed scaling for the input alone."""
    recipe = ottava.get_recipe("current")
    request = ottava.QuantizerRequest(ottava.get_recipe("delayed", amax_history_len=4))
    recipe.set_quantizer_factory(lambda role: request if role.tensor_type == "input" else None)
    return recipe


def plain(seed: int = 0, **options: Any) -> torch.nn.Sequential:
    """Fifteen layers, and modules that are none: the state of delayed scaling is 45 tensors."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(32, 32, **options) for _ in range(15)]
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(32, **options), *layers, torch.nn.LayerNorm(32, **options)
    )


def trained(recipe: Any) -> Any:
    model = ottava.convert(plain(1), recipe)
    for step in range(2):
        model(torch.randn(8, 32) * (step + 3)).square().mean().backward()
    return model


def states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "recipe_state" in name}


def learnt(model: torch.nn.Module) -> bool:
    return any(
        bool(value.any()) for name, value in states(model).items() if name.endswith("amax_history")
    )


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_trains(model: Any, weights: Any) -> None:
    """A model that began afresh computes as one that was converted with these weights."""
    other = plain(7)
    other.load_state_dict(weights)
    ottava.convert(other, model[1].recipe)
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(8, 32)
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
    whole.load_state_dict(
        {f"net.{name}": value for name, value in weights.items()} | rest, strict=True
    )


def from_a_file(model: torch.nn.Module, weights: Any, folder: Path) -> None:
    checkpoint.save_file(weights, folder / "plain.safetensors")
    assert checkpoint.load_model(model, folder / "plain.safetensors", strict=True) == ([], [])


def from_shards(model: torch.nn.Module, weights: Any, folder: Path) -> None:
    checkpoint.save_sharded(weights, folder / "sharded")
    wanted = checkpoint.without_state(model.state_dict())
    model.load_state_dict(checkpoint.load_sharded(wanted, folder / "sharded"), strict=True)


@pytest.mark.parametrize("load", [by_torch, by_assignment, of_the_whole, from_a_file, from_shards])
@pytest.mark.parametrize("recipe", [*RECIPES, mixed()], ids=[*RECIPES, "mixed"])
def test_a_plain_checkpoint_loads_strictly(
    recipe: Any, load: Callable[..., None], tmp_path: Path
) -> None:
    """What a model has learnt of other weights is gone, and one warning says so for all layers."""
    weights = plain(2).state_dict()
    model = trained(recipe)
    stateful = bool(states(model))
    assert learnt(model) == stateful
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(model, weights, tmp_path)
    told = [str(warning.message) for warning in caught if "afresh" in str(warning.message)]
    assert len(told) == stateful
    if stateful:
        names = "'net.1', 'net.2', 'net.3'" if load is of_the_whole else "'1', '2', '3'"
        assert f"no scaling state for 15 layers ({names}, " in told[0]
    assert not learnt(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    check_trains(model, weights)


@pytest.mark.parametrize("recipe", ["delayed", mixed()], ids=["delayed", "mixed"])
def test_layers_that_are_bound_by_themselves(recipe: Any) -> None:
    model = torch.nn.Sequential(*(ottava.nn.Linear(32, 32, recipe=recipe) for _ in range(3)))
    weights = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))).state_dict()
    model(torch.ones(2, 32)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model.load_state_dict(weights, strict=True)
    assert len([w for w in caught if "no scaling state" in str(w.message)]) == 1
    assert not learnt(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


def test_what_is_missing_besides_is_told() -> None:
    """Only the state may be missing, and a dict that has some of a layer's state is not a plain
    one."""
    model, weights = trained("delayed"), plain(2).state_dict()
    del weights["3.weight"], weights["0.bias"]
    with pytest.warns(UserWarning, match="14 layers"), pytest.raises(RuntimeError) as caught:
        model.load_state_dict(weights, strict=True)
    assert 'Missing key(s) in state_dict: "0.bias", "3.weight"' in str(caught.value)
    whole = model.state_dict()
    del whole["2.recipe_state.scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*: "2.recipe_state.scale"'):
        model.load_state_dict(whole, strict=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(plain(2).state_dict() | {"1.weight": torch.ones(2, 2)}, strict=True)


def test_the_own_checkpoint_is_no_plain_one() -> None:
    model, other = trained("delayed"), ottava.convert(plain(3), "delayed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(model.state_dict())
        # Parts of a model, without the weights that a state belongs to, leave the states alone.
        other.load_state_dict({"1.bias": torch.zeros(32), "16.bias": torch.ones(32)}, strict=False)
    assert same(states(model), states(other))
    assert learnt(other)


def test_state_is_left_out_for_a_plain_model() -> None:
    model = trained("delayed")
    whole = model.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain().load_state_dict(whole)
    kept = checkpoint.without_state(whole)
    assert len(whole) - len(kept) == 45
    assert list(kept) == list(plain().state_dict())
    assert kept._metadata == whole._metadata  # type: ignore[attr-defined]
    other = plain()
    assert other.load_state_dict(kept, strict=True) == ([], [])
    assert torch.equal(other[3].weight, model[3].weight)
    assert other.load_state_dict(checkpoint.without_state(dict(whole)), strict=True) == ([], [])
    # A layer by itself, and a recipe that keeps nothing.
    layer = ottava.nn.Linear(4, 4, recipe="delayed")
    assert list(checkpoint.without_state(layer.state_dict())) == ["weight", "bias"]
    ottava.convert(plain(), "mxfp8").load_state_dict(kept, strict=True)
    with pytest.raises(
        DTypeError,
        match=r"the state dict is a Sequential. Expected: what model.state_dict\(\) gives",
    ):
        checkpoint.without_state(model)


def test_quantized_weights_load_into_a_plain_model() -> None:
    with ottava.quantized_model_init("delayed"):
        model = torch.nn.Sequential(ottava.nn.Linear(32, 32, recipe="delayed"))
    other = torch.nn.Sequential(torch.nn.Linear(32, 32))
    other.load_state_dict(checkpoint.without_state(model.state_dict()), strict=True)
    assert torch.equal(other[0].weight, model[0].weight.dequantize())


# -- loaders that build on meta and assign, as that of Transformers does --


def built(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with torch.device("meta"):
        return make()


def loaded(model: torch.nn.Module, weights: Any) -> tuple[set[str], set[str]]:
    """Assign all that is given, module by module, and report what did not fit: missing and
    unexpected names."""
    expected = {name for name, value in model.state_dict().items() if value.is_meta}
    for name in expected & set(weights):
        owner, _, own = name.rpartition(".")
        value = weights[name].clone()
        model.get_submodule(owner).load_state_dict({own: value}, strict=False, assign=True)
    return {name for name, value in model.state_dict().items() if value.is_meta}, set(
        weights
    ) - expected


def test_convert_after_loading() -> None:
    model = built(plain)
    whole = trained("delayed").state_dict()
    assert loaded(model, checkpoint.without_state(whole)) == (set(), set())
    check_trains(ottava.convert(model, "delayed"), checkpoint.without_state(whole))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.filterwarnings("ignore:the state dict has no scaling state")
def test_load_into_a_converted_model(recipe: str) -> None:
    """Of plain weights: nothing is missing, since the state begins where its weight is."""
    weights = plain(2).state_dict()
    for load in (
        loaded,
        lambda m, w: tuple(map(set, m.load_state_dict(w, strict=False, assign=True))),
    ):
        model: Any = built(lambda: ottava.convert(plain(), recipe))
        assert load(model, weights) == (set(), set())
        assert not any(value.is_meta for value in model.state_dict().values())
        check_trains(model, weights)


def test_load_its_own_into_a_converted_model() -> None:
    model, other = trained("delayed"), built(lambda: ottava.convert(plain(), "delayed"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        missing, unexpected = other.load_state_dict(model.state_dict(), strict=False, assign=True)
    assert (missing, unexpected) == ([], [])
    assert same(states(other), states(model))
