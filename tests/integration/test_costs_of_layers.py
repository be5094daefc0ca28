"""What a call of a layer costs besides its kernels: the files that it passes, the Python functions
that it calls, and nothing that waits for the garbage collector."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ottava
from ottava.torch_private import PIPELINES

ROOT = Path(__file__).parents[2]
DRAWING = ROOT / "docs" / "_static" / "way.svg"
#: What delayed scaling adds to the way of the other recipes.
OF_STEPS = {"nn/entry.py", "recipes/state.py", "ottava_delayed/update.py"}


def drawn_files() -> list[str]:
    """The files of the drawing in the documentation, from top to bottom."""
    texts = re.findall(r'font-weight="bold">([^<]+)</text>', DRAWING.read_text())
    files = [text for text in texts if re.fullmatch(r"[\w/]+/\w+\.py", text)]
    return list(dict.fromkeys(files))


def called(run: Callable[[], Any]) -> list[FrameType]:
    """The frames of the Python functions that are called."""
    frames: list[FrameType] = []
    sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return frames


def files(run: Callable[[], Any]) -> list[str]:
    """The files of packages that functions are called in, in the order of their first call."""
    modules = [frame.f_globals.get("__name__", "") for frame in called(run)]
    own = [module for module in modules if module.startswith("ottava")]
    paths = [module.replace(".", "/").removeprefix("ottava/") + ".py" for module in own]
    return list(dict.fromkeys(paths))


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_a_pass_takes_the_files_of_the_drawing(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that has imported pipelines asks whether a stage of one is running.
    monkeypatch.delitem(sys.modules, PIPELINES, raising=False)
    layer, x = ottava.nn.Linear(64, 32, recipe=recipe), torch.randn(8, 64, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
    outputs: list[Any] = []
    forward = files(lambda: outputs.append(layer(x)))
    backward = files(lambda: outputs[0].backward(torch.ones_like(outputs[0])))
    if recipe == "delayed":
        assert set(forward) == set(drawn_files())
    else:
        assert forward == [name for name in drawn_files() if name not in OF_STEPS]
    assert set(backward) <= set(forward)


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_a_forward_and_backward_pass_makes_few_calls(recipe: str) -> None:
    """What stands between kernels on a GPU. A converted model begins a step besides."""
    x, dy = torch.randn(16, 64, requires_grad=True), torch.randn(16, 64)
    bound = ottava.nn.Linear(64, 64, recipe=recipe)
    converted = ottava.convert(torch.nn.Linear(64, 64), recipe)
    for layer, most in ((bound, 150), (converted, 190)):
        for _ in range(3):
            layer(x).backward(dy)
        frames = called(lambda layer=layer: layer(x).backward(dy))
        names = [frame.f_code.co_qualname for frame in frames]
        assert len(names) <= most, names


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "blockwise", "rowwise"])
def test_nothing_of_a_pass_waits_for_the_garbage_collector(recipe: str) -> None:
    layer = ottava.nn.Linear(64, 32, recipe=recipe)
    layer(torch.randn(4, 64)).sum().backward()
    saved: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer(torch.randn(4, 64, requires_grad=True))
        y.sum().backward()
        del y
        known = weakref.ref(layer)
        assert len(saved) >= 2
        del layer
        assert known() is None
    finally:
        gc.enable()
