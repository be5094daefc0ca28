"""Quantized layers refuse torch.func, forward-mode derivatives and torch.jit.trace, before anything
changes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import func

import ottava
from ottava.errors import UsageError
from tests.combinations import slow

RECIPES = ["blockwise", "current", "delayed", "mxfp8", "rowwise"]


def made(recipe: str, *, primary: bool = False) -> Any:
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layers = [ottava.nn.Linear(32, 32, name=name) for name in "02"]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
    ottava.convert(model, recipe)
    model(torch.randn(8, 32)).sum().backward()
    return model


def forward_mode(model: Any, x: torch.Tensor) -> Any:
    with fw.dual_level():
        return fw.unpack_dual(model(fw.make_dual(x, torch.ones_like(x)))).tangent


def forward_mode_of_a_weight(model: Any, x: torch.Tensor) -> Any:
    with fw.dual_level():
        weights = {
            n: fw.make_dual(p.detach(), torch.ones_like(p)) for n, p in model.named_parameters()
        }
        return fw.unpack_dual(func.functional_call(model, weights, (x,))).tangent


def of_the_parameters(model: Any, x: torch.Tensor) -> Any:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return func.grad(lambda given: func.functional_call(model, given, (x,)).sum())(weights)


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda model, x: func.vmap(model)(x.expand(3, 8, 32)),
    "vmap of a layer": lambda model, x: func.vmap(model[0])(x.expand(3, 8, 32)),
    "grad": lambda model, x: func.grad(lambda given: model(given).sum())(x),
    "grad of the parameters": of_the_parameters,
    "vjp": lambda model, x: func.vjp(model, x)[1](x),
    "jvp": lambda model, x: func.jvp(model, (x,), (x,)),
    "jacrev": lambda model, x: func.jacrev(model)(x),
    "hessian": lambda model, x: func.hessian(lambda given: model(given).sum())(x),
    "linearize": lambda model, x: func.linearize(model, x),
    "forward mode": forward_mode,
    "forward mode of a weight": forward_mode_of_a_weight,
}
WORDS = {
    "forward": "forward-mode",
    "linear": "forward-mode",
    "jvp": "jvp",
    "jacrev": "grad|vjp",
    "vmap": "vmap",
}


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_refused(recipe: str, name: str) -> None:
    """In training, in evaluation, and in a region; the state stays, and the model goes on as it
    would have."""
    model, x = made(recipe), torch.randn(8, 32)
    before = copied(model)
    regions: list[Any] = [contextlib.nullcontext(), torch.no_grad()]
    for region in regions:
        with region, pytest.raises(UsageError, match=r"Linear '[02]'") as caught:
            TRANSFORMS[name](model, x)
        assert "autocast(enabled=False)" in caught.value.remedy
        assert caught.value.expected
        words = next(
            (words for begin, words in WORDS.items() if name.startswith(begin)),
            "grad|jvp|forward-mode",
        )
        assert any(word in caught.value.what for word in words.split("|")), caught.value.what
        # linearize first calls the model as it is, which is a forward pass of a step.
        assert same(copied(model), before) or name == "linearize"
    with ottava.autocast(recipe), pytest.raises(UsageError):
        TRANSFORMS[name](model, x)
    twin = made(recipe)
    if recipe != "delayed":  # which began a step with the region
        assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name != "linearize"])
def test_in_high_precision_they_work(name: str) -> None:
    model, x = made("delayed"), torch.randn(8, 32)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
    plain.load_state_dict(dict(model.named_parameters()))
    before = copied(model)
    with ottava.autocast(enabled=False):
        found = TRANSFORMS[name](model, x)
    torch.testing.assert_close(found, TRANSFORMS[name](plain, x))
    assert same(copied(model), before)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("primary", [False, True])
def test_functional_call_by_itself(recipe: str, primary: bool) -> None:
    """Also with other tensors, whose gradients come, and while a level of forward mode is open for
    something else."""
    model, twin, x = (
        made(recipe, primary=primary),
        made(recipe, primary=primary),
        torch.randn(8, 32),
    )
    weights = dict(twin.named_parameters())
    found = func.functional_call(model, weights, (x,))
    found.sum().backward()
    twin.zero_grad()
    expected = twin(x)
    expected.sum().backward()
    assert torch.equal(found, expected)
    assert all(torch.equal(weights[name].grad, p.grad) for name, p in twin.named_parameters())
    with fw.dual_level():
        model(x).sum().backward()


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "delayed"])
def test_batched_gradients(recipe: str) -> None:
    """A vmap over the backward pass alone gives the gradients one by one."""
    model, several = made(recipe), torch.randn(3, 8, 32)
    y = model(torch.randn(8, 32))
    (found,) = torch.autograd.grad(
        y, model[0].weight, several, is_grads_batched=True, retain_graph=True
    )
    each = [torch.autograd.grad(y, model[0].weight, one, retain_graph=True)[0] for one in several]
    assert torch.equal(found, torch.stack(each))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace(recipe: str) -> None:
    """And the exporter to ONNX that is built on it."""
    model, x = made(recipe), torch.randn(8, 32)
    before = copied(model)
    with pytest.raises(UsageError, match=r"Linear '0' .*torch\.jit\.trace.*torch\.export"):
        torch.jit.trace(model, (x,))
    with torch.no_grad(), pytest.raises(UsageError, match=r"torch\.jit\.trace"):
        torch.jit.trace(model.eval(), (x,), check_trace=False)
    assert same(copied(model), before)
    with ottava.autocast(enabled=False):
        traced = torch.jit.trace(model, (x,))
        assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("current", "vmap of a layer"),
        ("delayed", "jvp"),
        *slow(
            ("current", "jvp"),
            ("delayed", "vmap of a layer"),
            *itertools.product(["current", "delayed"], ["grad", "grad of the parameters"]),
        ),
    ],
)
def test_refused_inside_compiled_code(recipe: str, name: str) -> None:
    """There a gradient would be zeros."""
    model, x = made(recipe), torch.randn(8, 32)
    before = copied(model)
    for whole, error in ((False, UsageError), (True, Exception)):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: TRANSFORMS[name](model, x), backend="eager", fullgraph=whole
        )
        with pytest.raises(error):
            compiled(x)
        assert same(copied(model), before)


def test_a_region_begins_no_step_inside_a_transform() -> None:
    model, x = ottava.nn.Linear(32, 32, recipe="delayed"), torch.randn(8, 32)
    with ottava.autocast():
        model(x).sum().backward()
    before = copied(model)

    def function(given: torch.Tensor) -> torch.Tensor:
        with ottava.autocast():
            return given.sum()

    func.grad(function)(x)
    assert same(copied(model), before)
    with ottava.autocast():
        pass
    assert not same(copied(model), before)
