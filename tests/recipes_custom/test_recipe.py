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
from ottava.errors import DTypeError, OptionError, RecipeNotFoundError
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


def kinds(recipe: Any, name: str = "") -> list[str]:
    return [
        type(recipe.quantizer(QuantizerRole("linear", t, name))).__name__
        for t in ("input", "weight", "grad_output")
    ]


REF, IDENTITY = "CurrentScalingQuantizerRef", "IdentityQuantizer"


def test_by_itself_it_is_the_reference() -> None:
    recipe = ottava.get_recipe("custom")
    assert recipe == CustomRecipe(current_scaling_ref_quantizer_factory)
    assert kinds(recipe) == [REF] * 3
    assert ottava.get_recipe("custom", qfactory="identity") == CustomRecipe(identity_factory)
    assert CustomRecipe("current-ref").qfactory is current_scaling_ref_quantizer_factory


def test_a_function_is_asked_for_each_role_of_each_layer() -> None:
    asked = []

    def qfactory(role: QuantizerRole) -> Any:
        asked.append((role.module_type, role.tensor_type, role.name))
        return IdentityQuantizer()

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ottava.convert(model, CustomRecipe(qfactory))
    assert {
        ("linear", t, n) for t in ("input", "weight", "grad_output") for n in ("0", "1")
    } == set(asked)


def test_how_often_a_function_is_asked() -> None:
    calls: list[str] = []

    def qfactory(role: QuantizerRole) -> Any:
        calls.append(role.tensor_type)
        return current_scaling_ref_quantizer_factory(role)

    def converted(primary: bool) -> torch.nn.Module:
        net = torch.nn.Sequential(torch.nn.Linear(8, 8))
        return ottava.convert(net, CustomRecipe(qfactory), primary=primary)

    def made(primary: bool) -> torch.nn.Module:
        recipe = CustomRecipe(qfactory)
        with ottava.quantized_model_init(recipe, enabled=primary):
            return ottava.nn.Linear(8, 8, recipe=recipe)

    def over(primary: bool) -> torch.nn.Module:
        recipe = CustomRecipe(current_scaling_ref_quantizer_factory)
        recipe.set_quantizer_factory(qfactory)
        return ottava.convert(torch.nn.Linear(8, 8), recipe, primary=primary)

    for make in (converted, made, over):
        for primary in (False, True):
            model = make(primary)
            for _ in range(2):
                model(torch.randn(4, 8)).sum().backward()
            assert sorted(calls) == ["grad_output", "input", "weight"], (make, primary)
            calls.clear()
    layer = ottava.nn.Linear(8, 8)
    for _ in range(2):
        with ottava.autocast(CustomRecipe(qfactory)):
            layer(torch.randn(4, 8)).sum().backward()
    assert sorted(calls) == ["grad_output", "input", "weight"]


def test_first_and_last_layers_stay_in_high_precision() -> None:
    recipe = CustomRecipe(by_layer({"first": "identity", "head*": identity_factory}, "custom"))
    assert kinds(recipe, "first") == kinds(recipe, "head.0") == [IDENTITY] * 3
    assert kinds(recipe, "first.proj") == [IDENTITY] * 3
    assert kinds(recipe, "body.first") == kinds(recipe, "firsts") == [REF] * 3
    model = torch.nn.Sequential()
    for name in ("first", "body", "head"):
        model.add_module(name, torch.nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    ottava.convert(model, recipe)
    x = torch.randn(3, 8)
    torch.testing.assert_close(model.first(x), twin.first(x))
    assert not torch.allclose(model.body(x), twin.body(x), rtol=1e-4)


def test_tensors_and_directions() -> None:
    recipe = CustomRecipe(by_tensor("custom", weight="identity"))
    assert kinds(recipe) == [REF, IDENTITY, REF]
    recipe = CustomRecipe(by_direction("custom", identity_factory))
    assert kinds(recipe) == ["HybridQuantizer", "HybridQuantizer", IDENTITY]
    made: Any = recipe.quantizer("weight")
    assert isinstance(made, HybridQuantizer)
    assert isinstance(made.rowwise_quantizer, CurrentScalingQuantizerRef)
    assert isinstance(made.columnwise_quantizer, IdentityQuantizer)


def test_factories_nest_compare_and_pickle() -> None:
    def made() -> CustomRecipe:
        return CustomRecipe(
            by_layer(
                {"a": by_tensor("custom", weight="identity")}, by_direction("custom", "identity")
            )
        )

    assert made() == made()
    assert pickle.loads(pickle.dumps(made())) == made()
    assert copy.deepcopy(made()) == made()
    assert made() != CustomRecipe(
        by_layer({"b": by_tensor("custom", weight="identity")}, "identity")
    )
    assert made().same_as(made())


def test_a_mirror_asks_the_recipe() -> None:
    assert mirror("custom")(QuantizerRole()) == QuantizerRequest(ottava.get_recipe("custom"))
    assert kinds(CustomRecipe(mirror("custom", qfactory="identity"))) == [IDENTITY] * 3
    assert kinds(CustomRecipe(mirror(CustomRecipe(identity_factory)))) == [IDENTITY] * 3
    with pytest.raises(DTypeError, match="options for a recipe that is built"):
        mirror(CustomRecipe(identity_factory), qfactory="identity")
    with pytest.raises(RecipeNotFoundError, match="nonesuch"):
        mirror("nonesuch")
    with pytest.raises(DTypeError):
        mirror(3)  # type: ignore[arg-type]


def test_a_factory_over_it_comes_first() -> None:
    recipe = CustomRecipe(current_scaling_ref_quantizer_factory)
    recipe.set_quantizer_factory(
        lambda role: IdentityQuantizer() if role.tensor_type == "weight" else None
    )
    assert kinds(recipe) == [REF, IDENTITY, REF]
    recipe.set_quantizer_factory("identity")
    assert kinds(recipe) == [IDENTITY] * 3
    recipe.set_quantizer_factory(None)
    assert kinds(recipe) == [REF] * 3


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: CustomRecipe(3), DTypeError, "qfactory is a int"),
        (lambda: CustomRecipe(None), DTypeError, "qfactory is a NoneType"),
        (
            lambda: CustomRecipe(lambda: None),
            DTypeError,
            r"qfactory cannot be called.*qfactory\(role\)",
        ),
        (
            lambda: CustomRecipe(lambda role, layer: None),
            DTypeError,
            "qfactory cannot be called.*'layer'",
        ),
        (
            lambda: CustomRecipe("a/model.yaml"),
            OptionError,
            r"CustomRecipe.from_file\('a/model.yaml'\)",
        ),
        (lambda: CustomRecipe("nonesuch"), RecipeNotFoundError, "quantizer factory 'nonesuch'"),
        (
            lambda: CustomRecipe(lambda role: None).quantizer("input"),
            DTypeError,
            "returned None for .*IdentityQuantizer",
        ),
        (
            lambda: CustomRecipe(lambda role: "x").quantizer("input"),
            DTypeError,
            "returned a str for",
        ),
        (
            lambda: CustomRecipe(lambda role: IdentityQuantizer).quantizer("input"),
            DTypeError,
            "returned a ABCMeta for",
        ),
        (
            lambda: ottava.get_recipe("custom", qfactory="identity", file="a.yaml"),
            OptionError,
            "qfactory and file",
        ),
        (lambda: by_layer({3: "identity"}, "identity"), DTypeError, "a pattern is a int"),
        (lambda: by_layer({"a": 3}, "identity"), DTypeError, "the factory is a int"),
        (lambda: by_layer({}, "nonesuch"), RecipeNotFoundError, "nonesuch"),
        (lambda: by_tensor("identity", wieght="identity"), OptionError, "tensor type 'wieght'"),
        (
            lambda: by_direction("identity", lambda role: None)(QuantizerRole("", "weight")),
            OptionError,
            "no quantizer",
        ),
    ],
)
def test_mistakes_are_told(make: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_a_factory_that_raises_leaves_the_model_as_it_was() -> None:
    def qfactory(role: QuantizerRole) -> Any:
        if role.name == "1":
            raise ValueError("not this one")
        return IdentityQuantizer()

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="not this one"):
        ottava.convert(model, CustomRecipe(qfactory))
    assert type(model[0]) is torch.nn.Linear


def test_what_a_function_gives_is_explained() -> None:
    recipe = CustomRecipe(by_layer({"head": "identity"}, by_direction("custom", identity_factory)))
    made = recipe.explain(QuantizerRole("linear", "weight", "body"))
    assert (made.rowwise, made.columnwise) == (
        "CurrentScalingQuantizerRef E4M3",
        "IdentityQuantizer",
    )
    made = recipe.explain(QuantizerRole("linear", "input", "head"))
    assert (made.rowwise, made.columnwise) == ("IdentityQuantizer", "IdentityQuantizer")
    assert recipe.rules() == ()
