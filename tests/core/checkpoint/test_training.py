"""A training that is taken up from its checkpoints again and again ends as one that was never
interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ottava
from ottava import checkpoint

STEPS = 42


class Training:
    """Two quantized layers under AdamW, with data that depends on the step alone."""

    def __init__(self, recipe: Any, seed: int) -> None:
        torch.manual_seed(seed)
        with ottava.quantized_model_init(recipe):
            self.net = torch.nn.Sequential(
                ottava.nn.Linear(16, 24, recipe=recipe),
                torch.nn.GELU(),
                ottava.nn.Linear(24, 16, recipe=recipe),
            )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.losses: list[str] = []

    def step(self, step: int) -> None:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = (self.net(x) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
        }

    def resume(self, folder: Path) -> None:
        self.step(0)
        state = checkpoint.load_sharded(
            self.state(), checkpoint.latest_checkpoint(folder) or folder
        )
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]


def test_it_ends_with_the_same_bytes(recipe: Any, contents: Any, tmp_path: Path) -> None:
    plain = Training(recipe, 0)
    for step in range(STEPS):
        plain.step(step)
    often = Training(recipe, 0)
    for step in range(STEPS):
        often.step(step)
        if step % 7 == 6:
            checkpoint.save_step(often.state(), tmp_path, step, keep=2)
            often = Training(recipe, step)
            often.resume(tmp_path)
        if step % 30 == 29:
            checkpoint.save_model(often.net, tmp_path / "model")
            other = Training(recipe, step)
            checkpoint.load_model(other.net, tmp_path / "model")
            assert contents(other.net) == contents(often.net)
    assert often.losses == plain.losses
    assert contents(often.net) == contents(plain.net)
    moments = [entry for of in (often, plain) for entry in [of.optimizer.state_dict()["state"]]]
    assert contents(
        {f"{n}.{k}": v for n, e in moments[0].items() for k, v in e.items()}
    ) == contents({f"{n}.{k}": v for n, e in moments[1].items() for k, v in e.items()})
