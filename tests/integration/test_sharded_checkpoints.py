"""Sharded checkpoints of every recipe, on four ranks and in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ottava.checkpoint import load_sharded, save_sharded
from ottava.errors import CheckpointError
from ottava_integrations import read_state
from tests import ranks
from tests.integration.sharded_checkpoint_cases import (
    CASES,
    RECIPES,
    Training,
    gathered,
    run_case,
    same,
)

#: Ranks of delayed scaling have amaxes of their own.
LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in RECIPES if kind != "delayed"]


@pytest.mark.parametrize("case", [*CASES, "delayed", *LONG])
def test_on_four_ranks(case: str) -> None:
    ranks.run(run_case, 4, seconds=400, case=case)


@pytest.mark.parametrize("kind", RECIPES)
def test_in_one_process(kind: str, tmp_path: Path) -> None:
    """Loaded into a model of the recipe, which computes with it, and refused by others."""
    saved, loaded, x = Training(kind, 1), Training(kind, 2), torch.ones(4, 40)
    saved.step()
    save_sharded(saved.state(), tmp_path / "saved")
    expected = gathered(saved.state())
    for other in RECIPES:
        if other == kind:
            continue
        fresh = Training(other, 2)
        before = gathered(fresh.net.state_dict())
        # Current and delayed scaling have the same tensors, and differ in the state besides.
        strict = {kind, other} == {"current", "delayed"}
        with pytest.raises(CheckpointError, match="recipe_state" if strict else "0.weight"):
            load_sharded({"model": fresh.net.state_dict()}, tmp_path / "saved", strict=strict)
        same(gathered(fresh.net.state_dict()), before, f"{kind} into {other}")
    with torch.no_grad():
        y = loaded.net(x)
        loaded.resume(tmp_path / "saved")
        assert not torch.equal(loaded.net(x), y)
        assert torch.equal(loaded.net(x), saved.net(x))
    same(gathered(loaded.state()), expected, kind)
    state, _ = read_state(tmp_path / "saved")
    names = {name: value for name, value in state.items() if name.startswith("model.")}
    model = {"model": {name.removeprefix("model."): value for name, value in names.items()}}
    for name, value in gathered(model).items():
        assert torch.equal(value, expected[name]), name
