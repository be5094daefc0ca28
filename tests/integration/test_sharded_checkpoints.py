"""Sharded checkpoints of real recipes under FSDP2: every byte is kept, whoever saves and loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ottava.checkpoint import load_sharded, save_sharded
from ottava.errors import CheckpointError

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
sys.path.insert(0, str(Path(__file__).parent))

from sharded_checkpoint_cases import RECIPES, Training, gathered, same


@pytest.mark.parametrize("kind", RECIPES)
def test_a_state_of_another_recipe_is_refused(kind: str, tmp_path: Path) -> None:
    training = Training(kind, 1)
    training.step()
    save_sharded(training.net.state_dict(), tmp_path / "saved")
    for other in RECIPES:
        if other == kind:
            continue
        fresh = Training(other, 2)
        before = gathered(fresh.net.state_dict())
        # Current and delayed scaling have the same tensors, and differ in the state besides.
        kinds = {name: RECIPES[name][0] for name in (kind, other)}
        strict = set(kinds.values()) <= {"current", "delayed"}
        with pytest.raises(CheckpointError, match="recipe_state" if strict else "0.weight"):
            load_sharded(fresh.net.state_dict(), tmp_path / "saved", strict=strict)
        same(gathered(fresh.net.state_dict()), before, f"{kind} into {other}")


@pytest.mark.parametrize("kind", RECIPES)
def test_a_layer_computes_with_what_was_loaded(kind: str, tmp_path: Path) -> None:
    """Whatever it has kept from the products before."""
    saved, loaded, x = Training(kind, 1), Training(kind, 2), torch.ones(4, 40).bfloat16()
    save_sharded(saved.net.state_dict(), tmp_path / "saved")
    with torch.no_grad():
        expected = saved.net(x)
        assert not torch.equal(loaded.net(x), expected)
        load_sharded(loaded.net.state_dict(), tmp_path / "saved")
        assert torch.equal(loaded.net(x), expected)
