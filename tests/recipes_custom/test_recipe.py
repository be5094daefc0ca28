"""``CustomRecipe`` and the factories: what serves a role, by name and by function, and what is
refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import ottava
from ottava import QuantizerRequest, QuantizerRole
from ottava.errors import OptionError
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CustomRecipe,
    HybridQuantizer,
    IdentityQuantizer,
    by_direction,
    by_layer,
    by_tensor,
    current_scaling_ref_quantizer_factory,
    identity_factory,
    mirror,
)

REF, IDENTITY, HYBRID = CurrentScalingQuantizerRef, IdentityQuantizer, HybridQuantizer
TENSORS = ("input", "weight", "grad_output")


def kinds(recipe: Any, name: str = "") -> list[type]:
    return [type(recipe.quantizer(QuantizerRole("linear", t, name))) for t in TENSORS]


def over(factory: Any) -> CustomRecipe:
    """The reference, with a factory over it."""
    recipe = CustomRecipe(current_scaling_ref_quantizer_factory)
    recipe.set_quantizer_factory(factory)
    return recipe


#: Recipe, layer, and what serves input, weight and grad_output.
SERVED: dict[str, tuple[Any, str, list[type]]] = {
    "the default": (ottava.get_recipe("custom"), "", [REF] * 3),
    "the name of a factory": (CustomRecipe("current-ref"), "", [REF] * 3),
    "an option": (ottava.get_recipe("custom", qfactory="identity"), "", [IDENTITY] * 3),
    "by tensor": (CustomRecipe(by_tensor("custom", weight="identity")), "", [REF, IDENTITY, REF]),
    "by direction": (
        *(CustomRecipe(by_direction("custom", identity_factory)), ""),
        [HYBRID, HYBRID, IDENTITY],
    ),
    "a mirror": (CustomRecipe(mirror("custom", qfactory="identity")), "", [IDENTITY] * 3),
    "a mirror of a recipe": (CustomRecipe(mirror(CustomRecipe("identity"))), "", [IDENTITY] * 3),
    "a factory over it": (
        *(over(lambda role: IDENTITY() if role.tensor_type == "weight" else None), ""),
        [REF, IDENTITY, REF],
    ),
    "the name of a factory over it": (over("identity"), "", [IDENTITY] * 3),
    "no factory over it": (over(None), "", [REF] * 3),
}
EDGES = CustomRecipe(
    by_layer({"first": "identity", "head.1": "custom", "head*": identity_factory}, "custom")
)
SERVED |= {
    f"the layer {name}": (EDGES, name, [kind] * 3)
    for name, kind in {
        "first": IDENTITY,
        "first.proj": IDENTITY,
        "head.0": IDENTITY,
        "head.1": REF,
        "body.first": REF,
        "firsts": REF,
    }.items()
}


@pytest.mark.parametrize("name", SERVED)
def test_what_serves_a_role(name: str) -> None:
    recipe, layer, expected = SERVED[name]
    assert kinds(recipe, layer) == expected


NONE = by_layer({"1": "identity"}, "custom")


@pytest.mark.parametrize(
    "factory",
    [NONE, by_tensor(NONE), by_tensor("custom", weight=NONE), by_layer({"0": NONE}, "custom")],
)
def test_a_pattern_that_fits_no_layer_is_refused(factory: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(OptionError, match="pattern '1' of by_layer matches no layer"):
        ottava.convert(model, CustomRecipe(factory))
    ottava.convert(model, CustomRecipe(by_tensor("custom", weight="identity")))


def test_recipes_compare_copy_and_pickle() -> None:
    def made(pattern: str = "a") -> CustomRecipe:
        by_weight = by_tensor("custom", weight="identity")
        return CustomRecipe(by_layer({pattern: by_weight}, by_direction("custom", "identity")))

    assert made() == made() == pickle.loads(pickle.dumps(made())) == copy.deepcopy(made())
    assert made().same_as(made())
    assert made() != made("b")
    assert ottava.get_recipe("custom") == CustomRecipe(current_scaling_ref_quantizer_factory)
    assert mirror("custom")(QuantizerRole()) == QuantizerRequest(ottava.get_recipe("custom"))


def test_an_explanation_has_the_quantizers_of_a_factory() -> None:
    explained = CustomRecipe(by_direction("custom", identity_factory)).explain("weight")
    assert explained.rowwise == "CurrentScalingQuantizerRef E4M3"
    assert explained.columnwise == "IdentityQuantizer"


def test_a_function_is_asked_once_for_each_role_of_a_layer() -> None:
    asked: list[str] = []

    def qfactory(role: QuantizerRole) -> Any:
        asked.append(role.tensor_type)
        return IDENTITY()

    for recipe in (CustomRecipe(qfactory), over(qfactory)):
        net = ottava.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), recipe)
        for _ in range(2):
            net(torch.randn(4, 8)).sum().backward()
        assert sorted(asked) == sorted(TENSORS)
        asked.clear()
