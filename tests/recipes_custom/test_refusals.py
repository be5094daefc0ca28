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
WEIGHT = QuantizerRole("", "weight")
#: Who refuses what: the error, words of it, and the call.
REFUSED: dict[type[Exception], dict[str, Callable[[], Any]]] = {
    DTypeError: {
        # Recipes and factories.
        "qfactory is a int": lambda: CUSTOM(3),
        r"qfactory cannot.*qfactory\(role\)": lambda: CUSTOM(lambda: None),
        "cannot be called.*'layer'": lambda: CUSTOM(lambda role, layer: 0),
        "None for .*IdentityQuantizer": lambda: served(lambda role: None),
        "returned a str for": lambda: served(lambda role: "x"),
        "returned a ABCMeta for": lambda: served(lambda role: ref),
        "a pattern is a int": lambda: by_layer({3: "x"}, "identity"),  # type: ignore[dict-item]
        "the factory is a int": lambda: by_layer({"a": 3}, "identity"),  # type: ignore[dict-item]
        "options for a recipe that is built": lambda: mirror(CustomRecipe("identity"), margin=1),
        "recipe is a int": lambda: mirror(3),  # type: ignore[arg-type]
        # Sides of hybrids.
        "columnwise_quantizer is a": lambda: side(None, "current"),
        "rowwise_quantizer is a": lambda: side(3),
        # Options of the reference, and parts of tensors.
        "int8": lambda: ref(torch.int8),
        "scale": lambda: parts(data=BYTES),
        "scale .*float64": lambda: parts(data=BYTES, scale=ONE.double()),
        "data": lambda: parts(data=BYTES.float(), scale=ONE),
        "int8 is not an FP8": lambda: parts(data=BYTES, scale=ONE, quant_dtype=torch.int8),
        # Products.
        "of torch.uint8": lambda: product(qx=BYTES),
        "of NoneType": lambda: product(qx=None),
        "one element": lambda: product(sx=2.0),
        "scale.*one element": lambda: product(sw=torch.ones(2)),
        "out has dtype": lambda: product(out=torch.zeros(5, 6, dtype=torch.int32)),
    },
    ShapeError: {
        "scale": lambda: parts(data=BYTES, scale=torch.ones(2)),
        "data": lambda: parts(data=BYTES, scale=ONE, original_shape=(3, 2)),
        "data_t": lambda: parts(data=BYTES, data_t=BYTES[:1], scale=ONE),
        "equal reduced": lambda: product(qx=torch.zeros(5, 6)),
        "bias has shape": lambda: product(bias=torch.zeros(5)),
        r"out has shape \(5, 5\)": lambda: product(out=torch.zeros(5, 5)),
        r"out has shape \(1, 6\)": lambda: product(out=torch.zeros(1, 6)),
    },
    OptionError: {
        r"CustomRecipe.from_file\('a/m.yaml'\)": lambda: CUSTOM("a/m.yaml"),
        "qfactory and file": lambda: ottava.get_recipe("custom", qfactory="identity", file="a"),
        "tensor type 'wieght'": lambda: by_tensor("identity", wieght="x"),
        "no quantizer": lambda: by_direction("identity", lambda role: None)(WEIGHT),
        "tensor type 'bias'": lambda: current_scaling_ref_factory("bias"),
        "rowwise_quantizer is a": lambda: side(KEEPS),
        "columnwise_quantizer is": lambda: side(None, KEEPS),
        "epsilon is -1": lambda: ref(E4M3, eps=-1.0),
        "epsilon is nan": lambda: ref(E4M3, eps=math.nan),
        "pow_2_scales": lambda: ref(E4M3, pow_2_scales=1),  # type: ignore[arg-type]
        "rowwise": lambda: ref(E4M3, rowwise=None),  # type: ignore[arg-type]
        "gemm_type": lambda: product(gemm_type="forward"),
        "accumulate": lambda: product(accumulate=True),
    },
    UsageError: {
        "needs data": lambda: parts(),
        "holds no data.*cleared": lambda: IdentityTensorStorage(
            dtype=F32, rowwise=True, columnwise=True
        ).update_usage(False),
        "holds no data": lambda: IdentityTensorStorage(
            dtype=F32, rowwise=True, columnwise=True
        ).dequantize(),
    },
    RecipeNotFoundError: {
        "quantizer factory 'nonesuch'": lambda: CUSTOM("nonesuch"),
        "nonesuch": lambda: by_layer({}, "nonesuch"),
        "recipe 'nonesuch'": lambda: mirror("nonesuch"),
    },
}
CASES = [(error, words) for error, calls in REFUSED.items() for words in calls]


@pytest.mark.parametrize(("error", "words"), CASES)
def test_refused(error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        REFUSED[error][words]()


def test_what_is_right_is_taken() -> None:
    assert product().shape == (5, 6)
    assert parts(data=BYTES, scale=ONE).shape == (2, 2)
    assert isinstance(side(IdentityQuantizer()), HybridQuantizer)
