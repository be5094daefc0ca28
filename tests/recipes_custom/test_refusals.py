"""Wrong recipes, factories, quantizers, tensors and products; those of recipe files are in
``test_refused_files.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ottava
from ottava import GridQuantizer, Layout, QuantizerRole
from ottava.errors import DTypeError, OptionError, RecipeNotFoundError, ShapeError, UsageError
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CurrentScalingTensorRef,
    CustomRecipe,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensorStorage,
    by_direction,
    by_layer,
    by_tensor,
    current_scaling_ref_factory,
    identity_factory,
    mirror,
)

E4M3, F32 = torch.float8_e4m3fn, torch.float32
BYTES, ONE = torch.zeros(2, 2, dtype=torch.uint8), torch.ones(())
ref, parts = CurrentScalingQuantizerRef, CurrentScalingTensorRef


class Stateful(GridQuantizer):
    stateful = True


def served(factory: Any) -> Any:
    return CustomRecipe(factory).quantizer("input")


def side(rows: Any, columns: Any = None) -> Any:
    """A hybrid of a quantizer and one that is right."""
    return HybridQuantizer(rows or ref(E4M3), columns or ref(E4M3))


def product(**changed: Any) -> Any:
    operands: Any = {"qx": torch.ones(5, 7), "qw": torch.ones(6, 7), "sx": ONE, "sw": ONE}
    operands |= {"m_params": None, "out_dtype": torch.float32}
    return ref(E4M3).qgemm(**(operands | changed))


CUSTOM: Any = CustomRecipe
KEEPS = Stateful(Layout(E4M3, (1, None)))
#: Who refuses what: the call, the error, and words of it.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # Recipes and factories.
    "a number": (lambda: CUSTOM(3), DTypeError, "qfactory is a int"),
    "of nothing": (lambda: CUSTOM(lambda: None), DTypeError, r"qfactory cannot.*qfactory\(role\)"),
    "of two": (lambda: CUSTOM(lambda role, layer: 0), DTypeError, "cannot be called.*'layer'"),
    "a path": (lambda: CUSTOM("a/m.yaml"), OptionError, r"CustomRecipe.from_file\('a/m.yaml'\)"),
    "a name": (lambda: CUSTOM("nonesuch"), RecipeNotFoundError, "quantizer factory 'nonesuch'"),
    "no quantizer": (lambda: served(lambda role: None), DTypeError, "None for .*IdentityQuantizer"),
    "a text": (lambda: served(lambda role: "x"), DTypeError, "returned a str for"),
    "a class": (lambda: served(lambda role: ref), DTypeError, "returned a ABCMeta for"),
    "a factory and a file": (
        lambda: ottava.get_recipe("custom", qfactory="identity", file="a.yaml"),
        *(OptionError, "qfactory and file"),
    ),
    "a pattern": (lambda: by_layer({3: "x"}, "identity"), DTypeError, "a pattern is a int"),  # type: ignore[dict-item]
    "of a layer": (lambda: by_layer({"a": 3}, "identity"), DTypeError, "the factory is a int"),  # type: ignore[dict-item]
    "the default": (lambda: by_layer({}, "nonesuch"), RecipeNotFoundError, "nonesuch"),
    "a tensor": (lambda: by_tensor("identity", wieght="x"), OptionError, "tensor type 'wieght'"),
    "no side": (
        lambda: by_direction("identity", lambda role: None)(QuantizerRole("", "weight")),
        *(OptionError, "no quantizer"),
    ),
    "options of a recipe": (
        lambda: mirror(CustomRecipe(identity_factory), qfactory="identity"),
        *(DTypeError, "options for a recipe that is built"),
    ),
    "a mirror of nothing": (lambda: mirror("nonesuch"), RecipeNotFoundError, "nonesuch"),
    "a mirror of a number": (lambda: mirror(3), DTypeError, "int"),  # type: ignore[arg-type]
    "a role": (lambda: current_scaling_ref_factory("bias"), OptionError, "tensor type 'bias'"),
    # Sides of hybrids.
    "columns of a name": (lambda: side(None, "current"), DTypeError, "columnwise_quantizer is a"),
    "rows of a number": (lambda: side(3), DTypeError, "rowwise_quantizer is a"),
    "rows that keep state": (lambda: side(KEEPS), OptionError, "rowwise_quantizer is a"),
    "columns that keep state": (lambda: side(None, KEEPS), OptionError, "columnwise_quantizer is"),
    # Options of the reference.
    "int8": (lambda: ref(torch.int8), DTypeError, "int8"),
    "eps < 0": (lambda: ref(E4M3, eps=-1.0), OptionError, "eps"),
    "eps of NaN": (lambda: ref(E4M3, eps=math.nan), OptionError, "eps"),
    "pow_2_scales": (lambda: ref(E4M3, pow_2_scales=1), OptionError, "pow_2_scales"),  # type: ignore[arg-type]
    "rowwise": (lambda: ref(E4M3, rowwise=None), OptionError, "rowwise"),  # type: ignore[arg-type]
    # Parts of tensors.
    "nothing": (lambda: parts(), UsageError, "needs data"),
    "no data": (lambda: parts(scale=ONE), UsageError, "needs data"),
    "no scale": (lambda: parts(data=BYTES), DTypeError, "scale"),
    "two scales": (lambda: parts(data=BYTES, scale=torch.ones(2)), ShapeError, "scale"),
    "a scale of float64": (lambda: parts(data=BYTES, scale=ONE.double()), DTypeError, "scale"),
    "data of float32": (lambda: parts(data=BYTES.float(), scale=ONE), DTypeError, "data"),
    "another shape": (
        lambda: parts(data=BYTES, scale=ONE, original_shape=(3, 2)),
        *(ShapeError, "data"),
    ),
    "another transpose": (
        lambda: parts(data=BYTES, data_t=BYTES[:1], scale=ONE),
        *(ShapeError, "data_t"),
    ),
    "elements of int8": (
        lambda: parts(data=BYTES, scale=ONE, quant_dtype=torch.int8),
        *(DTypeError, "int8"),
    ),
    "an identity without data": (
        lambda: IdentityTensorStorage(dtype=F32, rowwise=True, columnwise=True).dequantize(),
        *(UsageError, "holds no data"),
    ),
    # Products.
    "bytes": (
        lambda: product(qx=torch.zeros(5, 7, dtype=torch.uint8)),
        DTypeError,
        "of torch.uint8",
    ),
    "no operand": (lambda: product(qx=None), DTypeError, "of NoneType"),
    "other columns": (lambda: product(qx=torch.zeros(5, 6)), ShapeError, "equal reduced"),
    "a number as a scale": (lambda: product(sx=2.0), DTypeError, "one element"),
    "two scales of a product": (lambda: product(sw=torch.ones(2)), DTypeError, "one element"),
    "a bias of rows": (lambda: product(bias=torch.zeros(5)), ShapeError, "bias has shape"),
    "out of other columns": (lambda: product(out=torch.zeros(5, 5)), ShapeError, "out has shape"),
    "out of one row": (lambda: product(out=torch.zeros(1, 6)), ShapeError, "out has shape"),
    "out of int32": (
        lambda: product(out=torch.zeros(5, 6, dtype=torch.int32)),
        DTypeError,
        "out has dtype",
    ),
    "a kind of product": (lambda: product(gemm_type="forward"), OptionError, "gemm_type"),
    "nothing to add to": (lambda: product(accumulate=True), OptionError, "accumulate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_what_is_right_is_taken() -> None:
    assert product().shape == (5, 6)
    assert parts(data=BYTES, scale=ONE).shape == (2, 2)
    assert isinstance(side(IdentityQuantizer()), HybridQuantizer)
