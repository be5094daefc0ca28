"""revert: plain layers in the places of converted ones, with their values, and a model that is as
it was."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, UsageError
from ottava.nn import Linear, TransposedLinear

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Model(torch.nn.Module):
    """Tied layers, a module in two places, and one that is no product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.tied = torch.nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.again = self.first

    def forward(self, x: torch.Tensor) -> Any:
        return self.again(self.tied(self.norm(self.first(x))))


class Turned(torch.nn.Module):
    """Stores its weight as the Conv1D of Transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.nf = 8
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


ottava.register_converter(Turned, TransposedLinear.from_linear)


@pytest.mark.parametrize(
    "other", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("name", ["current", "delayed"])
def test_it_is_as_before(name: str, other: Any) -> None:
    plain = torch.nn.ModuleDict({"model": Model(), "turned": Turned()})
    expected, values = (
        plain["model"](X),
        {key: value.clone() for key, value in plain.state_dict().items()},
    )
    model = other(ottava.convert(plain, name).eval())
    parameters = dict(model.named_parameters())
    attributes = vars(model["model"]).keys()
    model["model"](X).sum().backward()
    assert ottava.revert(model) is model
    assert type(model) is torch.nn.ModuleDict
    assert type(model["model"].first) is torch.nn.Linear
    assert type(model["turned"]) is Turned
    assert model["turned"].nf == 8
    assert model["model"].again is model["model"].first
    assert not model["model"].first.training
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters.values()}
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert model.state_dict().keys() == values.keys()
    assert torch.equal(model["model"](X), expected)
    assert vars(model["model"]).keys() == attributes
    assert not hasattr(model["model"].first, "recipe_state")
    assert ottava.conversion_report(model).swapped == ()
    assert ottava.conversion_report(ottava.convert(model, name)).share == 1


def test_kept_weights_are_dequantized() -> None:
    model = ottava.convert(Model(), "current", primary=True, keep_initial_values=True)
    model.first.weight.tag = "mine"  # type: ignore[attr-defined]
    stale = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    kept: Any = model.first.weight
    values, gradient = kept.dequantize(), kept.grad
    ottava.revert(model)
    weight: Any = model.first.weight
    assert type(weight) is torch.nn.Parameter
    assert torch.equal(weight, values)
    assert model.tied.weight is weight
    assert weight.grad is gradient
    assert weight.tag == "mine"
    assert not hasattr(weight, "_high_precision_init_val")
    with pytest.warns(
        UserWarning,
        match=r"SGD holds parameters from before ottava\.revert\(model\).*'tied\.weight'",
    ):
        stale.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(weight, values)


def test_one_layer_and_nothing_to_do() -> None:
    layer = ottava.revert(Linear(8, 4, name="x", fuse_wgrad_accumulation=True))
    assert type(layer) is torch.nn.Linear
    assert vars(layer).keys() == vars(torch.nn.Linear(8, 4)).keys()
    plain = Model()
    assert ottava.revert(plain) is plain
    with pytest.raises(DTypeError, match="model is a dict"):
        ottava.revert({})  # type: ignore[type-var]


class Mine(Linear):
    """Does more than its base."""


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Mine(8, 8), "Mine 'last' is of a subclass, whose behaviour would be lost"),
        (TransposedLinear(8, 8), "TransposedLinear 'last' was made of no other layer"),
    ],
)
def test_what_has_no_plain_layer_is_refused_before_anything_changes(layer: Any, what: str) -> None:
    model = torch.nn.ModuleDict({"first": Linear(8, 8), "last": layer})
    before = dict(model.named_modules())
    with pytest.raises(UsageError, match=what):
        ottava.revert(model)
    assert dict(model.named_modules()) == before
