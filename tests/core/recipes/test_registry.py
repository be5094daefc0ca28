"""Recipes by name and by file: reading plugins, building what they offer, and errors that name the
package and harm no other."""

from __future__ import annotations

import os
import signal
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import FactorySpec, RecipeSpec
from ottava.errors import DuplicateRecipeError, OptionError, PluginError, RecipeNotFoundError
from ottava.recipes import registry
from ottava.recipes.region import current_region
from ottava.recipes.registry import PluginStatus
from tests.core.fake_plugins import GOOD, RECIPE, distribution, hook, offers, plugin

SPEC = "RecipeSpec(name='x', summary='s', factory='a:B'{})"
FACTORIES = "ottava_quantizer_factories"


def status(dist: str) -> PluginStatus:
    return next(s for s in registry.plugin_statuses() if s.distribution == dist)


def names() -> set[str]:
    return {spec.name for spec in ottava.list_recipes()}


def healthy(site: Path, dist: str, *recipes: str) -> None:
    module = dist.replace("-", "_").replace(".", "_")
    plugin(site, dist, module, offers(*recipes, factory=f"{module}_impl:Thing"))
    (site / f"{module}_impl.py").write_text(RECIPE)


def factories(name: str, reference: str) -> str:
    return hook(
        f"return [FactorySpec(name={name!r}, summary='s', factory={reference!r})]", FACTORIES
    )


# -- reading plugins --

BROKEN = [
    ("raise ZeroDivisionError('at [/red]')", "ZeroDivisionError: at [/red]"),
    ("\n\nraise ValueError('a\\n  b')", "ValueError: a b"),
    ("import sys; sys.exit(3)", "SystemExit: 3"),
    (
        "class E(Exception):\n    def __str__(self): raise SystemExit(4)\nraise E",
        "E: an error whose text cannot be shown",
    ),
    ("this is no Python", "SyntaxError"),
    ("", "no hook"),
    ("def ottava_recipes(): return []", "not marked. Expected: ottava_recipes or ottava_quantizer"),
    (hook("return []") + f"def {FACTORIES}(): return []\n", "not marked"),
    (hook("return 'abc'"), "type str"),
    (hook("return 3"), "'int' object is not iterable"),
    (hook("return [{'name': 'x'}]"), "type dict"),
    (hook("return [FactorySpec(name='x', summary='s', factory='a:B')]"), "type FactorySpec"),
    (
        hook("class Own(RecipeSpec): ...\n    return [Own(name='x', summary='s', factory='a:B')]"),
        "type Own",
    ),
    (hook("raise ValueError('boom')"), "ValueError: boom"),
    (hook("yield " + SPEC.format("") + "\n    raise ValueError('boom')"), "boom"),
    (hook("return [" + SPEC.format(", formats=None") + "]"), "formats None of recipe 'x'"),
    (hook("return [" + SPEC.format(", api_version=2") + "]"), "api_version 2 of recipe 'x'"),
    (GOOD + "@h.hookimpl\ndef ottava_recipes(wrong): return []\n", "wrong"),
    (GOOD + "@h.hookimpl\ndef ottava_recipe(): return []\n", "ottava_recipe"),
    (hook("raise ValueError('in factories')", FACTORIES), "in factories"),
    (hook("return [" + SPEC.format("") + "]", FACTORIES), "type RecipeSpec"),
    ("import ottava\nottava.list_recipes()", "asked for while plugins are read"),
]


@pytest.mark.parametrize(("source", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_what_is_broken_is_said_and_harms_no_other(site: Path, source: str, words: str) -> None:
    plugin(site, "aaa-broken", "broken_one", source)
    healthy(site, "bbb-good", "mine")
    plugin(site, "ccc-empty", "empty_one", hook("return None"))
    broken = status("aaa-broken")
    assert broken.status == "broken"
    assert words in broken.error
    assert "\n" not in broken.error
    assert "mine" in names()
    assert status("ccc-empty").status == "ok"
    # Reading imports plugins, and nothing that they offer.
    assert "bbb_good" in sys.modules
    assert "bbb_good_impl" not in sys.modules


def test_an_interrupt_ends_the_question_and_the_next_reads_again(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(site, "aaa-slow", "slow_one", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        ottava.list_recipes()
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", "aaa-slow")
    assert status("aaa-slow").status == "disabled"


def test_reading_changes_no_handler_of_signals(site: Path) -> None:
    source = "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    plugin(site, "bbb-handler", "handler_one", source + hook("return []"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert status("bbb-handler").status == "ok"
    finally:
        signal.signal(signal.SIGINT, before)


def test_of_several_that_offer_a_name_none_gets_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dists = ["aaa-first", "bbb.second", "ccc-third"]
    for dist in dists:
        healthy(site, dist, "taken", f"own-{dist[:3]}")
    assert "taken" not in names()
    assert {"own-aaa", "own-bbb", "own-ccc"} <= names()
    for _ in range(2):
        with pytest.raises(DuplicateRecipeError) as caught:
            ottava.get_recipe("taken")
        for dist in dists:
            assert f"{dist} 1.2" in str(caught.value)
            assert [spec.name for spec in status(dist).refused] == ["taken"]
    assert ottava.get_recipe("own-aaa")
    # Disabling the others settles it.
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", " BBB_Second, ccc-third,nonesuch ")
    registry.reload()
    with pytest.warns(UserWarning, match="not installed: nonesuch$"):
        assert type(ottava.get_recipe("taken")).__module__ == "aaa_first_impl"
    assert status("bbb.second").status == "disabled"


def test_one_package_may_offer_a_name_twice_by_mistake(site: Path) -> None:
    healthy(site, "ottava-recipes-mine", "mine", "mine", "other")
    with pytest.raises(DuplicateRecipeError, match="'mine' is offered by ottava-recipes-mine"):
        ottava.get_recipe("mine")
    assert names() & {"mine", "other"} == {"other"}
    (site / "two_entries.py").write_text(offers("twice", factory="a:B"))
    distribution(site, "two-entries", "[ottava]\none = two_entries\ntwo = two_entries\n")
    registry.reload()
    with pytest.raises(DuplicateRecipeError, match=r"entry point one.*entry point two"):
        ottava.get_recipe("twice")


def test_strict_turns_broken_and_taken_into_errors(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(site, "aaa-broken", "broken_one", "raise ValueError('boom')")
    for value in ("", "0", "False", "off"):
        monkeypatch.setenv("OTTAVA_STRICT_PLUGINS", value)
        assert status("aaa-broken").status == "broken"
    for value in ("1", "true"):
        monkeypatch.setenv("OTTAVA_STRICT_PLUGINS", value)
        registry.reload()
        with pytest.raises(PluginError, match=r"aaa-broken:main 1\.2.*boom") as caught:
            ottava.list_recipes()
        assert isinstance(caught.value.__cause__, ValueError)
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", "aaa-broken")
    healthy(site, "bbb-first", "taken")
    healthy(site, "ccc-second", "taken")
    with pytest.raises(DuplicateRecipeError, match="bbb-first"):
        ottava.list_recipes()


# -- building --


def offer(site: Path, factory: str, source: str = "", suffixes: tuple[str, ...] = ()) -> None:
    text = offers("mine", factory=factory)
    plugin(site, "acme-fp8", "acme_plugin", text.replace("'s'", f"'s', file_suffixes={suffixes!r}"))
    (site / "acme_impl.py").write_text(RECIPE + source)


NO_TEXT = "class T:\n    def __str__(self): raise ValueError\ndef build(): raise TypeError(T())"


@pytest.mark.parametrize(
    ("factory", "source", "words"),
    [
        ("nonesuch_module:Thing", "", "nonesuch_module:Thing: ModuleNotFoundError"),
        ("acme_impl:nonesuch", "", "AttributeError"),
        ("acme_impl:Thing", "raise ValueError('at import')", "at import"),
        ("acme_impl:Thing", "import sys; sys.exit(2)", "SystemExit"),
        ("math:pi", "", "type float"),
        ("builtins:dict", "", "cannot be built"),
        ("acme_impl:build", "def build(): return Thing", "an object of type ABCMeta"),
        ("acme_impl:build", "def build(): raise SystemExit(2)", "SystemExit"),
        ("acme_impl:build", "def build(): [].nonesuch(a=1)", "AttributeError"),
        ("acme_impl:build", "def build(**k): return (lambda a=1: Thing())(b=2)", "TypeError"),
        ("acme_impl:build", NO_TEXT, "TypeError: an error whose text cannot be shown"),
        ("acme_impl:build", "def build(): raise ValueError('ctor')", "ValueError: ctor"),
    ],
)
def test_a_factory_that_fails_is_told_with_its_package_and_the_cause(
    site: Path, factory: str, source: str, words: str
) -> None:
    offer(site, factory, source)
    with pytest.raises(PluginError) as caught:
        ottava.get_recipe("mine")
    for part in ("recipe 'mine'", "acme-fp8 1.2", words):
        assert part in str(caught.value)
    assert caught.value.__cause__ is not None or words in (
        "type float",
        "an object of type ABCMeta",
    )


def test_a_word_of_backward_is_set_on_a_copy_unless_the_factory_takes_it(site: Path) -> None:
    source = "one = Thing()\ndef build(): return one\ndef taking(**options): return Thing()\n"
    offer(site, "acme_impl:build", source)
    plugin(site, "other-fp8", "other_plugin", offers("taking", factory="acme_impl:taking"))
    found = [ottava.get_recipe(name, backward="dequantized") for name in ("mine", "taking")]
    assert [recipe.backward for recipe in found] == ["dequantized", "quantized"]
    assert ottava.get_recipe("mine").backward == "quantized"
    with pytest.raises(OptionError, match="backward is 'no word'"):
        ottava.get_recipe("mine", backward="no word")


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        ("def build(a=1.0): ...", {"b": 2}, r"'mine': got an unexpected.* 'b'.*Expected: a"),
        ("def build(): ...", {"b": 2}, r"unexpected .*'b'.*no options"),
        ("def build(a): ...", {}, r"'mine': missing .*'a'"),
        ("def build(x, /): ...", {}, r"'mine': missing .*'x'"),
        (
            "from ottava.errors import OptionError\ndef build(a=1): raise OptionError('a is bad')",
            {"a": 2},
            "^a is bad",
        ),
    ],
)
def test_wrong_options_are_the_users(
    site: Path, build: str, options: dict[str, object], words: str
) -> None:
    offer(site, "acme_impl:build", build)
    with pytest.raises(OptionError, match=words):
        ottava.get_recipe("mine", **options)


READER = """
def build(file=None, extra=0):
    thing = Thing()
    thing.file, thing.extra = file, extra
    return thing
"""
OPTIONS = """
from enum import Enum
class Colour(Enum):
    RED = 1
    BLUE = 2
def build(colour=Colour.RED, sizes=(1, 2), text="a", **others):
    thing = Thing()
    thing.options = (colour, sizes, text, others)
    return thing
"""


def test_options_arrive_in_the_types_of_their_defaults(site: Path) -> None:
    offer(site, "acme_impl:build", OPTIONS)
    recipe: Any = ottava.get_recipe("mine", colour="BLUE", sizes=[3, 4], text="1", margin=3)
    colour, *others = recipe.options
    assert isinstance(colour, Enum)
    assert (colour.name, others) == ("BLUE", [(3, 4), "1", {"margin": 3}])
    assert ottava.get_recipe("mine", colour=colour).options[0] is colour  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match=r"colour is 'GREEN'. Expected: one of RED, BLUE"):
        ottava.get_recipe("mine", colour="GREEN")


def test_an_unknown_name_is_answered_with_what_is_near_meant_disabled_or_to_install(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(site, "acme_impl:Thing")
    answers = {
        "mien": "Remedy: use 'mine'",
        "Mine": "use 'mine'",
        "": "NAME",
        "zzzz": "pip install ottava-recipes-zzzz",
        "fp8": "ottava recipes",
        "E4M3": "ottava recipes",
        "fp16": "ottava.revert",
        "none": "autocast(enabled=False)",
    }
    for name, remedy in answers.items():
        with pytest.raises(RecipeNotFoundError) as caught:
            ottava.get_recipe(name)
        assert remedy in str(caught.value)
        # What may be a misspelling of something installed does not become a command.
        assert ("pip install" in str(caught.value)) == (name in ("", "zzzz"))
    plugin(site, "aaa-broken", "broken_one", "raise ValueError")
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", "acme-fp8")
    registry.reload()
    with pytest.raises(
        RecipeNotFoundError, match=r"aaa-broken:main \(broken\), acme-fp8:main \(di"
    ):
        ottava.get_recipe("mine")


def test_a_region_sees_packages_and_files_that_changed(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(site, "acme_impl:build", READER, (".ini",))

    def recipe(name: str | Path) -> Any:
        with ottava.autocast(name):
            return current_region().recipe  # type: ignore[union-attr]

    file = site / "model.ini"
    file.write_text("a")
    first, of_file = recipe("mine"), recipe(file)
    assert recipe("mine") is first
    assert recipe(file) is of_file
    # Of the same size, and then at the same time.
    for text in ("b", "cd"):
        file.write_text(text)
        os.utime(file, (9, 9))
        before, of_file = of_file, recipe(file)
        assert of_file is not before
    (site / "acme_impl.py").write_text(f"{RECIPE}\n    changed = True\n{READER}")
    monkeypatch.delitem(sys.modules, "acme_impl")
    registry.reload()
    assert recipe("mine").changed
    (site / "acme_fp8-1.2.dist-info" / "entry_points.txt").unlink()
    registry.reload()
    with pytest.raises(RecipeNotFoundError):
        ottava.autocast("mine")


# -- quantizer factories --


def test_quantizer_factories_have_names_of_their_own(site: Path) -> None:
    source = factories("rows", "acme_impl:rows") + offers("rows", "other", factory="a:B")
    plugin(site, "acme-fp8", "acme_plugin", source)
    (site / "acme_impl.py").write_text("def rows(role): return None\n")
    listed = {f.name: f.factory for f in ottava.list_quantizer_factories()}
    assert listed["rows"] == "acme_impl:rows"
    assert "acme_impl" not in sys.modules
    assert ottava.get_quantizer_factory("rows") is sys.modules["acme_impl"].rows
    with pytest.raises(RecipeNotFoundError, match=r"quantizer factory 'row'.*use 'rows'"):
        ottava.get_quantizer_factory("row")
    with pytest.raises(PluginError, match="cannot be imported from a:B"):
        ottava.get_recipe("rows")
    for number, reference in enumerate(("nonesuch_module:rows", "math:nonesuch", "math:pi")):
        module = f"wrong_{number}"
        plugin(site, module, module, factories(module, reference))
        registry.reload()
        with pytest.raises(PluginError, match=rf"quantizer factory '{module}' of {module} 1\.2"):
            ottava.get_quantizer_factory(module)
    plugin(site, "bbb-second", "bbb_second", factories("rows", "builtins:str"))
    registry.reload()
    with pytest.raises(DuplicateRecipeError, match=r"factory 'rows'.*acme-fp8 1\.2.*bbb-second"):
        ottava.get_quantizer_factory("rows")
    assert "other" in names()


# -- files in the place of names --


def test_the_recipe_that_reads_the_suffix_is_built(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(site, "acme_impl:build", READER, (".ini", ".cfg"))
    monkeypatch.setenv("HOME", "/some/home")
    paths: list[tuple[Any, str]] = [
        ("model.ini", "model.ini"),
        ("./model.v2.cfg", "./model.v2.cfg"),
        ("/some/where/model.INI", "/some/where/model.INI"),
        (Path("model.ini"), "model.ini"),
        ("~/model.ini", "/some/home/model.ini"),
    ]
    for path, expected in paths:
        recipe: Any = ottava.get_recipe(path, extra=3)
        assert (recipe.file, recipe.extra) == (expected, 3)
    with pytest.raises(OptionError, match="unexpected keyword argument 'margin'"):
        ottava.get_recipe("model.ini", margin=1)
    for path in ("model.cfg2", "a/b", "a/model", "model.json"):
        with pytest.raises(RecipeNotFoundError, match="is read by no installed recipe"):
            ottava.convert(torch.nn.Linear(2, 2), path)
    for name in ("curent", "Current", "", "a b"):
        with pytest.raises(RecipeNotFoundError, match="no installed package provides recipe"):
            ottava.get_recipe(name)
    other = SPEC.format(", file_suffixes=('.ini',)")
    plugin(site, "beta", "beta", hook(f"return [{other}]"))
    registry.reload()
    with pytest.raises(RecipeNotFoundError, match=r"'model.ini' is read by mine and by x"):
        ottava.get_recipe("model.ini")
    monkeypatch.setattr(registry, "specs", lambda kind: [])
    with pytest.raises(RecipeNotFoundError, match="ottava-recipes-custom"):
        ottava.get_recipe("model.cfg")


# -- specs --

RIGHT: dict[str, Any] = {"name": "mine", "summary": "s", "factory": "a.b:C"}
COMMON: dict[str, list[Any]] = {
    "name": ["Mine", "", None],
    "summary": [object(), "two\nlines", "\x1b[31mred"],
    "factory": ["a.b", "a..b:C", "a.b:C()", dict],
    "api_version": ["1", True, 0],
}
OF_RECIPES: dict[str, list[Any]] = {
    "stateful": [1],
    "needs_reduction": [None],
    "block_size": [32, (1, 0), (1, True), (1, 2, 3), "ab", (None, None), (1, -1)],
    "formats": [None, "E4M3", (1, 2), ("",)],
    "fake_quant_formats": [["E4M3"], (None,)],
    "relative_error": [0, -0.1, float("nan"), float("inf"), True, "0.1"],
    "quantized_weights": [1],
    "deterministic": [None],
    "stochastic": [1],
    "second_level": ["tensor"],
    "shows_nan": [None],
    "compiles": ["yes"],
    "file_suffixes": [".yaml", ("yaml",), (".YAML",), (1,)],
}


def test_every_field_of_a_spec_is_checked_whatever_type_it_has() -> None:
    for spec, fields in ((FactorySpec, COMMON), (RecipeSpec, COMMON | OF_RECIPES)):
        for field, wrong in fields.items():
            for value in wrong:
                with pytest.raises(OptionError, match=field):
                    spec(**RIGHT | {field: value})
                    pytest.fail(f"{spec.__name__} took {field}={value!r}")
    full = RecipeSpec(
        **RIGHT, stateful=True, block_size=(1, 128), formats=("E4M3",), needs_reduction=True
    )
    assert full.capabilities == ("E4M3", "block 1x128", "stateful", "reduces amax")
    assert RecipeSpec(**RIGHT).capabilities == ("per tensor", "stateless")
    random = RecipeSpec(**RIGHT, stochastic=True, second_level=True)
    assert random.capabilities[2:] == ("two levels of scales", "stochastic")
    shared = {(1, None): "per row", (None, 1): "per column", (2, None): "block 2xall"}
    for block, words in shared.items():
        assert words in RecipeSpec(**RIGHT, block_size=block).capabilities
    assert FactorySpec(**RIGHT).api_version == 1
