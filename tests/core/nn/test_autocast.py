"""``ottava.autocast`` blocks in which no layer runs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava

X = torch.ones(2, 4)
NO_LAYER = "no layer of Ottava ran inside of ottava.autocast"


def test_a_block_around_layers_of_torch_warns_once(recipe: Any) -> None:
    model = torch.nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            with ottava.autocast(recipe):
                model(X)
    (warning,) = told
    assert NO_LAYER in str(warning.message)
    assert "ottava.convert" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("bound", [True, False])
def test_a_block_around_a_layer_says_nothing(bound: bool, recipe: Any) -> None:
    layer = ottava.nn.Linear(4, 4, recipe=recipe if bound else None)
    model = torch.nn.Sequential(ottava.convert(torch.nn.Linear(4, 4), recipe), layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ottava.autocast(recipe), ottava.autocast():
            model(X).sum().backward()
        with ottava.autocast(enabled=False):
            torch.nn.functional.relu(X)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_block_around_a_compiled_layer_says_nothing(recipe: Any) -> None:
    compiled = torch.compile(ottava.nn.Linear(4, 4, recipe=recipe), backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(X)
        warnings.filterwarnings("error", message=NO_LAYER)
        for _ in range(2):
            with ottava.autocast(recipe):
                compiled(X).sum().backward()


def test_a_block_around_a_recomputation_says_nothing(recipe: Any) -> None:
    layer = ottava.nn.Linear(4, 4, recipe=recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ottava.autocast(recipe):
            y = checkpoint(layer, X.requires_grad_(), use_reentrant=False)
        with ottava.autocast(recipe):
            y.sum().backward()


def test_a_block_that_an_exception_ends_says_nothing(recipe: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError), ottava.autocast(recipe):
            raise ZeroDivisionError
