"""Trains and saves after every step; told to, it kills itself in the middle of one.

Usage: resume_worker.py FOLDER STEPS [KILL_AT]. Resumes from FOLDER/checkpoint.pt, and appends losses to FOLDER/losses.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import ottava
from ottava_delayed import DelayedScaling


def main(folder: Path, steps: int, kill_at: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).bfloat16()
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
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).bfloat16() * (1 + step % 5)
        loss = net(x).square().mean()
        loss.backward()
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        with (folder / "losses").open("a") as losses:
            losses.write(f"{step} {loss.item()!r}\n")
        temporary = folder / "checkpoint.tmp"
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
        temporary.replace(checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1)
