"""What a file says of the recipe and the package that quantized a tensor, and what is said where they are missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.checkpoint import provenance
from ottava.errors import CheckpointError, PluginError
from ottava.recipes.ownership import PluginStatus
from ottava.recipes.spec import RecipeSpec
from ottava.tensors import QuantizedTensorStorage


def status(*recipes: str, module: str, distribution: str = "ottava-recipes-mine", version: str = "2.5") -> PluginStatus:
    specs = tuple(RecipeSpec(name=name, summary="s", factory=f"{module}.recipe:Thing") for name in recipes)
    return PluginStatus(f"{distribution}:main", distribution, version, "main", "ok", recipes=specs)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which plugins are installed, and what their recipes are."""

    def say(*statuses: PluginStatus, recipes: Any = None) -> None:
        monkeypatch.setattr(provenance, "plugin_statuses", lambda: list(statuses))
        monkeypatch.setattr(provenance, "get_recipe", lambda name: recipes[name])

    return say


def entry(state: dict[str, Any]) -> dict[str, Any]:
    _, metadata = checkpoint.flatten_state_dict(state)
    found: dict[str, Any] = json.loads(metadata["ottava"])["quantized"]["w"]
    return {key: found.get(key) for key in ("recipe", "package", "version")}


@pytest.fixture
def package(quantizer: Any) -> str:
    """The top-level module of the quantizer of the tests."""
    return type(quantizer).__module__.partition(".")[0]


MINE = {"recipe": "mine", "package": "ottava-recipes-mine", "version": "2.5"}


def test_the_package_of_the_quantizer(quantizer: Any, installed: Any, package: str) -> None:
    state = {"w": quantizer(torch.randn(2, 4))}
    other = status("other", module="another_package", distribution="another", version="1")
    installed(other, status("mine", module=package))
    assert entry(state) == MINE
    installed(other)
    assert entry(state)["recipe"] is None
    state["w"].update_quantizer(None)
    installed(other, status("core", module="ottava", distribution="ottava", version="9"))
    assert entry(state) == {"recipe": "core", "package": "ottava", "version": "9"}


def test_of_several_recipes_that_with_the_quantizer(quantizer: Any, recipe: Any, installed: Any, package: str) -> None:
    class Other(type(quantizer)):  # type: ignore[misc]
        pass

    class Coarse(ottava.Recipe):
        def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
            return Other(torch.float8_e4m3fn)

    class Wide(ottava.Recipe):
        def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
            return type(quantizer)(torch.float8_e5m2)

    made = {"mine": recipe, "coarse": Coarse(), "wide": Wide()}
    state = {"w": quantizer(torch.randn(2, 4))}
    installed(status("coarse", "mine", module=package), recipes=made)
    assert entry(state) == MINE
    installed(status("coarse", "mine", "wide", module=package), recipes=made)
    assert entry(state) == MINE
    # Two that do the same: no name is better than a wrong one.
    installed(status("mine", "same", module=package), recipes=made | {"same": recipe})
    assert entry(state) == MINE | {"recipe": None}


def test_a_broken_plugin_keeps_nothing_from_being_saved(
    quantizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses() -> Any:
        raise PluginError("plugin x is broken")

    monkeypatch.setattr(provenance, "plugin_statuses", refuses)
    checkpoint.save_file({"w": quantizer(torch.randn(2, 4))}, tmp_path / "x")
    assert checkpoint.load_file(tmp_path / "x")["w"].shape == (2, 4)


def test_a_loaded_tensor_remembers(quantizer: Any, installed: Any, package: str, tmp_path: Path) -> None:
    installed(status("mine", module=package))
    checkpoint.save_file({"w": quantizer(torch.randn(2, 4))}, tmp_path / "x")
    read = checkpoint.load_file(tmp_path / "x")
    assert read["w"]._quantizer is None
    # Another version is installed by now: it is not what quantized the tensor.
    installed(status("mine", module=package, version="3.0"))
    assert entry({"w": read["w"]}) == MINE
    checkpoint.save_file(read, tmp_path / "y")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    # Quantized anew, it is of the version that is installed.
    read["w"].update_quantizer(quantizer)
    assert entry(read) == MINE | {"version": "3.0"}


def test_a_missing_package_is_named(quantizer: Any, installed: Any, package: str) -> None:
    installed(status("mine", module=package))
    tensors, metadata = checkpoint.flatten_state_dict({"w": quantizer(torch.randn(2, 4))})
    described = json.loads(metadata["ottava"])
    described["quantized"]["w"]["class"] = "mine_package.tensors:MineTensor"
    installed()
    with pytest.raises(CheckpointError, match=r"'w'.*MineTensor.*install ottava-recipes-mine 2\.5"):
        checkpoint.unflatten_state_dict(tensors, {"ottava": json.dumps(described)})
    for key in ("recipe", "package", "version"):
        described["quantized"]["w"].pop(key)
    with pytest.raises(CheckpointError, match="install the distribution of 'mine_package'"):
        checkpoint.unflatten_state_dict(tensors, {"ottava": json.dumps(described)})


def test_only_installed_recipes_are_imported(
    quantizer: Any, installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module of the recipe, which brings the class; one that fails is no more than a missing class."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, source in (
        ("lazy_fp8", "from ottava.tensors import Float8Tensor\nclass LazyTensor(Float8Tensor): pass\n"),
        ("broken_fp8", "raise SystemExit(3)\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "recipe.py").write_text(source)
    (tmp_path / "stranger.py").write_text("raise RuntimeError('imported')\n")
    tensors, metadata = checkpoint.flatten_state_dict({"w": quantizer(torch.randn(2, 4))})
    described = json.loads(metadata["ottava"])

    def read(cls: str) -> Any:
        described["quantized"]["w"]["class"] = cls
        return checkpoint.unflatten_state_dict(tensors, {"ottava": json.dumps(described)})["w"]

    installed(status("lazy", module="lazy_fp8"), status("broken", module="broken_fp8"))
    for cls in ("stranger:Tensor", "broken_fp8.recipe:Tensor", "lazy_fp8.recipe:Nothing"):
        with pytest.raises(CheckpointError, match="not installed"):
            read(cls)
    assert "stranger" not in sys.modules
    made = read("lazy_fp8.recipe:LazyTensor")
    assert isinstance(made, QuantizedTensorStorage)
    assert type(made).__name__ == "LazyTensor"
