"""Ranks are forked by one process: it stays, it is replaced when it is gone, and what went wrong is
told by name.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava_testing import CheckFailed, launch
from tests.core.fake_plugins import RECIPE, offers
from tests.published import published

BODY = f"{__name__}:body"


def body(name: str, mesh: Any, folder: Path) -> None:
    """What each rank does, by name."""
    if name == "hangs":
        time.sleep(3600)
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "fails on one" and mesh.get_rank() == 1:
        raise CheckFailed("this one")
    if name.startswith("rank "):
        rank = mesh.get_rank()
        time.sleep(0.0 if name == f"rank {rank} first" else 0.2)
        raise CheckFailed(f"of rank {rank}")
    if name == "raises":
        raise KeyError("a key")
    if name == "reads":
        assert torch.is_grad_enabled()
        assert (folder / "given").read_text() == os.environ["GIVEN"] == str(mesh.size())
    if name == "asks":
        assert type(ottava.get_recipe("late")).__name__ == "Thing"


def test_what_went_wrong_is_told_by_name() -> None:
    names = ["passes", "fails on one", "dies", "raises", "passes too"]
    told = launch.run_on_ranks(BODY, names)
    assert (told["passes"], told["fails on one"], told["passes too"]) == (None, "this one", None)
    assert str(told["dies"]).startswith("dies: a process ended without a result")
    assert str(told["raises"]).startswith("raises, on rank ")
    assert "KeyError: 'a key'" in str(told["raises"])
    assert names[0] == "passes"


def test_of_several_ranks_that_fail_the_first_one_is_told() -> None:
    """The failures of the others are likely to follow from its."""
    told = launch.run_on_ranks(BODY, ["rank 0 first", "rank 1 first"])
    assert told == {"rank 0 first": "of rank 0", "rank 1 first": "of rank 1"}


def test_one_process_serves_all_launches_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have the environment of now, what was prepared for them, and gradients."""
    servers = []
    for world in (2, 3, 2):
        monkeypatch.setenv("GIVEN", str(world))

        def prepare(folder: Path, text: str = str(world)) -> None:
            (folder / "given").write_text(text)

        with torch.no_grad():
            told = launch.run_on_ranks(BODY, ["reads"], world, prepare=prepare)
        assert told == {"reads": None}
        servers.append(launch.start_server())
        if world == 3:
            os.kill(servers[-1].pid, signal.SIGKILL)
            os.waitpid(servers[-1].pid, 0)
    assert servers[0] is servers[1]
    assert servers[1] is not servers[2]


def test_ranks_find_a_package_that_was_installed_later(tmp_path: Path) -> None:
    launch.start_server().kill()
    assert "late" not in {recipe.name for recipe in ottava.list_recipes()}
    launch.start_server()
    entry = offers("late", factory="late_recipe:Thing")
    with published(tmp_path, "late", late=entry, late_recipe=RECIPE):
        assert launch.run_on_ranks(BODY, ["asks"]) == {"asks": None}


def test_a_process_with_other_threads_is_not_forked() -> None:
    """Their locks would stay locked."""
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(launch.may_fork).result()


def test_ranks_that_do_not_end_are_ended() -> None:
    told = launch.run_on_ranks(BODY, ["hangs"], seconds=1)
    words = "the processes did not end in 1 s: do the ranks wait for each other?"
    assert told == {"hangs": f"hangs: {words}"}
