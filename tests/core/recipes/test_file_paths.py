"""The path of a recipe file in the place of a name: read by the recipe whose spec lists its
suffix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import RECIPE, hook, plugin, run

import ottava
from ottava.errors import OptionError, RecipeNotFoundError
from ottava.recipes import registry

BUILD = (
    "def build(file=None, extra=0):\n    made = Thing()\n    made.file, made.extra = file, "
    "extra\n    return made\n"
)
READER = f"{RECIPE}\n\n{BUILD}"


def offer(
    site: Path, name: str = "reader", module: str = "acme", suffixes: str = "('.ini', '.cfg')"
) -> None:
    body = (
        f"return [RecipeSpec(name='{name}', summary='s', factory='{module}_impl:build', "
        f"file_suffixes={suffixes})]"
    )
    plugin(site, f"{module}-fp8", f"{module}_plugin", hook(body))
    (site / f"{module}_impl.py").write_text(READER)


@pytest.mark.parametrize(
    "path", ["model.ini", "./model.cfg", "/some/where/model.INI", "model.v2.cfg"]
)
def test_the_recipe_that_reads_the_suffix_is_built(site: Path, path: str) -> None:
    offer(site)
    recipe = ottava.get_recipe(path, extra=3)
    assert (recipe.file, recipe.extra) == (path, 3)  # type: ignore[attr-defined]


def test_paths_may_be_path_objects_and_of_the_users_folder(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(site)
    monkeypatch.setenv("HOME", "/some/home")
    assert ottava.get_recipe(Path("model.ini")).file == "model.ini"  # type: ignore[attr-defined]
    at_home: Any = ottava.get_recipe("~/model.ini")
    assert at_home.file == "/some/home/model.ini"
    with ottava.autocast(Path("model.ini")):
        region: Any = ottava.recipes.region.current_region()
        assert region.recipe.file == "model.ini"


def test_models_take_paths(site: Path) -> None:
    offer(site)
    with ottava.autocast("model.ini"):
        region: Any = ottava.recipes.region.current_region()
        assert region.recipe.file == "model.ini"
    with pytest.raises(
        RecipeNotFoundError, match=r"the file 'model.json' is read by no installed recipe"
    ):
        ottava.convert(torch.nn.Linear(2, 2), "model.json")


@pytest.mark.parametrize("path", ["model.cfg2", "a/b", "a/model"])
def test_other_files_are_not(site: Path, path: str) -> None:
    offer(site)
    with pytest.raises(RecipeNotFoundError, match="is read by no installed recipe"):
        ottava.get_recipe(path)


def test_without_a_reader_the_error_says_what_to_install(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "specs", lambda kind: [])
    with pytest.raises(RecipeNotFoundError, match="ottava-recipes-custom"):
        ottava.get_recipe("model.cfg")


def test_two_readers_are_a_conflict(site: Path) -> None:
    offer(site)
    offer(site, "other", "beta", "('.ini',)")
    with pytest.raises(RecipeNotFoundError, match=r"'model.ini' is read by other and by reader"):
        ottava.get_recipe("model.ini")
    other: Any = ottava.get_recipe("other", file="model.ini")
    assert other.file == "model.ini"


def test_an_option_that_it_does_not_take_is_refused(site: Path) -> None:
    offer(site)
    with pytest.raises(OptionError, match="unexpected keyword argument 'margin'"):
        ottava.get_recipe("model.ini", margin=1)


@pytest.mark.parametrize("name", ["curent", "Current", "", "a b"])
def test_names_are_not_paths(site: Path, name: str) -> None:
    offer(site)
    with pytest.raises(RecipeNotFoundError, match="no installed package provides recipe"):
        ottava.get_recipe(name)


def test_the_command_takes_paths(site: Path) -> None:
    offer(site)
    done = run(site, "recipes", "--explain", "model.json")
    assert done.returncode == 2
    assert "the file 'model.json' is read by no installed recipe" in done.stderr


def test_a_region_sees_a_file_that_changed(site: Path, tmp_path: Path) -> None:
    offer(site)
    file = tmp_path / "model.ini"
    seen = []
    for text in ("a", "a", "bc"):
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        with ottava.autocast(str(file)):
            seen.append(ottava.recipes.region.current_region().recipe)  # type: ignore[attr-defined]
    assert seen[0] is seen[1]
    assert seen[2] is not seen[1]
