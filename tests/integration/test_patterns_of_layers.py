"""Patterns that name layers of which a model has none: refused before anything is changed, with the
nearest name."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ottava
from ottava.errors import OptionError
from ottava_custom import CustomRecipe, by_layer
from ottava_integrations import convert_file

NAMES = ("q_proj", "k_proj", "up", "down")


def net() -> torch.nn.Module:
    blocks = [
        torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in NAMES}) for _ in range(2)
    ]
    parts = {
        "embed": torch.nn.Embedding(8, 32),
        "blocks": torch.nn.ModuleList(blocks),
        "head": torch.nn.Linear(32, 8),
    }
    return torch.nn.ModuleDict(parts)


def file_with(
    folder: Path, *patterns: str, default: str = "identity", name: str = "r.yaml"
) -> Path:
    path = folder / name
    rules = "".join(f"  - match: [{pattern!r}]\n    all: current\n" for pattern in patterns)
    path.write_text(f"default: {default}\nlayers:\n{rules}" if rules else f"default: {default}\n")
    return path


# A pattern that fits no layer, and what the error expects.
WRONG = [
    ("*.q_prj", "a name such as *.q_proj"),
    ("blocks.0.q_prj", "a name such as blocks.0.q_proj"),
    ("block.0", "a name such as blocks.0"),
    ("*q_prj", "a name such as *q_proj"),
    ("Head", "a name such as head"),
    ("blocks.2", "a name such as blocks.1"),
    ("embed", "the name of a linear layer, or of a module that it is in"),
    ("zzz", "the name of a linear layer, or of a module that it is in"),
]
RIGHT = ["head", "*.q_proj", "blocks.1.up", "blocks.0", "blocks.[01].down", "*", "h?ad"]


@pytest.mark.parametrize(("pattern", "expected"), WRONG, ids=[pattern for pattern, _ in WRONG])
def test_a_pattern_that_matches_no_layer(pattern: str, expected: str, tmp_path: Path) -> None:
    model = net()
    before = {name: type(module) for name, module in model.named_modules()}
    path = file_with(tmp_path, "blocks.0.up", pattern)
    told = (
        f"line 5, column 13: pattern {pattern!r} matches no layer of the model. Expected: "
        f"{expected}"
    )
    with pytest.raises(OptionError) as error:
        ottava.convert(model, path)
    assert f"{path}, {told}" in str(error.value)
    with pytest.raises(OptionError, match="by_layer matches no layer") as error:
        ottava.convert(model, CustomRecipe(by_layer({pattern: "current"}, "identity")))
    assert f"Expected: {expected}" in str(error.value)
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("pattern", RIGHT)
@pytest.mark.filterwarnings("ignore:(only|nothing).*of the weights of products")
def test_a_pattern_that_matches_a_layer(pattern: str, tmp_path: Path) -> None:
    path = file_with(tmp_path, pattern)
    assert isinstance(ottava.convert(net(), path)["head"], ottava.nn.Linear)
    # Layers that are left alone, or were converted before, are layers all the same.
    left = ottava.convert(net(), path, exclude=["head", "blocks"])
    assert not isinstance(left["head"], ottava.nn.Linear)
    assert isinstance(
        ottava.convert(ottava.convert(net(), "current"), path)["head"], ottava.nn.Linear
    )


def test_a_file_that_a_file_names(tmp_path: Path) -> None:
    inner = file_with(tmp_path, "*.dwn", name="inner.yaml")
    outer = file_with(tmp_path, default=f"{{recipe: custom, file: {str(inner)!r}}}")
    with pytest.raises(OptionError, match=r"outer|r\.yaml.*inner\.yaml.*'\*\.dwn'.*\*\.down"):
        ottava.convert(net(), outer)


def test_one_layer_by_itself_has_no_name(tmp_path: Path) -> None:
    assert isinstance(
        ottava.convert(torch.nn.Linear(32, 32), file_with(tmp_path, "*")), ottava.nn.Linear
    )
    with pytest.raises(OptionError, match="'head' matches no layer"):
        ottava.convert(torch.nn.Linear(32, 32), file_with(tmp_path, "head"))


def test_an_exported_checkpoint(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    safetensors.torch.save_file(net().state_dict(), source)
    with pytest.raises(
        OptionError, match=r"'\*\.q_prj' matches no layer.*a name such as \*\.q_proj"
    ):
        convert_file(source, target, file_with(tmp_path, "*.q_prj"))
    assert not target.exists()
    done = convert_file(source, target, file_with(tmp_path, "*.q_proj"))
    assert done.quantized == ("blocks.0.q_proj.weight", "blocks.1.q_proj.weight")
    assert target.exists()


def test_exclude_names_the_nearest_pattern() -> None:
    with pytest.raises(
        OptionError, match=r"exclude pattern '\*\.q_prj' matches no module.*such as \*\.q_proj"
    ):
        ottava.convert(net(), "current", exclude="*.q_prj")


def test_what_a_file_leaves_in_high_precision_is_not_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("default: current\nlayers:\n  - match: [q_proj, k_proj]\n    all: identity\n")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in NAMES})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ottava.convert(model, path)


def test_what_an_earlier_conversion_excluded_is_not_warned_of() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in NAMES})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ottava.convert(model, "current", exclude=["q_proj", "k_proj"])
        ottava.convert(model, "mxfp8", include=["up"])
