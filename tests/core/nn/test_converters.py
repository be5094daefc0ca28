"""register_converter: how modules of other classes become layers, and what of a converter is
refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, ShapeError
from ottava.nn import Linear, TransposedLinear, converters


class Scaled(torch.nn.Linear):
    """A subclass that computes as its base does."""


class Factored(torch.nn.Module):
    """A class of a user's own, of which a layer can be made in one of two cases."""

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.matrix = torch.nn.Parameter(torch.randn(6, 4))
        self.norm = torch.nn.Parameter(torch.ones(4))


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """The converters as they were before the test."""
    before = dict(converters._CONVERTERS)
    yield
    converters._CONVERTERS.clear()
    converters._CONVERTERS.update(before)


def test_a_class_is_converted_once_it_is_registered(recipe: Any) -> None:
    model = torch.nn.Sequential(Scaled(4, 4))
    ottava.convert(model, recipe)
    assert type(model[0]) is Scaled
    seen: list[tuple[Any, str]] = []

    def convert(module: Any, name: str) -> Linear:
        seen.append((module, name))
        return Linear.from_linear(module, name)

    ottava.register_converter(Scaled, convert)
    scaled, weight = model[0], model[0].weight
    ottava.convert(model, recipe)
    assert seen == [(scaled, "0")]
    assert type(model[0]) is Linear
    assert model[0].weight is weight
    assert model[0].name == "0"

    class Further(Scaled):
        """Not registered."""

    further = torch.nn.Sequential(Further(4, 4))
    ottava.convert(further, recipe)
    assert "subclass, Further" in ottava.conversion_report(further).skipped["0"]


def test_linear_is_converted_by_the_same_table(recipe: Any) -> None:
    ottava.register_converter(torch.nn.Linear, lambda module, name: f"no, {name}")
    model = ottava.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), recipe)
    assert ottava.conversion_report(model).skipped == {"0": "no, 0"}


def test_a_converter_is_not_asked_for_what_is_excluded(recipe: Any) -> None:
    ottava.register_converter(Scaled, lambda module, name: pytest.fail("called"))
    model = torch.nn.Sequential(Scaled(4, 4), Scaled(4, 4).double())
    ottava.convert(model, recipe, exclude="0")
    assert ottava.conversion_report(model).skipped["0"] == "in exclude"
    assert "float64" in ottava.conversion_report(model).skipped["1"]


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda module, name: None, "returned for '1' a builtins.NoneType"),
        (lambda module, name: "", "returned for '1' a builtins.str.*or a string that says why not"),
        (lambda module, name: torch.nn.Linear(4, 4), "of the module's own parameters"),
        (lambda module, name: Linear(4, 6), "of the module's own parameters"),
        (Linear.from_linear, "with what a torch.nn.Linear has"),
        (TransposedLinear.from_linear, "no parameter 'weight'"),
    ],
)
def test_what_a_converter_may_not_return(recipe: Any, made: Any, error: str) -> None:
    ottava.register_converter(Factored, made)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Factored())
    with pytest.raises((DTypeError, ShapeError), match=error):
        ottava.convert(model, recipe)
    assert [type(module) for module in model] == [torch.nn.Linear, Factored]


def test_what_a_converter_raises_leaves_the_model_alone(recipe: Any) -> None:
    def refuse(module: Any, name: str) -> Linear:
        raise RuntimeError(f"not {name}")

    ottava.register_converter(Factored, refuse)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Factored())
    with pytest.raises(RuntimeError, match="not 1"):
        ottava.convert(model, recipe)
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("cls", ["Conv1D", "", 3, int, torch.nn.Linear(2, 2)])
def test_a_class_that_is_none_is_refused(cls: Any) -> None:
    with pytest.raises(DTypeError, match="registered for"):
        ottava.register_converter(cls, Linear.from_linear)


def test_a_function_that_is_none_is_refused() -> None:
    with pytest.raises(DTypeError, match=r"the converter for .* is a str"):
        ottava.register_converter(Scaled, "from_linear")  # type: ignore[arg-type]
    wrong: list[Any] = [
        torch.nn.Linear,
        Linear,
        torch.nn.Linear(2, 2),
        lambda module: module,
        lambda a, b, c: a,
    ]
    for function in wrong:
        with pytest.raises(
            DTypeError, match=r"the converter for .*Scaled.*a function of a module and its name"
        ):
            ottava.register_converter(Scaled, function)


def test_only_modules_become_layers() -> None:
    with pytest.raises(DTypeError, match=r"the layer is a NoneType.*torch\.nn\.Module"):
        Linear.from_linear(None)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="NoneType"):
        TransposedLinear.from_linear(None)  # type: ignore[arg-type]


class Conv1D(torch.nn.Module):
    """As that of Transformers."""

    def __init__(self, nf: int, nx: int, bias: bool = True) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = torch.nn.Parameter(torch.randn(nx, nf))
        if bias:
            self.bias = torch.nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.t(), getattr(self, "bias", None))


def test_classes_of_packages_are_found_by_name(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    assert "transformers" not in sys.modules or isinstance(sys.modules["transformers"], ModuleType)
    model = torch.nn.Sequential(Conv1D(8, 4))
    weight, keys = model[0].weight, set(model.state_dict())
    x = torch.randn(3, 4)
    expected = model(x)
    ottava.convert(model, recipe)
    assert type(model[0]) is TransposedLinear
    assert (model[0].in_features, model[0].out_features, model[0].nf) == (4, 8, 8)
    assert model[0].weight is weight
    assert set(model.state_dict()) == keys
    with ottava.autocast(enabled=False):
        assert torch.equal(model(x), expected)
    assert not torch.equal(model(x), expected)


def test_without_a_bias(recipe: Any) -> None:
    ottava.register_converter(Conv1D, TransposedLinear.from_linear)
    module = Conv1D(8, 4, bias=False)
    layer = ottava.convert(module, recipe)
    assert layer.bias is None
    assert "bias" not in module._parameters
    layer(torch.randn(3, 4)).sum().backward()
    assert layer.weight.grad.shape == (4, 8)


def test_calibration_sees_the_weight_as_a_product_does(recipe: Any) -> None:
    shapes: list[Any] = []
    ottava.register_converter(Conv1D, TransposedLinear.from_linear)
    layer = ottava.convert(Conv1D(8, 4), recipe)
    for quantizer in layer._binding.state.quantizers.values():
        quantizer.calibrate = lambda tensor: shapes.append(tuple(tensor.shape))
    with ottava.autocast(calibrating=True):
        layer(torch.randn(3, 4))
    assert shapes == [(3, 4), (8, 4)]


def test_it_is_initialized_by_its_number_of_inputs(recipe: Any) -> None:
    ottava.register_converter(Conv1D, TransposedLinear.from_linear)
    layer = ottava.convert(Conv1D(2, 400), recipe)
    weight = layer.weight
    layer.reset_parameters()
    assert layer.weight is weight
    assert weight.shape == (400, 2)
    assert 0.03 < weight.abs().max() <= 0.05  # 1 / sqrt(400)
    assert layer.bias.abs().max() <= 0.05


def test_it_can_be_made_as_any_layer(recipe: Any) -> None:
    with ottava.quantized_model_init(recipe):
        layer = TransposedLinear(400, 2, recipe=recipe)
    assert type(layer.weight) is torch.nn.Parameter
    assert layer.weight.shape == (400, 2)
    assert 0.03 < layer.weight.abs().max() <= 0.05  # 1 / sqrt(400)
    twin = Linear(400, 2, recipe=recipe)
    with torch.no_grad():
        twin.weight.copy_(layer.weight.t())
        twin.bias.copy_(layer.bias)
    x = torch.randn(3, 400)
    assert torch.equal(layer(x), twin(x))
