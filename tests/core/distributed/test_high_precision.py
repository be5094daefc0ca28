"""Weights in high precision that are to be gathered quantized: they are plain weights to whoever
sets, moves, loads and saves them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ottava
from ottava.distributed import HighPrecisionWeight, gather_quantized
from ottava.errors import DTypeError, ShapeError, UsageError
from tests.comparing import assert_same
from tests.copying import by_file, by_pickle


def layers() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))


@pytest.fixture
def model(recipe: Any) -> Any:
    return gather_quantized(ottava.convert(layers(), recipe))


def test_new_data_is_taken_over(model: Any) -> None:
    values = torch.randn(6, 8)
    model[0].weight.data = values
    assert isinstance(model[0].weight, HighPrecisionWeight)
    assert model[0].weight.high_precision().data_ptr() == values.data_ptr()
    model[0].weight.data = copy.deepcopy(model)[0].weight
    with pytest.raises(ShapeError, match="new data has shape"):
        model[0].weight.data = torch.zeros(8, 6)
    with pytest.raises(DTypeError):
        model[0].weight.data = 3
    assert_same(model[0].weight * 1, values)
    model[0].weight.data = values.bfloat16()
    assert model[0].weight.dtype is torch.bfloat16


def test_operators_keep_the_class_or_give_plain_values(model: Any) -> None:
    weight = model[0].weight
    with torch.no_grad():
        assert weight.mul_(2) is weight
        for view in (weight.view(8, 6), weight[:2], weight.clone(), *weight.chunk(2)):
            assert isinstance(view, HighPrecisionWeight)
    assert type(weight * 1) is torch.Tensor
    assert repr(weight).startswith("HighPrecisionWeight(")


def test_moving_to_another_dtype_and_copies(model: Any) -> None:
    before = model[0].weight.high_precision().clone()
    copied = copy.deepcopy(model).to(torch.bfloat16)
    weight = copied[0].weight
    assert isinstance(weight, HighPrecisionWeight)
    assert weight.dtype == torch.bfloat16
    assert_same(weight.high_precision(), before.bfloat16())
    with torch.no_grad():
        weight.add_(1)
    assert_same(model[0].weight.high_precision(), before)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_plain_values(model: Any, assign: bool) -> None:
    state = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    weight = model[0].weight
    assert isinstance(weight, HighPrecisionWeight)
    assert weight.requires_grad
    assert_same(weight.high_precision(), state["0.weight"])
    # And so does a file hold them.
    read = by_file(model.state_dict())
    assert {type(value) for value in read.values()} == {torch.Tensor}
    assert_same(read["0.weight"], state["0.weight"])


@pytest.mark.parametrize("trains", [True, False])
def test_a_weight_trains_as_before_and_so_does_what_is_read_of_its_pickle(
    recipe: Any, trains: bool
) -> None:
    net = ottava.convert(layers(), recipe)
    net[0].weight.requires_grad_(trains)
    weight = gather_quantized(net)[0].weight
    assert isinstance(weight, HighPrecisionWeight)
    assert weight.requires_grad is by_pickle(weight).requires_grad is trains


def test_the_layer_computes_as_before(model: Any, recipe: Any) -> None:
    x = torch.randn(4, 8)
    assert_same(model(x), ottava.convert(layers(), recipe)(x))


def test_wrong_models_are_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="no layer of the model has a recipe bound"):
        gather_quantized(layers())
    with pytest.raises(DTypeError, match="model is a str"):
        gather_quantized("model")  # type: ignore[type-var]
    with pytest.raises(DTypeError, match="recomputes"):
        gather_quantized(model, recomputes=1)  # type: ignore[arg-type]


def test_weights_that_other_modules_share_stay(recipe: Any) -> None:
    embedding, head = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    net = ottava.convert(torch.nn.Sequential(embedding, torch.nn.Linear(8, 8), head), recipe)
    gather_quantized(net)
    assert type(net[2].weight) is torch.nn.Parameter
    assert net[2].weight is net[0].weight
    assert isinstance(net[1].weight, HighPrecisionWeight)
