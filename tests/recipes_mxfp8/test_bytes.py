"""The layouts of the roles, their bytes, and the names that MXFP8 tensors have for them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ottava
from ottava import Layout
from ottava.debug import fake_quantize
from ottava.errors import OptionError
from ottava.formats import Format
from ottava.recipes import registry
from ottava.recipes.role import QuantizerRole
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from tests.comparing import assert_same
from tests.layout_recipes import assert_fake_quantizes, assert_made_of, assert_quantizes_by
from tests.samples import wide

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
BY_FORMAT = {Format.E4M3: (E4M3, E4M3), Format.E5M2: (E5M2, E5M2), Format.HYBRID: (E4M3, E5M2)}


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("fmt", Format)
def test_the_layout_of_each_role(fmt: Format, square: bool, rounding: str) -> None:
    """Gradients have the format of the backward pass; weights alone have squares."""
    recipe = MXFP8BlockScaling(fmt, with_2d_quantization=square, scale_rounding=rounding)
    for role in ("input", "weight", "output", "grad_output", "grad_input"):
        element = BY_FORMAT[fmt][role.startswith("grad")]
        shared = (32, 32) if square and role == "weight" else None
        for asked in (role, QuantizerRole("linear", role, "block.0")):
            assert type(recipe.quantizer(asked)) is MXFP8Quantizer
            layout = Layout(element, (1, 32), E8M0, rounding, shared=shared)
            assert recipe.quantizer(asked).layout == layout
    assert_quantizes_by(recipe.quantizer("weight"), recipe.quantizer("weight").layout)


def test_defaults_and_spec() -> None:
    recipe = ottava.get_recipe("mxfp8")
    assert recipe == MXFP8BlockScaling() == MXFP8BlockScaling(Format.E4M3, False, "up")
    assert recipe != MXFP8BlockScaling(scale_rounding="floor")
    assert hash(recipe) == hash(MXFP8BlockScaling())
    assert (recipe.name, recipe.stateful) == ("mxfp8", False)
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "mxfp8")
    assert (spec.block_size, spec.formats) == ((1, 32), ("E4M3", "E5M2"))
    assert not spec.stateful
    assert not spec.needs_reduction
    assert "block 1x32" in spec.capabilities
    assert spec.fake_quant_formats == ("MXFP8E4M3", "MXFP8E5M2")


SHAPES = {
    "rowwise_data": (2, 33, 70),
    "rowwise_scale_inv": (66, 3),
    "columnwise_data": (2, 33, 70),
    "columnwise_scale_inv": (3, 70),
}


@pytest.mark.parametrize("square", [False, True])
def test_tensors_have_names_for_their_parts_and_options(square: bool) -> None:
    quantizer = MXFP8Quantizer(E5M2, with_2d_quantization=square)
    for internal, cls in ((False, MXFP8Tensor), (True, MXFP8TensorStorage)):
        quantizer.internal = internal
        q = quantizer(wide(2, 33, 70, dtype=torch.bfloat16))
        assert (q._fp8_dtype, q._with_2d_quantization) == (E5M2, square)
        assert [i.native or q._fp8_dtype for i in q.inner_tensors] == ["_fp8_dtype", E8M0] * 2
        options = {"fp8_dtype": E5M2, "with_2d_quantization": square}
        made = assert_made_of(q, cls, SHAPES, **options)
        assert made.rowwise_serves_columnwise is square


@pytest.mark.parametrize(("name", "element"), [("MXFP8E4M3", E4M3), ("MXFP8E5M2", E5M2)])
def test_fake_quantization_is_that_of_blocks_along_rows(name: str, element: Any) -> None:
    assert_fake_quantizes(name, Layout(element, (1, 32), E8M0, "up"))
    x, out = wide(40, 40), torch.empty(40, 40)
    assert fake_quantize(x, name, out) is out
    assert_same(out, fake_quantize(x, name))
    recipe = MXFP8BlockScaling(scale_rounding="floor")
    assert recipe.fake_quantizer(name).layout == Layout(element, (1, 32), E8M0, "floor")
    assert recipe.fake_quantizer("FP8E4M3") is None


@pytest.fixture
def _no_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", "ottava-recipes-mxfp8")
    registry.reload()
    yield
    monkeypatch.undo()
    registry.reload()


@pytest.mark.usefixtures("_no_package")
def test_without_the_package_the_error_names_it() -> None:
    with pytest.raises(OptionError, match="pip install ottava-recipes-mxfp8"):
        fake_quantize(torch.ones(3), "MXFP8E4M3")


def test_a_function_under_inductor_has_the_bytes_of_eager_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names the recipe. Operators are opaque to a compiler, and it sums the gradient of the bias
    as eager code."""
    torch._dynamo.reset()
    # The compiler would try out the processor's instructions in three programs, for seconds.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    # 2.11's compiler cannot trace how a layer gets its first state.
    recipe = "mxfp8" if torch.__version__ < "2.12" else None
    layer = ottava.nn.Linear(64, 40, dtype=torch.bfloat16, recipe=recipe)

    def run(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with ottava.autocast("mxfp8"):
            return module(x)

    twin, results = copy.deepcopy(layer), []
    for module, function in ((layer, run), (twin, torch.compile(run, fullgraph=True))):
        x = wide(33, 64, dtype=torch.bfloat16, sigma=1.0).requires_grad_()
        y = function(module, x)
        y.backward(wide(33, 40, dtype=torch.bfloat16, sigma=1.0, seed=1))
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    assert_same(*results)
