"""Reading plugins: what is wrong with one is said, and harms no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_plugins import GOOD, RECIPE, hook, offers, plugin

import ottava
from ottava.errors import DuplicateRecipeError, PluginError, RecipeNotFoundError
from ottava.recipes import registry
from ottava.recipes.registry import PluginStatus

SPEC = "RecipeSpec(name='x', summary='s', factory='a:B'{})"


def status(dist: str) -> PluginStatus:
    return next(s for s in registry.plugin_statuses() if s.distribution == dist)


def names() -> set[str]:
    return {spec.name for spec in ottava.list_recipes()}


def healthy(site: Path, dist: str, *recipes: str) -> None:
    module = dist.replace("-", "_").replace(".", "_")
    plugin(site, dist, module, offers(*recipes, factory=f"{module}_impl:Thing"))
    (site / f"{module}_impl.py").write_text(RECIPE)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ZeroDivisionError('at [/red]')", "ZeroDivisionError: at [/red]"),
        ("\n\nraise ValueError('a\\n  b')", "ValueError: a b"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        (
            "class E(Exception):\n    def __str__(self): raise E\nraise E",
            "E: an error whose text cannot be shown",
        ),
        (
            "class E(Exception):\n    def __str__(self): raise SystemExit(4)\nraise E",
            "E: an error whose text cannot be shown",
        ),
        ("this is no Python", "SyntaxError"),
        ("", "no hook"),
        (
            "def ottava_recipes(): return []",
            "not marked. Expected: ottava_recipes or ottava_quantizer_factories",
        ),
        (hook("return []") + "def ottava_quantizer_factories(): return []\n", "not marked"),
        (hook("return 'abc'"), "type str"),
        (hook("return 3"), "'int' object is not iterable"),
        (hook("return " + SPEC.format("")), "'RecipeSpec' object is not iterable"),
        (hook("return [{'name': 'x'}]"), "type dict"),
        (hook("return [FactorySpec(name='x', summary='s', factory='a:B')]"), "type FactorySpec"),
        (hook("raise ValueError('boom')"), "ValueError: boom"),
        (hook("yield " + SPEC.format("") + "\n    raise ValueError('boom')"), "boom"),
        (hook("return [" + SPEC.format(", formats=None") + "]"), "formats None of recipe 'x'"),
        (hook("return [" + SPEC.format(", block_size=32") + "]"), "block_size 32"),
        (
            hook("return [" + SPEC.format(", api_version=2") + "]"),
            "api_version 2 of recipe 'x'. Expected: 1",
        ),
        (GOOD + "@h.hookimpl\ndef ottava_recipes(wrong): return []\n", "wrong"),
        (GOOD + "@h.hookimpl\ndef ottava_recipe(): return []\n", "ottava_recipe"),
        (hook("raise ValueError('in factories')", "ottava_quantizer_factories"), "in factories"),
        (hook("return [" + SPEC.format("") + "]", "ottava_quantizer_factories"), "type RecipeSpec"),
        ("import ottava\nottava.list_recipes()", "asked for while plugins are read"),
    ],
)
def test_what_is_broken_is_said_and_harms_no_other(site: Path, source: str, said: str) -> None:
    plugin(site, "aaa-broken", "broken_one", source)
    healthy(site, "bbb-good", "mine")
    broken = status("aaa-broken")
    assert broken.status == "broken"
    assert said in broken.error
    assert "\n" not in broken.error
    assert "mine" in names()


NO_TEXT = """
class Text:
    def __str__(self): raise ValueError
def build(**options): raise TypeError(Text())
"""


def test_a_recipe_that_fails_without_a_text_is_named(site: Path) -> None:
    plugin(site, "aaa-mute", "mute_one", offers("mute", factory="mute_one_impl:build"))
    (site / "mute_one_impl.py").write_text(NO_TEXT)
    with pytest.raises(
        PluginError,
        match=r"'mute'.*cannot be built: TypeError: an error whose text cannot be shown",
    ):
        ottava.get_recipe("mute")


@pytest.mark.parametrize("offer", ["[]", "()", "None"])
def test_an_empty_offer_is_no_error(site: Path, offer: str) -> None:
    plugin(site, "aaa-empty", "empty_one", hook(f"return {offer}"))
    assert status("aaa-empty").status == "ok"


def test_an_interrupt_ends_the_question(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(site, "aaa-slow", "slow_one", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        ottava.list_recipes()
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", "aaa-slow")
    assert status("aaa-slow").status == "disabled"  # the next question reads again


@pytest.mark.parametrize("third", [[], ["ccc-third"]])
def test_of_two_strangers_none_gets_the_name(site: Path, third: list[str]) -> None:
    for dist in ["aaa-first", "bbb-second", *third]:
        healthy(site, dist, "taken", f"own-{dist}")
    assert "taken" not in names()
    assert {"own-aaa-first", "own-bbb-second"} <= names()
    for _ in range(2):
        with pytest.raises(DuplicateRecipeError) as caught:
            ottava.get_recipe("taken")
        for dist in ["aaa-first", "bbb-second", *third]:
            assert f"{dist} 1.2" in str(caught.value)
            assert [spec.name for spec in status(dist).refused] == ["taken"]
    assert ottava.get_recipe("own-aaa-first")


def test_disabling_one_settles_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy(site, "aaa-first", "taken")
    healthy(site, "bbb.second", "taken")
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", " BBB_Second, nonesuch ")
    with pytest.warns(UserWarning, match="not installed: nonesuch$"):
        assert type(ottava.get_recipe("taken")).__module__ == "aaa_first_impl"
    assert status("bbb.second").status == "disabled"


def test_two_entry_points_of_one_package_are_told_apart(site: Path) -> None:
    healthy(site, "ottava-recipes-mine", "mine")
    info = site / "ottava_recipes_mine-1.2.dist-info"
    (info / "entry_points.txt").write_text(
        "[ottava]\none = ottava_recipes_mine\ntwo = ottava_recipes_mine\n"
    )
    with pytest.raises(DuplicateRecipeError, match=r"entry point one.*entry point two"):
        ottava.get_recipe("mine")


def test_a_name_that_is_offered_twice_by_one_hook_is_nobodys(site: Path) -> None:
    healthy(site, "ottava-recipes-mine", "mine", "mine", "other")
    with pytest.raises(DuplicateRecipeError, match="'mine' is offered by ottava-recipes-mine"):
        ottava.get_recipe("mine")
    assert "mine" not in names()
    assert "other" in names()


@pytest.mark.parametrize("value", ["1", "true"])
def test_strict_turns_broken_and_taken_into_errors(
    site: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("OTTAVA_STRICT_PLUGINS", value)
    plugin(site, "aaa-broken", "broken_one", "raise ValueError('boom')")
    with pytest.raises(PluginError, match=r"aaa-broken:main 1\.2.*boom") as caught:
        ottava.list_recipes()
    assert isinstance(caught.value.__cause__, ValueError)
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", "aaa-broken")
    healthy(site, "bbb-first", "taken")
    healthy(site, "ccc-second", "taken")
    with pytest.raises(DuplicateRecipeError, match="bbb-first"):
        ottava.list_recipes()


@pytest.mark.parametrize("value", ["", "0", "False", "off"])
def test_strict_is_off(site: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    plugin(site, "aaa-broken", "broken_one", "raise ValueError('boom')")
    monkeypatch.setenv("OTTAVA_STRICT_PLUGINS", value)
    assert status("aaa-broken").status == "broken"


def test_reading_imports_no_recipe(site: Path) -> None:
    healthy(site, "aaa-good", "mine")
    assert "mine" in names()
    assert "aaa_good" in sys.modules
    assert "aaa_good_impl" not in sys.modules


def test_a_region_sees_packages_that_changed(site: Path) -> None:
    """A name stands for one recipe as long as the packages are the same, and for the one of the new
    ones then."""
    healthy(site, "acme-fp8", "thing")
    first, again = ottava.autocast("thing")._recipe, ottava.autocast("thing")._recipe
    assert first is again
    (site / "acme_fp8_impl.py").write_text(f"{RECIPE}\n    changed = True\n")
    del sys.modules["acme_fp8_impl"]
    registry.reload()
    assert ottava.autocast("thing")._recipe.changed  # type: ignore[union-attr]
    (site / "acme_fp8-1.2.dist-info" / "entry_points.txt").unlink()
    registry.reload()
    with pytest.raises(RecipeNotFoundError):
        ottava.autocast("thing")
