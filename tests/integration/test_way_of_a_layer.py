"""The files that a matrix passes in a layer are those of the drawing in the documentation."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import ottava

ROOT = Path(__file__).parents[2]
DRAWING = ROOT / "docs" / "_static" / "way.svg"
#: What delayed scaling adds to the way of the other recipes.
OF_STEPS = {"nn/entry.py", "recipes/state.py", "ottava_delayed/update.py"}


def drawn_files() -> list[str]:
    """The files of the drawing, from top to bottom."""
    texts = re.findall(r'font-weight="bold">([^<]+)</text>', DRAWING.read_text())
    files = [text for text in texts if re.fullmatch(r"[\w/]+/\w+\.py", text)]
    return list(dict.fromkeys(files))


def files_of_a_pass(recipe: str, *shape: int) -> tuple[list[str], list[str]]:
    """The files of packages that functions are called in, in a forward pass and in a backward
    pass, in the order of their first call."""
    layer = ottava.nn.Linear(64, 32, recipe=recipe)
    x = torch.randn(*shape, 64, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        module: str = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("ottava"):
            files.append(module.replace(".", "/").removeprefix("ottava/") + ".py")

    sys.setprofile(note)
    try:
        y = layer(x)
    finally:
        sys.setprofile(None)
    forward, files = list(dict.fromkeys(files)), []
    dy = torch.ones_like(y)
    sys.setprofile(note)
    try:
        y.backward(dy)
    finally:
        sys.setprofile(None)
    return forward, list(dict.fromkeys(files))


@pytest.mark.parametrize("shape", [(8,), (2, 4), ()], ids=["matrix", "batch", "vector"])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "blockwise"])
def test_a_recipe_without_state_passes_eight_files(recipe: str, shape: tuple[int, ...]) -> None:
    expected = [name for name in drawn_files() if name not in OF_STEPS]
    forward, backward = files_of_a_pass(recipe, *shape)
    assert forward == expected
    assert len(forward) == 8
    assert set(backward) <= set(forward)


def test_delayed_scaling_passes_three_more() -> None:
    forward, backward = files_of_a_pass("delayed", 2, 4)
    assert set(forward) == set(drawn_files())
    assert len(forward) == 11
    assert set(backward) <= set(forward)
