"""The state is plain tensors: saved, loaded, moved, copied, resized, and resumed after SIGKILL, bit
for bit."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

# What an optimizer imports at its first step: once, and not in every fork.
import torch._dynamo
import torch.distributed.checkpoint as dcp

import ottava
from ottava_delayed import DelayedScaling


def trained(recipe: Any = None, steps: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    ottava.convert(net, recipe or DelayedScaling(amax_history_len=5))
    for step in range(steps):
        net((1 + step) * torch.randn(6, 16)).sum().backward()
    return net


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def through_torch(net: torch.nn.Module, tmp_path: Path) -> Any:
    torch.save(net.state_dict(), tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


def through_safetensors(net: torch.nn.Module, tmp_path: Path) -> Any:
    safetensors.torch.save_file(net.state_dict(), tmp_path / "state.safetensors")
    return safetensors.torch.load_file(tmp_path / "state.safetensors")


def through_dcp(net: torch.nn.Module, tmp_path: Path) -> Any:
    dcp.save(net.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    state = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return state


@pytest.mark.parametrize("way", [through_torch, through_safetensors, through_dcp])
def test_round_trips(way: Any, tmp_path: Path) -> None:
    net, other = trained(), trained(steps=0)
    state = way(net, tmp_path)
    assert all(type(value) is torch.Tensor for value in state.values())
    other.load_state_dict(state, strict=True)
    assert equal(net, other)
    x = torch.randn(4, 16)
    for module in (net, other):
        module.zero_grad()
        module(x).sum().backward()
    assert torch.equal(net[0].weight.grad, other[0].weight.grad)
    assert equal(net, other)


def test_copies_share_nothing() -> None:
    net = trained()
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert equal(net, copied)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        copied(100 * torch.randn(6, 16)).sum().backward()
        copied(100 * torch.randn(6, 16)).sum().backward()
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert not equal(net, copied)
        assert copied[0].recipe_state is copied[0]._binding.state


def test_moving_keeps_the_state_alive() -> None:
    net = trained()
    moved = copy.deepcopy(net).to("meta")
    assert moved[0].recipe_state.scale.is_meta
    scale = net[0].recipe_state.scale.clone()
    net(50 * torch.randn(6, 16)).sum().backward()
    net(50 * torch.randn(6, 16)).sum().backward()
    assert not torch.equal(net[0].recipe_state.scale, scale)


@pytest.mark.parametrize(("saved", "loaded"), [(6, 3), (6, 1), (3, 6), (1, 4)])
def test_history_of_another_length(saved: int, loaded: int) -> None:
    net, other = (
        trained(DelayedScaling(amax_history_len=saved), 8),
        trained(DelayedScaling(amax_history_len=loaded), 0),
    )
    state = net.state_dict()
    with pytest.warns(UserWarning, match=f"saved with {saved} steps and is loaded into {loaded}"):
        other.load_state_dict(state, strict=True)
    old, new = net[0].recipe_state.amax_history, other[0].recipe_state.amax_history
    assert torch.equal(new[0], old[0])
    kept = min(saved, loaded) - 1
    assert torch.equal(new[loaded - kept :], old[saved - kept :])
    assert not new[1 : loaded - kept].any()
    assert torch.equal(other[0].recipe_state.scale, net[0].recipe_state.scale)
    # The dictionary is the caller's.
    assert state["0.recipe_state.amax_history"].shape[0] == saved


def test_a_wrong_number_of_slots_is_an_error() -> None:
    state = trained().state_dict()
    state["0.recipe_state.amax_history"] = torch.zeros(5, 4)
    with pytest.raises(RuntimeError, match="size mismatch"):
        trained(steps=0).load_state_dict(state)


def test_loading_before_the_region_that_brings_the_recipe() -> None:
    recipe = DelayedScaling(amax_history_len=5)
    net, x = trained(recipe), torch.randn(6, 16)
    other = ottava.convert(trained(steps=0), recipe)
    for layer in (other[0], other[2]):
        layer.bind(None)
    other.load_state_dict(net.state_dict(), strict=True)
    # The step that it was saved after is behind it: the region begins the next one, as the
    # converted model does.
    expected = net(x)
    with ottava.autocast(DelayedScaling(amax_history_len=5)):
        assert torch.equal(other(x), expected)
    assert equal(net, other)


def test_a_converted_model_enters_its_first_block() -> None:
    net, x = trained(), torch.randn(6, 16)
    other = copy.deepcopy(net)
    expected = net(x)
    with ottava.autocast():
        assert torch.equal(other(x), expected)
    assert equal(net, other)


def train_and_save(folder: Path, steps: int, kill_at: int) -> None:
    """Resumes from FOLDER/checkpoint.pt, saves after every step; told to, kills its process in the
    middle of one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
    ).bfloat16()
    ottava.convert(net, DelayedScaling(amax_history_len=4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    first = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["model"], strict=True)
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    for step in range(first, steps):
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).bfloat16() * (
            1 + step % 5
        )
        loss = net(x).square().mean()
        loss.backward()
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        with (folder / "losses").open("a") as losses:
            losses.write(f"{step} {loss.item()!r}\n")
        temporary = folder / "checkpoint.tmp"
        torch.save(
            {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            temporary,
        )
        temporary.replace(checkpoint)


def in_a_fork(*arguments: Any) -> int:
    """The exit code of a process that trains."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train_and_save(*arguments)
            code = 0
        except Exception:
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_resumed_after_sigkill(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    assert in_a_fork(straight, 14, -1) == 0
    for kill_at in (4, 9):
        assert in_a_fork(killed, 14, kill_at) == -signal.SIGKILL
    assert in_a_fork(killed, 14, -1) == 0
    assert (killed / "losses").read_text() == (straight / "losses").read_text()
    one, two = (
        torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
        for folder in (straight, killed)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_nothing_is_pickled_but_tensors() -> None:
    stream = io.BytesIO()
    torch.save(trained().state_dict(), stream)
    stream.seek(0)
    with torch.serialization.safe_globals([]):
        loaded = torch.load(stream, weights_only=True)
    assert {type(value) for value in loaded.values()} == {torch.Tensor}


def test_a_weight_that_was_made_on_meta_takes_its_scale_from_its_first_values() -> None:
    with torch.device("meta"), ottava.quantized_model_init("delayed"):
        net = ottava.nn.Linear(16, 8, dtype=torch.bfloat16)
    net = ottava.convert(net, "delayed").to_empty(device="cpu")
    assert torch.equal(net.recipe_state.scale, torch.ones(3))
    assert not net.recipe_state.amax_history.any()
    values = torch.randn(8, 16).mul(0.01).bfloat16()
    with torch.no_grad():
        net.weight.copy_(values)
        net.bias.zero_()
    scale = torch.div(torch.tensor(448.0), values.float().abs().max())
    assert net.recipe_state.scale[1] == scale
    assert torch.equal(net.weight._scale_inv[0], torch.div(torch.tensor(1.0), scale))
    net(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    assert net.weight.grad.isfinite().all()
