"""Tensors whose storage was given up or cut are refused by every writer: to read them would crash,
or read on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.errors import UsageError


def freed() -> torch.Tensor:
    tensor = torch.ones(100_000)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut() -> torch.Tensor:
    tensor = torch.ones(100_000)
    tensor.untyped_storage().resize_(100)
    return tensor


def behind_its_end() -> torch.Tensor:
    """A view whose own bytes alone would have room."""
    whole = torch.ones(100_000)
    view = whole[99_990:]
    whole.untyped_storage().resize_(1000)
    return view


def strided() -> torch.Tensor:
    whole = torch.ones(100, 100)
    column = whole[:, 0]
    whole.untyped_storage().resize_(4000)
    return column


def model_of(tensor: Any, recipe: Any = None) -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_buffer("x", tensor)
    return model


def quantized_model(tensor: Any, recipe: Any) -> torch.nn.Module:
    """One whose quantized weight holds such a tensor."""
    with ottava.quantized_model_init(recipe):
        layer = ottava.nn.Linear(16, 16, bias=False)
    held = next(
        inner for inner in layer.weight.inner_list() if inner is not None and inner.numel() > 1
    )
    # Memory of its own: that of some kernels cannot be resized.
    held.set_(held.clone())
    held.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 10)
    return torch.nn.ModuleDict({"x": layer})


MADE: dict[str, Callable[[], torch.Tensor]] = {
    function.__name__: function for function in (freed, cut, behind_its_end, strided)
}
WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "save_file": checkpoint.save_file,
    "save_sharded": lambda state, path: checkpoint.save_sharded(state, path, overwrite=True),
    "save_step": lambda state, path: checkpoint.save_step(state, path, 1),
    "flatten_state_dict": lambda state, path: checkpoint.flatten_state_dict(state),
    "load_sharded": lambda state, path: checkpoint.load_sharded(state, path.parent / "there"),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("of", [model_of, quantized_model])
def test_memory_that_is_not_there(
    of: Callable[[Any, Any], torch.nn.Module], writer: str, name: str, recipe: Any, tmp_path: Path
) -> None:
    checkpoint.save_sharded({"x": torch.ones(3)}, tmp_path / "there")
    if of is quantized_model and name in ("behind_its_end", "strided"):
        pytest.skip("what a quantized tensor holds is whole")
    state = of(MADE[name](), recipe).state_dict()
    with pytest.raises(
        UsageError,
        match=r"'x[\w.]*' (has no memory|lies outside of its memory): its storage.* bytes",
    ):
        WRITERS[writer](state, tmp_path / "saved")
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


def test_a_model_is_neither_saved_nor_loaded_into(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    checkpoint.save_model(model_of(torch.ones(100_000)), path)
    before = path.read_bytes()
    for made in (freed(), cut()):
        with pytest.raises(UsageError, match=r"'x' .* its storage was resized to"):
            checkpoint.save_model(model_of(made), path)
        with pytest.raises(UsageError, match=r"'x' .* its storage was resized to"):
            checkpoint.load_model(model_of(made), path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        freed()[:0],
        torch.ones(4).expand(3, 4),
        torch.ones(4, 4)[1:, 1:],
        torch.ones(()),
        torch.eye(3).t(),
    ],
)
def test_memory_that_is_enough(tensor: torch.Tensor, tmp_path: Path) -> None:
    checkpoint.save_file({"x": tensor}, tmp_path / "x")
    loaded: Any = checkpoint.load_file(tmp_path / "x")["x"]
    assert torch.equal(loaded, tensor)
