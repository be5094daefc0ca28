"""``torch.export`` of converted models: programs for inference, which move no state."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch.export import Dim

import ottava
from ottava.errors import UsageError
from tests.combinations import each_value, slow

RECIPES = ["blockwise", "current", "delayed", "mxfp8", "rowwise"]
FLAGS = [False, True]
SOME = ["delayed", "mxfp8", "mixed"]


def mixed() -> ottava.Recipe:
    recipe = ottava.get_recipe("mxfp8")
    request = ottava.QuantizerRequest(ottava.get_recipe("delayed", amax_history_len=4))
    recipe.set_quantizer_factory(lambda role: request if role.tensor_type == "input" else None)
    return recipe


def combined(axis: list[Any]) -> list[Any]:
    """Recipes with values; those of recipes that are traced as the others are slow."""
    others = [recipe for recipe in RECIPES if recipe not in SOME]
    return [*each_value(SOME, axis), *slow(*itertools.product(others, axis))]


def made(name: str, features: int = 64, *, primary: bool = False) -> Any:
    recipe = mixed() if name == "mixed" else ottava.get_recipe(name)
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layers = [ottava.nn.Linear(features, features, name=name) for name in "02"]
    model = ottava.convert(torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1]), recipe)
    for step in range(2):
        model(torch.randn(8, features) * (step + 1)).sum().backward()
    return model.eval()


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saved(program: Any) -> Any:
    """The program, through a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize(("recipe", "modes"), combined(list(itertools.product(FLAGS, FLAGS))))
def test_evaluation(recipe: str, modes: tuple[bool, bool]) -> None:
    """The bytes of eager evaluation, with gradients enabled as without; neither model nor program
    moves a scale."""
    model, (gradients, strict) = made(recipe), modes
    before = copied(model)
    with torch.set_grad_enabled(gradients):
        program = saved(torch.export.export(model, (torch.randn(8, 64),), strict=strict))
    assert same(copied(model), before)
    run = program.module()
    held = copied(run)
    for factor in (1.0, 9.0):
        x = torch.randn(8, 64) * factor
        with torch.no_grad():
            assert torch.equal(run(x), model(x))
        run(x)
    assert same(copied(run), held)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not any("update_scales" in name for name in called)
    if not strict:
        # What only a backward pass would read is not made.
        inference = torch.no_grad()(torch.export.export)(
            copy.deepcopy(model), (torch.randn(8, 64),)
        )
        assert len(program.graph.nodes) == len(inference.graph.nodes)
    assert not program.run_decompositions().graph_signature.buffers_to_mutate


@pytest.mark.parametrize(("recipe", "strict"), each_value(["delayed", "mixed"], FLAGS))
def test_training_with_state_is_refused(recipe: str, strict: bool) -> None:
    """A program would have no backward pass, and write a step's scales."""
    model = made(recipe).train()
    before = copied(model)
    words = r"Linear '0' .*torch\.export.*model\.eval\(\)"
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), pytest.raises(UsageError, match=words):
            torch.export.export(model, (torch.randn(8, 64),), strict=strict)
    assert same(copied(model), before)
    with ottava.autocast(enabled=False):
        torch.export.export(model, (torch.randn(8, 64),), strict=strict)


@pytest.mark.parametrize(
    ("recipe", "training", "strict"), each_value(["delayed", "mixed"], FLAGS, FLAGS)
)
def test_a_block_that_never_ran_is_refused(recipe: str, training: bool, strict: bool) -> None:
    """The state would have to be made while the program is traced."""
    in_block = mixed() if recipe == "mixed" else recipe

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ottava.nn.Linear(64, 64, name="first")

        def forward(self, x: torch.Tensor) -> Any:
            with ottava.autocast(in_block):
                return self.layer(x)

    net, x = Net().train(training), torch.randn(8, 64)
    with pytest.raises(
        UsageError,
        match=r"Linear 'first' has no state for 'delayed'.*ottava\.convert.*torch\.export",
    ):
        torch.export.export(net, (x,), strict=strict)
    assert not net.layer.state_dict().keys() - {"weight", "bias"}
    with torch.no_grad():
        net.eval()(x)
        assert torch.equal(torch.export.export(net, (x,), strict=strict).module()(x), net(x))


@pytest.mark.parametrize(
    ("recipe", "strict"), each_value([recipe for recipe in RECIPES if recipe != "delayed"], FLAGS)
)
def test_training_without_state(recipe: str, strict: bool) -> None:
    """The forward pass, alone: there are no gradients of the parameters."""
    model, x = made(recipe).train(), torch.randn(8, 64)
    model.zero_grad()
    run = torch.export.export(model, (x,), strict=strict).module()
    found = run(x)
    assert torch.equal(found, model(x))
    if found.requires_grad:
        found.sum().backward()
    assert all(p.grad is None for p in run.parameters())


@pytest.mark.parametrize(("recipe", "features"), combined([64, 24, 8]))
def test_dynamic_shapes_with_small_examples(recipe: str, features: int) -> None:
    """Examples smaller than a block, for programs that take any number of rows."""
    model = made(recipe, features)
    sizes = [2, 32, 33, 100]
    for example, kind in ((2, Dim.DYNAMIC), (33, Dim("rows", min=2, max=4096))):
        x = torch.randn(example, features)
        run = torch.export.export(model, (x,), dynamic_shapes=({0: kind},)).module()
        for size in sizes:
            x = torch.randn(size, features)
            with torch.no_grad():
                assert torch.equal(run(x), model(x)), (example, kind, size)
    dims = ({0: Dim("batch", max=64), 1: Dim("tokens", max=512)},)
    run = torch.export.export(model, (torch.randn(2, 3, features),), dynamic_shapes=dims).module()
    for shape in ((2, 2), (3, 50), (16, 2)):
        x = torch.randn(*shape, features)
        with torch.no_grad():
            assert torch.equal(run(x), model(x)), shape


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_row_is_the_same_as_for_plain_layers(recipe: str) -> None:
    """torch makes a constant of a dimension of 1 in the example, of any model."""
    shapes = ({0: Dim("rows")},)
    for model in (made(recipe), torch.nn.Linear(64, 64)):
        with pytest.raises(Exception, match="specialized"):
            torch.export.export(model, (torch.randn(1, 64),), dynamic_shapes=shapes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_kept_quantized(recipe: str) -> None:
    """torch cannot write them; a model whose weights are in high precision takes their values."""
    model, other, x = made(recipe, primary=True), made(recipe), torch.randn(8, 64)
    with pytest.raises(RuntimeError):
        torch.export.export(model, (x,))
    other.load_state_dict(model.state_dict())
    run = torch.export.export(other, (x,)).module()
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=2e-2, atol=2e-2)
