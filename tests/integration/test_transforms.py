"""Quantized layers refuse torch.func, forward-mode derivatives and torch.jit.trace, before anything
changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import func

import ottava
from ottava.errors import UsageError
from tests.comparing import unchanged

# A recipe with a state, and one whose operands have blocks.
RECIPES = ["delayed", "mxfp8"]


def model_of(recipe: str, *, primary: bool = False) -> Any:
    """Two layers after their first step."""
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layers = [ottava.nn.Linear(32, 32, name=name) for name in "02"]
    model = ottava.convert(torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1]), recipe)
    model(torch.randn(8, 32)).sum().backward()
    return model


def forward_mode(model: Any, x: torch.Tensor) -> Any:
    with fw.dual_level():
        return fw.unpack_dual(model(fw.make_dual(x, torch.ones_like(x)))).tangent


def forward_mode_of_weights(model: Any, x: torch.Tensor) -> Any:
    with fw.dual_level():
        weights = {
            name: fw.make_dual(p.detach(), torch.ones_like(p))
            for name, p in model.named_parameters()
        }
        return fw.unpack_dual(func.functional_call(model, weights, (x,))).tangent


def grad_of_weights(model: Any, x: torch.Tensor) -> Any:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return func.grad(lambda values: func.functional_call(model, values, (x,)).sum())(weights)


#: Name -> what is tried, and the word of the message that says what was refused.
TRANSFORMS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "vmap": (lambda model, x: func.vmap(model)(x.expand(3, 8, 32)), "vmap"),
    "vmap of a layer": (lambda model, x: func.vmap(model[0])(x.expand(3, 8, 32)), "vmap"),
    "grad": (lambda model, x: func.grad(lambda values: model(values).sum())(x), "grad"),
    "grad of weights": (grad_of_weights, "grad"),
    "jvp": (lambda model, x: func.jvp(model, (x,), (x,)), "jvp"),
    "jacrev": (lambda model, x: func.jacrev(model)(x), "vjp"),
    "hessian": (lambda model, x: func.hessian(lambda values: model(values).sum())(x), "jvp"),
    "linearize": (lambda model, x: func.linearize(model, x), "forward-mode"),
    "forward mode": (forward_mode, "forward-mode"),
    "forward mode of weights": (forward_mode_of_weights, "forward-mode"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_transforms_are_refused_before_anything_changes(recipe: str, name: str) -> None:
    """And work in high precision."""
    (transform, word), model, x = TRANSFORMS[name], model_of(recipe), torch.randn(8, 32)
    # linearize first calls the model as it is, which is a forward pass of a step.
    for grad_mode in (True, False):
        same = contextlib.nullcontext() if name == "linearize" else unchanged(model)
        with same, torch.set_grad_enabled(grad_mode), pytest.raises(UsageError) as caught:
            transform(model, x)
        assert "Linear '0'" in caught.value.what or "Linear '2'" in caught.value.what
        assert word in caught.value.what or "grad" in caught.value.what
        assert "autocast(enabled=False)" in caught.value.remedy
    plain = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
    plain.load_state_dict(dict(model.named_parameters()))
    if name != "linearize":
        with unchanged(model), ottava.autocast(enabled=False):
            result = transform(model, x)
        torch.testing.assert_close(result, transform(plain, x))
    with ottava.autocast(recipe), pytest.raises(UsageError):
        transform(model, x)


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_functional_call_gives_gradients_of_other_weights(recipe: str, primary: bool) -> None:
    model, twin = model_of(recipe, primary=primary), model_of(recipe, primary=primary)
    x, weights = torch.randn(8, 32), dict(twin.named_parameters())
    twin.zero_grad()
    result = func.functional_call(model, weights, (x,))
    result.sum().backward()
    gradients = {name: p.grad for name, p in weights.items()}
    twin.zero_grad()
    expected = twin(x)
    expected.sum().backward()
    assert torch.equal(result, expected)
    assert all(torch.equal(gradients[name], p.grad) for name, p in twin.named_parameters())
    # Open for something else.
    with fw.dual_level():
        model(x).sum().backward()


def test_batched_gradients_are_the_gradients_one_by_one() -> None:
    model, several = model_of("mxfp8"), torch.randn(3, 8, 32)
    y, weight = model(torch.randn(8, 32)), model[0].weight
    (batched,) = torch.autograd.grad(y, weight, several, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, weight, one, retain_graph=True)[0] for one in several]
    assert torch.equal(batched, torch.stack(each))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_is_refused_and_works_in_high_precision(recipe: str) -> None:
    model, x = model_of(recipe), torch.randn(8, 32)
    words = r"Linear '0' .*torch\.jit\.trace.*torch\.export"
    with unchanged(model), pytest.raises(UsageError, match=words):
        torch.jit.trace(model, (x,))
    with unchanged(model), torch.no_grad(), pytest.raises(UsageError, match=words):
        torch.jit.trace(model.eval(), (x,), check_trace=False)
    with ottava.autocast(enabled=False):
        assert torch.equal(torch.jit.trace(model, (x,))(x), model(x))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_code_refuses_transforms(whole: bool) -> None:
    """There a gradient would be zeros."""
    model, x = model_of("delayed"), torch.randn(8, 32)

    def tangents(x: torch.Tensor) -> Any:
        return func.jvp(model[0], (x,), (x,))

    torch._dynamo.reset()
    with unchanged(model), pytest.raises(Exception if whole else UsageError):
        torch.compile(tangents, backend="eager", fullgraph=whole)(x)


def test_a_region_begins_no_step_inside_a_transform() -> None:
    model, x = ottava.nn.Linear(32, 32, recipe="delayed"), torch.randn(8, 32)
    with ottava.autocast():
        model(x).sum().backward()

    def function(values: torch.Tensor) -> torch.Tensor:
        with ottava.autocast():
            return values.sum()

    with unchanged(model):
        func.grad(function)(x)
    with pytest.raises(AssertionError), unchanged(model), ottava.autocast():
        pass
