"""``Recipe.backward``: the gradients of each recipe under each word, and what is saved for them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.errors import OptionError
from ottava.gemm import gemm
from ottava.nn import Linear
from ottava_custom import CustomRecipe
from ottava_debug.products import Inspection, Watch
from ottava_rowwise import Float8RowwiseScaling
from tests.choosing import cpu_products
from tests.comparing import assert_same
from tests.core.fake_plugins import installed, offers, plugin
from tests.fsdp import KEPT, assert_trains_alike
from tests.ranks import on_ranks
from tests.samples import wide

# Recipes whose data have the shapes of the operands, and those whose elements share bytes.
OF_BYTES = ("current", "delayed", "mxfp8", "blockwise", "rowwise", "custom")
NAMES = (*OF_BYTES, "mx", "nvfp4")
HIGH_PRECISION, DEQUANTIZED = WORDS = ("high_precision", "dequantized")
CASES = list(itertools.product(NAMES, WORDS))
F32, BF16 = torch.float32, torch.bfloat16
Values = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _products_round_once() -> Iterator[None]:
    with cpu_products(F32):
        yield


def layer(
    recipe: Any,
    *,
    dtype: torch.dtype = F32,
    primary: bool = False,
    name: str = "layer",
    bias: bool = True,
    **options: Any,
) -> Linear:
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe) if primary else nullcontext():
        return Linear(71, 50, bias, dtype=dtype, recipe=recipe, name=name, **options)


def operands(*leading: int, dtype: torch.dtype = F32) -> tuple[torch.Tensor, torch.Tensor]:
    x = wide(*leading, 71, dtype=dtype, sigma=1.0).requires_grad_()
    return x, wide(*leading, 50, seed=1, dtype=dtype, sigma=1.0)


def gradients(own: Linear, x: torch.Tensor, dy: torch.Tensor, run: Any = None) -> Values:
    own.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    (run or own)(x).backward(dy)
    named = {"x": x.grad} | {name: p.grad for name, p in own.named_parameters()}
    return {name: grad for name, grad in named.items() if grad is not None}


def expected(
    recipe: ottava.Recipe, own: Linear, x: torch.Tensor, dy: torch.Tensor, narrow: Any = F32
) -> Values:
    """The gradients by torch, of the values that the word says; each is rounded once. Products read
    the values in ``narrow``."""
    leaves: Values = {"x": x.detach(), "weight": own.weight.detach()}
    roles = {"x": "input", "weight": "weight"}
    for name, value in leaves.items():
        if isinstance(value, ottava.QuantizedTensor):
            value = value.dequantize()
        elif recipe.backward == DEQUANTIZED:
            value = recipe.quantizer(roles[name]).quantize(value).dequantize()
        leaves[name] = value.to(narrow).float().requires_grad_()
    if own.bias is not None:
        leaves["bias"] = own.bias.detach().float().requires_grad_()
    y = torch.nn.functional.linear(leaves["x"], leaves["weight"], leaves.get("bias"))
    y.backward(dy.float())
    return {n: leaf.grad.to(dy.dtype) for n, leaf in leaves.items() if leaf.grad is not None}


def assert_alike(found: Values, others: Values, note: object = "") -> None:
    assert list(found) == list(others), note
    for name, grad in others.items():
        assert_same(found[name], grad, note=(name, note))


@contextmanager
def saved() -> Iterator[list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        yield tensors


# -- gradients --


@pytest.mark.parametrize(("name", "word"), CASES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_are_those_of_the_values(name: str, word: str, dtype: torch.dtype) -> None:
    recipe = ottava.get_recipe(name, backward=word)
    for leading, bias in (((33,), True), ((2, 7), False), ((0,), True), ((), True)):
        # A weight that is kept quantized among them.
        own = layer(recipe, dtype=dtype, bias=bias, primary=dtype is F32 and not bias)
        x, dy = operands(*leading, dtype=dtype)
        assert_alike(gradients(own, x, dy), expected(recipe, own, x, dy), (leading, bias))


@pytest.mark.parametrize(("name", "word"), CASES)
def test_other_ways_to_run_have_the_same_gradients(name: str, word: str) -> None:
    recipe, (x, dy) = ottava.get_recipe(name, backward=word), operands(33)
    same = gradients(layer(recipe), x, dy)

    for reentrant in (False, True):
        own = layer(recipe)
        run = partial(checkpoint, own, use_reentrant=reentrant)
        assert_alike(gradients(own, x, dy, run), same, reentrant)
    own = layer(recipe)
    assert_alike(gradients(own, x, dy, partial(own, is_first_microbatch=True)), same)
    with Watch(lambda layer: Inspection()):
        assert_alike(gradients(layer(recipe), x, dy), same, "watched")


@pytest.mark.parametrize("word", WORDS)
def test_gradients_are_added_to_main_grad(word: str) -> None:
    recipe = ottava.get_recipe("mxfp8", backward=word)
    own = layer(recipe, dtype=BF16, fuse_wgrad_accumulation=True)
    x, dy = operands(33, dtype=BF16)
    own.weight.main_grad = torch.ones(50, 71)
    own(x).backward(dy)
    values = x.detach()
    if word == DEQUANTIZED:
        values = recipe.quantizer("input").quantize(values).dequantize()
    assert_same(own.weight.main_grad, 1 + dy.float().t() @ values.float())


@pytest.mark.parametrize("word", WORDS)
def test_under_autocast_products_read_values_in_its_dtype(word: str) -> None:
    recipe = ottava.get_recipe("rowwise", backward=word)
    own, (x, dy) = layer(recipe), operands(33)
    run = torch.autocast("cpu", dtype=BF16)(own.forward)
    dy = dy.bfloat16()
    found, same = gradients(own, x, dy, run), expected(recipe, own, x, dy, BF16)
    for name in ("x", "weight"):
        assert_same(found[name], same[name].float(), note=name)


# -- what is saved --


@pytest.mark.parametrize("name", OF_BYTES)
def test_only_what_a_gradient_needs_is_saved(name: str) -> None:
    own, (x, _) = layer(ottava.get_recipe(name, backward=HIGH_PRECISION)), operands(33)
    with saved() as tensors:
        own(x)
    assert [t.data_ptr() for t in tensors] == [x.data_ptr(), own.weight.data_ptr()]
    kept = layer(own.recipe, primary=True)
    with saved() as tensors:
        kept(x).sum().backward()
    assert isinstance(tensors[-1], ottava.QuantizedTensor)
    # dgrad reads no columns, so that the weight has none.
    assert kept.weight.nbytes < 1.2 * kept.weight.numel()
    own, (x, _) = layer(ottava.get_recipe(name, backward=DEQUANTIZED), dtype=BF16), operands(33)
    x = x.detach().bfloat16().requires_grad_()
    with saved() as tensors:
        own(x)
    data = [t for t in tensors if t.shape in (x.shape, own.weight.shape)]
    assert [t.dtype for t in data] == [torch.uint8, torch.uint8]
    assert sum(t.nbytes for t in tensors) < 1.2 * (x.numel() + own.weight.numel())


@pytest.mark.parametrize("name", OF_BYTES)
@pytest.mark.parametrize("word", WORDS)
def test_frozen_operands_save_nothing(name: str, word: str) -> None:
    own, (x, dy) = layer(ottava.get_recipe(name, backward=word)), operands(33)
    full = gradients(own, x, dy)
    # With a frozen weight dgrad reads the weight, with a frozen input wgrad the input.
    for trains, shape in ((False, own.weight.shape), (True, x.shape)):
        own, leaf = layer(own.recipe), x.detach().requires_grad_(not trains)
        own.weight.requires_grad_(trains)
        with saved() as tensors:
            found = gradients(own, leaf, dy)
        assert {t.shape for t in tensors if t.numel() > 999} == {shape}
        assert_alike(found, {name: full[name] for name in found})


# -- several recipes in a layer --

FILE = """
default: {recipe: mxfp8, backward: dequantized}
layers:
  - match: hybrid
    weight: {rowwise: mxfp8, columnwise: {recipe: current, backward: high_precision}}
    input: rowwise
    grad_output: rowwise
  - match: mixed
    input: {recipe: current, backward: high_precision}
    weight: rowwise
    grad_output: blockwise
"""


def test_recipe_files_and_factories_say_it_for_each_role(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(FILE)
    recipe = ottava.get_recipe(str(path))

    def words(recipe: ottava.Recipe, name: str) -> list[tuple[str, str]]:
        types = ("input", "weight", "grad_output")
        roles = [ottava.QuantizerRole("linear", each, name) for each in types]
        return [(e.rowwise, e.columnwise) for e in map(recipe.explain, roles)]

    rows, high = ("mxfp8 E4M3", "mxfp8 E4M3, dequantized"), "high precision"
    assert words(recipe, "layer") == [rows, rows, (high, high)]
    assert words(recipe, "mixed") == [
        ("current E4M3", high),
        ("rowwise E4M3", "rowwise E4M3"),
        ("blockwise E4M3", "blockwise E4M3"),
    ]
    assert words(recipe, "hybrid")[1] == ("mxfp8 E4M3", high)
    # The word of the recipe around the others comes first.
    outer = ottava.get_recipe(str(path), backward=HIGH_PRECISION)
    assert [columnwise for _, columnwise in words(outer, "mixed")] == [high] * 3
    x, dy = operands(33)
    same = layer(ottava.get_recipe("mxfp8", backward=DEQUANTIZED))
    assert_alike(gradients(layer(recipe), x, dy), gradients(same, x, dy))
    # wgrad of one layer reads the input, dgrad of another the weight.
    dy_columns = ottava.get_recipe("blockwise").quantizer("grad_output").with_usage(False, True)
    product = gemm(dy_columns(dy), x.detach(), "wgrad", out_dtype=F32)
    assert_same(gradients(layer(recipe, name="mixed"), x, dy)["weight"], product)
    own = layer(recipe, name="hybrid")
    dy_rows = ottava.get_recipe("rowwise").quantizer("grad_output").with_usage(True, False)
    product = gemm(dy_rows(dy), own.weight.detach(), "dgrad", out_dtype=F32)
    assert_same(gradients(own, x, dy)["x"], product)


def test_a_hybrid_refuses_columns_that_would_be_rows(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "default: {rowwise: mxfp8, columnwise: {recipe: current, backward: dequantized}}"
    )
    with pytest.raises(OptionError, match=r"columns of a hybrid .* reads rows"):
        ottava.get_recipe(str(path))


@dataclasses.dataclass(frozen=True)
class Equal(ottava.Recipe):
    """A recipe without the field, whose objects are equal."""

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
        return ottava.get_recipe("rowwise").quantizer(role)


def test_recipes_of_others_get_the_option_from_core(tmp_path: Path) -> None:
    (tmp_path / "words_impl.py").write_text(f"from {__name__} import Equal\nwords = Equal\n")
    plugin(tmp_path, "words", "words_plugin", offers("words", factory="words_impl:words"))
    x, dy = operands(33)
    same = gradients(layer(ottava.get_recipe("rowwise", backward=DEQUANTIZED)), x, dy)
    with installed(tmp_path):
        recipe = ottava.get_recipe("words", backward=DEQUANTIZED)
        assert_alike(gradients(layer(recipe), x, dy), same)
        with pytest.raises(OptionError, match="backward is 'rows'"):
            ottava.get_recipe("words", backward="rows")
    # Recipes that compare equal by their fields serve other layers all the same.
    own = layer(Equal())
    with ottava.autocast(recipe):
        assert_alike(gradients(own, x, dy), same)
    object.__setattr__(recipe, "backward", "columns")
    with pytest.raises(OptionError, match=r"backward is 'columns'.*quantized, high_precision, deq"):
        layer(recipe)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_words_are_refused(name: str) -> None:
    for word in ("rows", None, True):
        with pytest.raises(OptionError, match=f"backward is {word!r}.*one of quantized, high"):
            ottava.get_recipe(name, backward=word)


def test_wgrad_in_high_precision_contradicts_dequantized_operands_alone() -> None:
    with pytest.raises(OptionError, match="backward is 'dequantized', and wgrad_high_precision"):
        Float8RowwiseScaling(wgrad_high_precision=True, backward=DEQUANTIZED)
    both = Float8RowwiseScaling(wgrad_high_precision=True, backward=HIGH_PRECISION)
    one = dataclasses.replace(both, wgrad_high_precision=False)
    x, dy = operands(33)
    assert_alike(gradients(layer(both), x, dy), gradients(layer(one), x, dy))


def test_a_factory_over_a_recipe_has_its_word() -> None:
    recipe = CustomRecipe(lambda role: ottava.QuantizerRequest("delayed"), backward=DEQUANTIZED)
    own, same = layer(recipe), layer(ottava.get_recipe("delayed", backward=DEQUANTIZED))
    x, dy = operands(33)
    assert_alike(gradients(own, x, dy), gradients(same, x, dy))


# -- shards --


@pytest.mark.parametrize(
    ("name", "word", "reentrant"),
    [
        ("mxfp8", HIGH_PRECISION, None),
        ("mxfp8", DEQUANTIZED, None),
        pytest.param("mxfp8", DEQUANTIZED, False, marks=pytest.mark.slow),
        pytest.param("delayed", HIGH_PRECISION, False, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_shards_train_as_one_process(
    mesh: DeviceMesh, name: str, word: str, reentrant: bool | None
) -> None:
    recipe = ottava.get_recipe(name, backward=word)
    for kept in KEPT:
        assert_trains_alike(mesh, recipe, kept, (name, word), reentrant=reentrant)


def by_layer(role: ottava.QuantizerRole) -> ottava.QuantizerRequest:
    word = "quantized" if role.name == "first" else HIGH_PRECISION
    return ottava.QuantizerRequest(ottava.get_recipe("current", backward=word))


@on_ranks(2)
def test_layers_with_different_words_are_gathered_together(mesh: DeviceMesh) -> None:
    assert_trains_alike(mesh, CustomRecipe(by_layer), "gathered quantized", groups="root")
