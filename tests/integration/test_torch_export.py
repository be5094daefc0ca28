"""``torch.export`` of converted models: programs for inference, which move no state."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.export import Dim

import ottava
from ottava.errors import UsageError
from tests.comparing import unchanged
from tests.integration.mixed_recipes import delayed_inputs


def model_of(name: str, features: int = 64, *, primary: bool = False) -> Any:
    """A layer after two steps, in evaluation."""
    recipe = delayed_inputs("mxfp8") if name == "mixed" else ottava.get_recipe(name)
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layer = ottava.nn.Linear(features, features, name="0")
    model = ottava.convert(torch.nn.Sequential(layer, torch.nn.GELU()), recipe)
    for step in range(2):
        model(torch.randn(8, features) * (step + 1)).sum().backward()
    return model.eval()


def through_a_file(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


#: With strict=True, torch traces by torch.compile, which takes seconds.
SLOW = pytest.mark.slow
STRICT = pytest.mark.parametrize("strict", [False, pytest.param(True, marks=SLOW)])


@pytest.mark.parametrize(
    ("recipe", "gradients", "strict"),
    [
        ("delayed", True, False),
        ("mxfp8", False, False),
        pytest.param("delayed", True, True, marks=SLOW),
        pytest.param("mixed", False, False, marks=SLOW),
        pytest.param("blockwise", True, True, marks=SLOW),
        pytest.param("rowwise", False, False, marks=SLOW),
    ],
)
def test_a_program_has_the_bytes_of_evaluation(recipe: str, gradients: bool, strict: bool) -> None:
    """And neither the model nor the program moves a scale."""
    model = model_of(recipe)
    with unchanged(model), torch.set_grad_enabled(gradients):
        program = torch.export.export(model, (torch.randn(8, 64),), strict=strict)
    program = through_a_file(program)
    run = program.module()
    with unchanged(run):
        for factor in (1.0, 9.0):
            x = torch.randn(8, 64) * factor
            with torch.no_grad():
                assert torch.equal(run(x), model(x))
            run(x)
    assert not program.run_decompositions().graph_signature.buffers_to_mutate


def test_a_program_makes_nothing_that_only_a_backward_pass_reads() -> None:
    model, x, sizes = model_of("mxfp8"), torch.randn(8, 64), []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            sizes.append(len(torch.export.export(model, (x,), strict=False).graph.nodes))
    assert sizes[0] == sizes[1]


@STRICT
@pytest.mark.parametrize("recipe", ["delayed", "mixed"])
def test_training_with_a_state_is_refused(recipe: str, strict: bool) -> None:
    """A program would have no backward pass, and write a step's scales."""
    model, x = model_of(recipe).train(), torch.randn(8, 64)
    words = r"Linear '0' .*torch\.export.*model\.eval\(\)"
    for gradients in (True, False):
        with (
            unchanged(model),
            torch.set_grad_enabled(gradients),
            pytest.raises(UsageError, match=words),
        ):
            torch.export.export(model, (x,), strict=strict)
    with ottava.autocast(enabled=False):
        torch.export.export(model, (x,), strict=strict)


class Net(torch.nn.Module):
    """A layer whose recipe a region brings."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ottava.nn.Linear(64, 64, name="first")

    def forward(self, x: torch.Tensor) -> Any:
        with ottava.autocast("delayed"):
            return self.layer(x)


@STRICT
@pytest.mark.parametrize("training", [False, True])
def test_a_state_is_not_made_while_a_program_is_traced(training: bool, strict: bool) -> None:
    net, x = Net().train(training), torch.randn(8, 64)
    words = r"Linear 'first' has no state for 'delayed'.*ottava\.convert.*torch\.export"
    with pytest.raises(UsageError, match=words):
        torch.export.export(net, (x,), strict=strict)
    assert not net.layer.state_dict().keys() - {"weight", "bias"}
    with torch.no_grad():
        net.eval()(x)
        assert torch.equal(torch.export.export(net, (x,), strict=strict).module()(x), net(x))


def test_a_program_of_training_without_a_state_is_its_forward_pass() -> None:
    """Whose gradients reach no parameter."""
    model, x = model_of("current").train(), torch.randn(8, 64)
    run = torch.export.export(model, (x,)).module()
    run.zero_grad()
    y = run(x)
    assert torch.equal(y, model(x))
    if y.requires_grad:
        y.sum().backward()
    assert all(p.grad is None for p in run.parameters())


@pytest.mark.parametrize(
    ("recipe", "features"),
    [
        ("mxfp8", 24),
        *(pytest.param(*case, marks=SLOW) for case in (("delayed", 64), ("rowwise", 24))),
    ],
)
def test_a_program_takes_any_number_of_rows(recipe: str, features: int) -> None:
    """Examples are smaller and larger than a block."""
    model = model_of(recipe, features)
    dynamic = ({0: Dim.DYNAMIC}, {0: Dim("batch", max=64), 1: Dim("tokens", max=512)})
    for example, sizes, leading in (
        ((2,), dynamic[0], [(2,), (33,), (100,)]),
        ((2, 3), dynamic[1], [(2, 2), (3, 50)]),
    ):
        examples = (torch.randn(*example, features),)
        run = torch.export.export(model, examples, dynamic_shapes=(sizes,)).module()
        for shape in leading:
            x = torch.randn(*shape, features)
            with torch.no_grad():
                assert torch.equal(run(x), model(x)), shape


def test_weights_that_are_quantized_are_loaded_into_a_model_that_is_exported() -> None:
    """torch cannot write them; a model whose weights are in high precision takes their values."""
    model, other = model_of("mxfp8", primary=True), model_of("mxfp8")
    x = torch.randn(8, 64)
    with pytest.raises(RuntimeError):
        torch.export.export(model, (x,))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        y = torch.export.export(other, (x,)).module()(x)
        torch.testing.assert_close(y, model(x), rtol=2e-2, atol=2e-2)
