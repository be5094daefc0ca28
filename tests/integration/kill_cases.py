"""Ranks are killed, in steps and while they write checkpoints, and the training ends as if they had
not been."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from forked_ranks import Ranks
from killed_training import KINDS, SAVE_EVERY, reshard, train
from sampling import some
from torch.distributed.device_mesh import DeviceMesh

from ottava.checkpoint import is_complete, latest_checkpoint
from ottava_integrations import read_state

STEPS = some(16, 40)
WORLD = 2
#: Where a rank kills itself: the rank and the point.
POINTS = [
    (0, "mkdir after 1"),
    (0, "write half 1"),
    (1, "write before 2"),
    (1, "fsync before 1"),
    (0, "fsync after 1"),
    (0, "fsync before 2"),
    (0, "rename before 1"),
    (0, "rename after 1"),
    (1, "fsync after 1"),
    (0, "rename after 3"),
    (0, "unlink after 1"),
    (0, "all_reduce after 3"),
]
RANDOM_KILLS = some(1, 8)


def latest_step(folder: Path) -> int:
    """The step of the latest checkpoint, every byte of which is read and checked; 0 for none."""
    found = latest_checkpoint(folder / "checkpoints")
    if found is None:
        return 0
    assert is_complete(found), found
    state, _ = read_state(found)
    assert len(state) > 10
    return int(found.name.removeprefix("step-"))


def losses_of(folder: Path, rank: int) -> dict[int, str]:
    """Losses by step; steps that were done more than once gave the same each time."""
    losses: dict[int, str] = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, loss = line.split()
        assert losses.setdefault(int(step), loss) == loss, (rank, line, losses[int(step)])
    return losses


def lines(folder: Path, name: str) -> list[str]:
    path = folder / name
    return path.read_text().splitlines() if path.exists() else []


def start(kind: str, folder: Path, life: tuple[int, str] | None = None) -> Ranks:
    """Train from the latest checkpoint on; with ``life``, one of the ranks kills itself."""

    def job(mesh: DeviceMesh) -> None:
        point = life[1] if life is not None and life[0] == mesh.get_local_rank() else None
        train(kind, mesh, folder, STEPS, point)

    return Ranks(job, WORLD, folder)


def killed(kind: str, folder: Path, points: list[tuple[int, str]], chance: random.Random) -> None:
    """The same training, never killed and killed over and over: the same to the last bit."""
    plain, often = folder / "plain", folder / "often"
    plain.mkdir()
    often.mkdir()
    start(kind, plain).succeed(120)
    lives: list[Any] = [*some(points, POINTS), *[None] * RANDOM_KILLS]
    # Points of the removal of old checkpoints are not reached before there are some.
    chance.shuffle(lives)
    lives.sort(
        key=lambda life: life is not None and life[1] in ("rename after 3", "unlink after 1")
    )
    known, kills = 0, 0
    for number, life in enumerate(lives):
        if life is None:
            kills += kill_at_random(kind, often, chance, known)
        else:
            ranks = start(kind, often, life)
            assert ranks.wait(60, lambda r=ranks: len(r.codes) > 0), life
            ranks.end(chance.choice([0, 0.02, 5]))
            assert ranks.codes[life[0]] == -signal.SIGKILL, (number, life, ranks.codes)
            kills += 1
        step = latest_step(often)
        assert step >= known, (number, life, step, known)
        # What a rank was told is saved is saved.
        told = max(
            (int(line) for rank in range(WORLD) for line in lines(often, f"saved-{rank}")),
            default=0,
        )
        assert step >= told, (number, life, step, told)
        known = step
    assert known < STEPS - SAVE_EVERY, (
        f"finished after {known} steps, before it was killed for the last time"
    )
    assert kills == len(lives), kills
    start(kind, often).succeed(120)
    assert sorted(p.name for p in (often / "checkpoints").iterdir()) == sorted(
        p.name for p in (plain / "checkpoints").iterdir()
    )
    for rank in range(WORLD):
        expected, seen = losses_of(plain, rank), losses_of(often, rank)
        assert sorted(expected) == list(range(STEPS))
        assert seen == expected, rank
        same_state(torch.load(plain / f"state-{rank}"), torch.load(often / f"state-{rank}"))


def kill_at_random(kind: str, folder: Path, chance: random.Random, known: int) -> int:
    """Kill one rank a random while after a random step."""
    ranks = start(kind, folder)
    target, victim = known + chance.randint(0, 2), chance.randrange(WORLD)
    before = len(lines(folder, "losses-0"))
    assert ranks.wait(60, lambda: len(lines(folder, "losses-0")) > before + target - known), (
        ranks.codes
    )
    time.sleep(chance.uniform(0, 0.03))
    ranks.kill(victim)
    ranks.end(chance.choice([0, 0.02, 5]))
    return int(ranks.codes[victim] == -signal.SIGKILL)


def same_state(expected: dict[str, Any], seen: dict[str, Any]) -> None:
    assert expected.keys() == seen.keys()
    for name, value in expected.items():
        if isinstance(value, tuple):
            assert torch.equal(value[1], seen[name][1]), name
        else:
            assert value == seen[name], (name, value, seen[name])


def resharded(folder: Path) -> None:
    """Bytes, scales, master weights, moments and recipe state."""
    for kind in some(["zero-delayed", "primary-mxfp8"], list(KINDS)):
        (folder / kind).mkdir()
        reshard_one(kind, folder / kind)


def reshard_one(kind: str, folder: Path) -> None:
    """Saved by four ranks, loaded by two and by one: every byte; and training goes on."""
    for world, steps in ((4, 4), (2, 6), (1, 6)):
        Ranks(lambda mesh, s=steps: reshard(kind, mesh, folder, s), world, folder).succeed(120)
    saved = [torch.load(folder / f"state-{rank}") for rank in range(4)]
    for world in (2, 1):
        loaded = [torch.load(folder / f"loaded-{world}-{rank}") for rank in range(world)]
        assert loaded[0].keys() == saved[0].keys()
        sharded, merged = 0, 0
        for name, value in saved[0].items():
            if isinstance(value, tuple) and value[0]:
                sharded += 1
                seen, expected = (
                    torch.cat([held[name][1] for held in of]) for of in (loaded, saved)
                )
                assert torch.equal(seen, expected), (world, name)
                continue
            # What each rank has of its own is rank 0's where there are fewer of them.
            expected = value
            if name.endswith("recipe_state.amax_history"):
                # But for the amaxes of the last step: the next one begins with the largest of all
                # ranks.
                largest = torch.stack([held[name][1].view(torch.float32) for held in saved]).amax(0)
                expected = (False, largest.view(torch.uint8))
                merged += not torch.equal(expected[1], value[1])
            for held in loaded:
                same_state({name: expected}, {name: held[name]})
        assert sharded >= 6
        # Ranks have data of their own, and so amaxes.
        assert merged > 0 or "delayed" not in kind


def zero_is_killed(folder: Path) -> None:
    killed("zero-delayed", folder, POINTS[0::4], random.Random(1))


def primary_is_killed(folder: Path) -> None:
    killed("primary-delayed", folder, POINTS[1::6], random.Random(2))
