"""Sharded checkpoints of real recipes under FSDP2: every byte is kept, whoever saves and loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ottava.checkpoint import ShardedSource, is_complete, load_sharded, save_sharded, unflatten_state_dict
from ottava.errors import CheckpointError
from ottava.tensors import QuantizedTensor

WORKER = Path(__file__).with_name("sharded_worker.py")
sys.path.insert(0, str(WORKER.parent))

from sharded_worker import RECIPES, Training, gathered, same  # noqa: E402


def test_every_recipe_on_any_number_of_ranks(tmp_path: Path) -> None:
    """4, 2 x 2, 2 and 1 ranks and a process without a group load what each of them saved."""
    trained = {}
    for kind in RECIPES:
        trained[kind] = Training(kind, 1)
        trained[kind].step()
        save_sharded(trained[kind].state(), tmp_path / f"{kind}-whole")
        torch.save(gathered(trained[kind].state()), tmp_path / f"{kind}-whole.expected")
    command = [sys.executable, "-W", "ignore", str(WORKER), str(tmp_path), *RECIPES]
    ranks = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert ranks.returncode == 0, ranks.stdout
    for kind in RECIPES:
        expected = torch.load(tmp_path / f"{kind}.expected", weights_only=True)
        path = tmp_path / f"{kind}-4"
        assert is_complete(path)
        fresh = Training(kind, 2)
        fresh.resume(path)
        same(gathered(fresh.state()), expected, f"{kind}: saved by 4, loaded by a process")
        fresh.step()
        read_tensor_by_tensor(path, expected, kind)


def read_tensor_by_tensor(path: Path, expected: dict[str, torch.Tensor], kind: str) -> None:
    source = ShardedSource(path)
    assert len(list(path.glob("rank-*-of-00004.safetensors"))) == 4
    for name in source.names():
        tensor = source.read(name)
        assert source.spec(name) == (tensor.dtype, tuple(tensor.shape))
    state = unflatten_state_dict({name: source.read(name) for name in source.names()}, source.metadata)
    weights = {name: value for name, value in state.items() if isinstance(value, QuantizedTensor)}
    assert sorted(weights) == ["model.0.weight", "model.2.weight"]
    assert tuple(weights["model.0.weight"].shape) == (RECIPES[kind][2], 40)
    model = {"model": {name.removeprefix("model."): value for name, value in state.items() if "model" in name}}
    for name, value in gathered(model).items():
        assert torch.equal(value, expected[name]), (kind, name)


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
        strict = "mxfp8" not in kinds.values()
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
