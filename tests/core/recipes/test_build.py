"""Building recipes and quantizer factories by name: every error is typed and names what it is
about."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import RECIPE, hook, offers, plugin

import ottava
from ottava.errors import (
    DuplicateRecipeError,
    OptionError,
    OttavaError,
    PluginError,
    RecipeNotFoundError,
)

FACTORIES = "return [FactorySpec(name='rows', summary='s', factory='{}')]"


def offer(site: Path, factory: str, source: str = "") -> None:
    plugin(site, "acme-fp8", "acme_plugin", offers("mine", factory=factory))
    (site / "acme_impl.py").write_text(RECIPE + source)


@pytest.mark.parametrize(
    ("factory", "source", "said"),
    [
        ("nonesuch_module:Thing", "", "nonesuch_module:Thing: ModuleNotFoundError"),
        ("acme_impl:nonesuch", "", "AttributeError"),
        ("acme_impl:Thing", "raise ValueError('at import')", "at import"),
        ("acme_impl:Thing", "import sys; sys.exit(2)", "SystemExit"),
        ("math:pi", "", "type float"),
        ("builtins:object", "", "type object"),
        ("builtins:dict", "", "cannot be built"),
        ("acme_impl:build", "def build(): return Thing", "an object of type ABCMeta"),
        ("acme_impl:build", "def build(): raise ValueError('ctor')", "ValueError: ctor"),
        ("acme_impl:build", "def build(): raise SystemExit(2)", "SystemExit"),
        ("acme_impl:build", "def build(): [].nonesuch(a=1)", "AttributeError"),
        (
            "acme_impl:build",
            "def build(**k): return (lambda scale=1: Thing())(margin=2)",
            "TypeError",
        ),
    ],
)
def test_a_factory_that_fails_is_told_with_its_package(
    site: Path, factory: str, source: str, said: str
) -> None:
    offer(site, factory, source)
    with pytest.raises(PluginError) as caught:
        ottava.get_recipe("mine")
    for part in ("recipe 'mine'", "acme-fp8 1.2", said):
        assert part in str(caught.value)


def test_the_cause_is_kept(site: Path) -> None:
    offer(site, "acme_impl:build", "def build(): raise ValueError('ctor')")
    with pytest.raises(PluginError) as caught:
        ottava.get_recipe("mine")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("build", "options", "said"),
    [
        (
            "def build(scale=1.0): return Thing()",
            {"margin": 2},
            r"'mine': got an unexpected.* 'margin'.*Expected: scale",
        ),
        ("def build(): return Thing()", {"margin": 2}, r"unexpected .*'margin'.*no options"),
        ("def build(scale): return Thing()", {}, r"'mine': missing .*'scale'"),
        ("def build(x, /): return Thing()", {}, r"'mine': missing .*'x'"),
        (
            "from ottava.errors import OptionError\ndef build(a=1): raise OptionError('a is bad')",
            {"a": 2},
            "^a is bad",
        ),
    ],
)
def test_wrong_options_are_the_users(
    site: Path, build: str, options: dict[str, object], said: str
) -> None:
    offer(site, "acme_impl:build", build)
    with pytest.raises(OptionError, match=said):
        ottava.get_recipe("mine", **options)


def test_right_options_arrive(site: Path) -> None:
    offer(
        site,
        "acme_impl:build",
        "def build(scale, **k):\n    t = Thing()\n    t.got = (scale, k)\n    return t",
    )
    recipe: Any = ottava.get_recipe("mine", scale=2, margin=3)
    assert recipe.got == (2, {"margin": 3})


def test_an_unknown_name_is_answered_with_what_is_near_or_what_to_install(site: Path) -> None:
    offer(site, "acme_impl:Thing")
    package = "pip install ottava-recipes-zzzz"
    for name, remedy in (
        ("mien", "Remedy: use 'mine'"),
        ("Mine", "use 'mine'"),
        ("", "NAME"),
        ("zzzz", package),
    ):
        with pytest.raises(RecipeNotFoundError) as caught:
            ottava.get_recipe(name)
        assert remedy in str(caught.value)
        # What may be a misspelling of something installed does not become a command.
        assert ("pip install" in str(caught.value)) == (name in ("", "zzzz"))


def test_what_is_disabled_or_broken_is_part_of_the_answer(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(site, "ottava-recipes-mine", "owner_plugin", offers("mine", factory="acme_impl:Thing"))
    plugin(site, "aaa-broken", "broken_one", "raise ValueError")
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", "ottava_recipes.mine")
    with pytest.raises(RecipeNotFoundError) as caught:
        ottava.get_recipe("mine")
    assert "aaa-broken:main (broken), ottava-recipes-mine:main (disabled)" in str(caught.value)


def test_a_quantizer_factory_is_found_by_name(site: Path) -> None:
    plugin(
        site,
        "acme-fp8",
        "acme_plugin",
        hook(FACTORIES.format("acme_impl:rows"), "ottava_quantizer_factories"),
    )
    (site / "acme_impl.py").write_text("def rows(role): return None\n")
    assert [(f.name, f.factory) for f in ottava.list_quantizer_factories() if f.name == "rows"] == [
        ("rows", "acme_impl:rows")
    ]
    assert "acme_impl" not in sys.modules
    factory = ottava.get_quantizer_factory("rows")
    assert factory is sys.modules["acme_impl"].rows
    with pytest.raises(RecipeNotFoundError, match=r"quantizer factory 'row'.*use 'rows'"):
        ottava.get_quantizer_factory("row")
    with pytest.raises(RecipeNotFoundError, match="recipe 'rows'"):
        ottava.get_recipe("rows")


@pytest.mark.parametrize("reference", ["nonesuch_module:rows", "math:nonesuch", "math:pi"])
def test_a_quantizer_factory_that_fails_is_told_with_its_package(
    site: Path, reference: str
) -> None:
    plugin(
        site,
        "acme-fp8",
        "acme_plugin",
        hook(FACTORIES.format(reference), "ottava_quantizer_factories"),
    )
    with pytest.raises(PluginError, match=r"quantizer factory 'rows' of acme-fp8 1\.2"):
        ottava.get_quantizer_factory("rows")


def test_a_quantizer_factorys_name_is_owned_as_a_recipes_is(site: Path) -> None:
    for dist in ("aaa-first", "bbb-second"):
        module = dist.replace("-", "_")
        source = hook(FACTORIES.format("builtins:str"), "ottava_quantizer_factories")
        plugin(site, dist, module, source + offers(f"own-{dist}", factory="a:B"))
    with pytest.raises(
        DuplicateRecipeError, match=r"quantizer factory 'rows'.*aaa-first 1\.2.*bbb-second 1\.2"
    ):
        ottava.get_quantizer_factory("rows")
    assert {"own-aaa-first", "own-bbb-second"} <= {spec.name for spec in ottava.list_recipes()}


def test_a_recipe_and_a_factory_may_share_a_name(site: Path) -> None:
    both = hook(FACTORIES.format("builtins:str"), "ottava_quantizer_factories") + offers(
        "rows", factory="a:B"
    )
    plugin(site, "acme-fp8", "acme_plugin", both)
    assert ottava.get_quantizer_factory("rows") is str
    with pytest.raises(OttavaError, match="cannot be imported from a:B"):
        ottava.get_recipe("rows")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, "ottava recipes") for name in ("fp8", "FP8", "float8", "e4m3")),
        *((name, "ottava.revert") for name in ("NONE", "fp16")),
        ("none", r"autocast\(enabled=False\).*ottava\.revert\(model\)"),
    ],
)
def test_names_that_are_those_of_no_recipe(name: str, meant: str) -> None:
    with pytest.raises(RecipeNotFoundError, match=meant):
        ottava.get_recipe(name)
